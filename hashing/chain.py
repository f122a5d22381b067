"""Block keys: a block's key is a hash of its parent's key and its own tokens.

    key(i) = H(key(i - 1) || tokens of block i as little-endian int32 || its media digest, if any)

The namespace's root key stands before the first block, and block_tokens is part of the
namespace, so inputs with and without media cannot be confused: their lengths differ. A key is a
hint and never a proof: whoever serves a block compares the tokens too.
"""

import ctypes
import hashlib
import sys
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.hashing.namespace import KEY_BYTES
from kvstore.native import build
from kvstore.native.address import address_of

HashName = Literal["xxh3-128", "sha256"]
Keys = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]
ChainFunction = Callable[[bytes, Tokens, dict[int, bytes] | None], Keys]

MEDIA_BYTES = 32

if sys.byteorder != "little":
    raise ImportError("kvstore hashes and stores little-endian; it does not run on this machine")


class Chain:
    """Keys of consecutive blocks under one hash. Has no state; use it from any thread.

    name: `xxh3-128`, fast, for one's own hosts; `sha256`, truncated to 128 bits, for stores shared
    by hosts that do not trust each other.
    """

    def __init__(self, name: HashName) -> None:
        if name not in get_args(HashName):
            raise ValueError(
                f"hash {name!r} is unknown; use one of {', '.join(get_args(HashName))}"
            )
        self.name: HashName = name

    def extend(self, parent: bytes, tokens: Tokens, media: dict[int, bytes] | None = None) -> Keys:
        """Keys of n more blocks below parent: uint8 [n, 16].

        parent: 16 bytes, the key of the block before or the root key. tokens: int32
        [n, block_tokens], C-contiguous, never copied or changed. media: for blocks (0..n-1, counted
        within this call) that hold media, the 32-byte digest of it. Raises ValueError for other
        types, shapes and lengths.
        """
        _check(parent, tokens, media)
        if self.name == "sha256":
            return _each_block(_sha256, parent, tokens, media)
        keys = np.empty((len(tokens), KEY_BYTES), np.uint8)
        at = 0
        for block in [*sorted(media or ()), len(tokens)]:
            parent = _extend_plain(parent, tokens[at:block], keys[at:block])
            if media and block < len(tokens):
                parent = xxhash.xxh3_128_digest(parent + tokens[block].tobytes() + media[block])
                keys[block] = np.frombuffer(parent, np.uint8)
            at = block + 1
        return keys


def chain_function(name: HashName) -> ChainFunction:
    """The function that makes keys under a hash: (parent, tokens, media) -> uint8 [n, 16]."""
    return Chain(name).extend


def _check(parent: bytes, tokens: Tokens, media: dict[int, bytes] | None) -> None:
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a parent key has {KEY_BYTES} bytes; got {len(parent)}")
    if tokens.dtype != np.int32 or tokens.ndim != 2 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"tokens must be a C-contiguous int32 array [blocks, block_tokens]; "
            f"got {tokens.dtype} {tokens.shape}"
        )
    if tokens.shape[1] == 0:
        raise ValueError("block_tokens is zero; a block has at least one token")
    for block, digest in (media or {}).items():
        if not 0 <= block < len(tokens) or len(digest) != MEDIA_BYTES:
            raise ValueError(
                f"media takes {MEDIA_BYTES}-byte digests of blocks 0..{len(tokens) - 1}; "
                f"got {len(digest)} bytes for block {block}"
            )


def _extend_plain(parent: bytes, tokens: Tokens, keys: Keys) -> bytes:
    """Fill keys of blocks without media under xxh3-128. Returns: the last key, or parent."""
    blocks, block_tokens = tokens.shape
    if blocks == 0:
        return parent
    library = build.load()
    if library is None:
        keys[:] = _each_block(_xxh3_128, parent, tokens, None)
    else:
        library.kv_chain(
            parent,
            ctypes.c_void_p(address_of(tokens)),
            ctypes.c_int64(blocks),
            ctypes.c_int64(block_tokens),
            ctypes.c_void_p(address_of(keys)),
        )
    return bytes(keys[-1])


def _each_block(
    digest: Callable[[bytes], bytes],
    parent: bytes,
    tokens: Tokens,
    media: dict[int, bytes] | None,
) -> Keys:
    data = tokens.tobytes()
    step = 4 * tokens.shape[1]
    found = []
    for block in range(len(tokens)):
        piece = parent + data[block * step : (block + 1) * step]
        if media and block in media:
            piece += media[block]
        parent = digest(piece)
        found.append(parent)
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, KEY_BYTES).copy()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:KEY_BYTES]
