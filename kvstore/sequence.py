"""One request's tokens with their keys, extended as tokens arrive: nothing is hashed twice."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.hashing.chain import MEDIA_BYTES
from kvstore.tiers.errors import TokenError

if TYPE_CHECKING:
    from kvstore.pool import PagePool
    from kvstore.saving import Save
    from kvstore.space import Space
    from kvstore.ticket import Ticket

TOKENS_MAX = 1 << 26
FIRST_CAPACITY = 256


class Outcomes:
    """Which blocks of a request have been counted, as a hit or a miss: each is counted once."""

    def __init__(self) -> None:
        self._counted = np.zeros(0, bool)

    def take(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of blocks first..last-1 are to be counted now: bool [n]. They are counted then."""
        last = max(first, last)
        if last > len(self._counted):
            self._counted = _grown(self._counted, len(self._counted), last + last // 2)
        fresh: npt.NDArray[np.bool_] = ~self._counted[first:last]
        self._counted[first:last] = True
        return fresh


class Sequence:
    """Tokens and block keys of one request. Belongs to one thread at a time.

    Both grow in place and only at their end, so a save can keep views of them while the engine goes
    on; one more token costs the same at any length.
    """

    def __init__(self, space: "Space", tokens: Any, media: Mapping[int, bytes] | None) -> None:
        self.space = space
        self.media = dict(media or {})
        for block, digest in self.media.items():
            if block < 0 or not isinstance(digest, bytes) or len(digest) != MEDIA_BYTES:
                raise TokenError(f"media of block {block} must be a digest of {MEDIA_BYTES} bytes")
        self.length = 0
        self.blocks = 0  # full blocks, all hashed
        self._tokens: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._keys: npt.NDArray[np.uint8] = np.empty((0, 16), np.uint8)
        # What the store keeps with a sequence: see saving.py and loading.py.
        self.saved_blocks = 0
        self.tail: tuple[int, int] | None = None  # (row, generation) of the last saved block
        self.asked_blocks = 0
        self.epoch = space.epoch  # of its namespace, when its blocks began to be computed
        self.outcomes = Outcomes()
        self.extend(tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All tokens: int32 [length]. A view; do not write to it."""
        return self._tokens[: self.length]

    @property
    def keys(self) -> npt.NDArray[np.uint8]:
        """Keys of the full blocks: uint8 [blocks, 16]. A view."""
        return self._keys[: self.blocks]

    def block_tokens(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """Tokens of blocks first..last-1: int32 [n, block_tokens]. A view."""
        size = self.space.layout.block_tokens
        return self._tokens[first * size : last * size].reshape(-1, size)

    def parent_key(self, block: int) -> bytes:
        """Key of the block before `block`; the namespace's root for the first."""
        return self._keys[block - 1].tobytes() if block else self.space.root

    def extend(self, tokens: Any) -> None:
        """Add tokens: an int32 buffer (the fast way), or any sequence of ids in 0..2^31-1.

        Raises TokenError, and adds nothing, for other types, floats, negative or larger ids.
        """
        new = as_tokens(tokens)
        if self.length + len(new) > TOKENS_MAX:
            raise TokenError(f"a sequence holds at most {TOKENS_MAX} tokens")
        end = self.length + len(new)
        if end > len(self._tokens):
            size = self.space.layout.block_tokens
            capacity = max(FIRST_CAPACITY, end + end // 2)
            self._tokens = _grown(self._tokens, self.length, capacity)
            self._keys = _grown(self._keys, self.blocks, capacity // size + 1)
        self._tokens[self.length : end] = new
        self.length = end
        self._hash()

    def renew(self) -> None:
        """Say that every block of this sequence is computed, or loaded, after this call.

        After an invalidation nothing of a sequence that was begun before it is saved, because it
        may have been computed from what was invalidated. An engine that starts a request over
        calls this first.
        """
        self.epoch = self.space.epoch
        self.saved_blocks, self.tail = 0, None

    def _hash(self) -> None:
        full = self.length // self.space.layout.block_tokens
        first = self.blocks
        if full == first:
            return
        media = {i - first: digest for i, digest in self.media.items() if first <= i < full}
        self._keys[first:full] = self.space.chain(
            self.parent_key(first), self.block_tokens(first, full), media or None
        )
        self.blocks = full

    def lookup(self, skip_tokens: int = 0) -> "Ticket":
        """The longest stored prefix, kept by leases: see loading.Ticket. Copies nothing.

        skip_tokens: tokens the engine already holds on its device; counted as device hits.
        """
        return self.space.store.lookup(self, skip_tokens)

    def save(self, pool: "PagePool", page_ids: Any) -> "Save":
        """Save every full block that is new, asynchronously: see saving.Save.

        page_ids: the whole block table, page j holding tokens j * page_tokens and on. Entries that
        were passed must not change, nor their pages be reused, until the save is done.
        """
        return self.space.store.save(self, pool, page_ids)


def as_tokens(tokens: Any) -> npt.NDArray[np.int32]:
    """Token ids as int32 [n]: no copy for an int32 buffer.

    Raises TokenError for floats, booleans, more than one dimension, and ids outside 0..2^31-1.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise TokenError(f"tokens cannot be read as one list of integers: {error}") from None
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1:
        raise TokenError(f"tokens have {array.ndim} dimensions; give one flat list of ids")
    if array.dtype == np.int32:
        if int(array.min()) < 0:
            raise TokenError("a token id is negative; ids lie in 0..2147483647")
        return array
    if array.dtype.kind not in "iu":
        raise TokenError(f"tokens are {array.dtype}; give int32 ids")
    if int(array.min()) < 0 or int(array.max()) > 2**31 - 1:
        raise TokenError("a token id lies outside 0..2147483647; check the tokenizer")
    return array.astype(np.int32)


def _grown(array: npt.NDArray[Any], used: int, capacity: int) -> npt.NDArray[Any]:
    # A new array, never a resize in place: pending saves may still read the old one.
    grown = np.zeros((capacity, *array.shape[1:]), array.dtype)
    grown[:used] = array[:used]
    return grown
