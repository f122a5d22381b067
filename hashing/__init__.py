"""kvstore.hashing: block keys, namespaces and checksums."""
