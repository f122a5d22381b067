"""Blocks that leave a disk tier: a slot is free only after the removal of its row is committed."""

import threading

import numpy as np

from kvstore.tiers.disk_outcomes import Slots, WriteFault
from kvstore.tiers.failpoints import planted, reach
from kvstore.tiers.slab import Slab
from kvstore.tiers.unlisted import Unlisted
from kvstore.tiers.volume import Volume


class Removals:
    """What is being removed from all volumes. Thread-safe.

    lock: the tier's, for the slab and `uncommitted`: the slots that hold no committed block yet.
    """

    def __init__(
        self, slab: Slab, volumes: list[Volume], lock: threading.RLock, uncommitted: set[int]
    ) -> None:
        self.unlisted = Unlisted()
        self._slab = slab
        self._volumes = volumes
        self._lock = lock
        self._uncommitted = uncommitted

    def remove(self, slots: Slots) -> None:
        """See DiskTier.remove."""
        with self._lock:
            held = slots[self._slab.is_occupied(slots)].tolist()
            chosen = [slot for slot in held if slot not in self._uncommitted]
            chosen, free = self.unlisted.end(chosen)
            self._slab.release(np.array(free, np.int64))
        if planted("reuse_before_commit"):
            self._slab.release(np.array(chosen, np.int64))
        self._remove_rows(chosen)

    def unlist(self, slots: Slots) -> None:
        """See DiskTier.unlist."""
        with self._lock:
            self.unlisted.add(slots.tolist())
        self._remove_rows(slots.tolist())

    def flush(self) -> WriteFault | None:
        """Commit all. Returns: None | CATALOGUE_FULL | CATALOGUE_DEVICE."""
        faults = [volume.commit(None) for volume in self._volumes if volume.journal.removing()]
        return next((WriteFault(fault) for fault in faults if fault is not None), None)

    def committed(self, slots: list[int]) -> None:
        """The removal of these slots' rows is durable: they are free."""
        reach("disk.free")
        if not planted("reuse_before_commit"):
            with self._lock:
                self._slab.release(np.array(self.unlisted.committed(slots), np.int64))

    def _remove_rows(self, slots: list[int]) -> None:
        owners = self._slab.segments_of(np.array(slots, np.int64)) % len(self._volumes)
        for number, volume in enumerate(self._volumes):
            own = [s for s, owner in zip(slots, owners.tolist(), strict=True) if owner == number]
            if own:
                volume.journal.remove(own)
