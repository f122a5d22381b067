"""What gives stored bytes their meaning, as one digest. Takes canonical bytes only."""

import hashlib
from collections.abc import Sequence

NAMESPACE_BYTES = 32
KEY_BYTES = 16
FIELDS_MAX = 256
NAME_BYTES_MAX = 256
VALUE_BYTES_MAX = 1 << 24

_NAMESPACE_TAG = b"kvstore namespace v1\0"
_ROOT_TAG = b"kvstore root key v1\0"


def namespace_digest(fields: Sequence[tuple[str, bytes]]) -> bytes:
    """The SHA-256 over a list of named fields, 32 bytes; equal in every process and version.

    fields: (name, value) in an order the caller fixes. Tag, number of fields and all lengths are
    part of what is hashed, so no two different lists have the same input. It never sorts,
    encodes or normalises a value. Raises ValueError for no fields, an empty or repeated name, or
    a list beyond FIELDS_MAX, NAME_BYTES_MAX and VALUE_BYTES_MAX.
    """
    if not 1 <= len(fields) <= FIELDS_MAX:
        raise ValueError(f"a namespace has 1 to {FIELDS_MAX} fields; got {len(fields)}")
    if len({name for name, _ in fields}) != len(fields):
        raise ValueError("a namespace names each field once; give the second one another name")
    digest = hashlib.sha256(_NAMESPACE_TAG + len(fields).to_bytes(4, "little"))
    for name, value in fields:
        encoded = name.encode()
        if not 1 <= len(encoded) <= NAME_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
            raise ValueError(
                f"field {name[:40]!r}: a name has 1 to {NAME_BYTES_MAX} bytes and a value at most "
                f"{VALUE_BYTES_MAX}; pass a digest of a longer value"
            )
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.digest()


def root_key(namespace: bytes) -> bytes:
    """The parent of a namespace's first blocks, 16 bytes, from its digest of 32 bytes.

    Raises ValueError for a digest of another length.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace digest has {NAMESPACE_BYTES} bytes; got {len(namespace)}")
    return hashlib.sha256(_ROOT_TAG + namespace).digest()[:KEY_BYTES]
