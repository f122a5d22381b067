"""What the store remembers of blocks that are gone: enough to tell evicted from never stored."""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.tiers.base import MissReason

Keys = npt.NDArray[np.uint64]

ENTRIES = 1 << 20  # 4 MiB: about the last million blocks that left
FINGERPRINT_MASK: Final = np.uint64(0x7FFFFFFF)


class Tombstones:
    """A direct-mapped table of 31-bit fingerprints: a newer one replaces what lies in its place.

    So memory is fixed, an old tombstone may be forgotten (the block then counts as ABSENT), and
    once in about two thousand million misses a block that never was counts as EVICTED. Only
    counters depend on it, never what is served.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        if entries & (entries - 1):
            raise ValueError("entries must be a power of two")
        self._table = np.zeros(entries, np.uint32)
        self._mask = np.uint64(entries - 1)

    def add(self, key1: Keys, reason: MissReason) -> None:
        """Remember blocks as EVICTED or INVALIDATED, by their keys' second halves: uint64 [n]."""
        if reason not in (MissReason.EVICTED, MissReason.INVALIDATED):
            raise ValueError("a block leaves as EVICTED or as INVALIDATED")
        place = (key1 >> np.uint64(32)) & self._mask
        invalidated = np.uint64(reason is MissReason.INVALIDATED)
        fingerprint = np.maximum(key1 & FINGERPRINT_MASK, np.uint64(1))  # 0 is an empty entry
        self._table[place] = (fingerprint << np.uint64(1) | invalidated).astype(np.uint32)

    def reason(self, key: bytes) -> MissReason:
        """Why a block with this key is not there.

        Returns: EVICTED, INVALIDATED, or ABSENT.
        """
        key1 = int.from_bytes(key[8:], "little")
        entry = int(self._table[(key1 >> 32) & int(self._mask)])
        if entry >> 1 != max(key1 & int(FINGERPRINT_MASK), 1):
            return MissReason.ABSENT
        return MissReason.INVALIDATED if entry & 1 else MissReason.EVICTED
