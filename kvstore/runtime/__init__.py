"""kvstore.runtime: a small paged-attention engine whose decode loop uses the store."""
