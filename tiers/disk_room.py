"""Where new blocks go on disk: which volume, which segment, and when a segment is added.

Files are made under a lock of their own, never under the tier's: whoever only counts or frees
slots does not wait for a device.
"""

import threading

import numpy as np

from kvstore.tiers.disk_outcomes import NO_SLOTS, Slots
from kvstore.tiers.slab import Slab
from kvstore.tiers.volume import Volume


class Room:
    """The free slots of a slab over volumes: segment s belongs to volume s modulo their number.

    lock: the tier's, for the slab. reserved: the tier's set of slots that are given out but hold no
    block yet. growing: held by whoever makes, changes or removes a segment; taken before `lock`.
    """

    def __init__(
        self, slab: Slab, volumes: list[Volume], lock: threading.RLock, reserved: set[int]
    ) -> None:
        self.growing = threading.Lock()
        self._slab = slab
        self._volumes = volumes
        self._lock = lock
        self._reserved = reserved
        self.record_bytes = 0  # handed to the devices, failed writes included
        owners = np.arange(slab.segments_max) % len(volumes)
        self._masks = owners == np.arange(len(volumes))[:, None]

    @property
    def written_bytes(self) -> int:
        """Bytes written so far, by this object, to segment files and catalogues."""
        return self.record_bytes + sum(volume.written_bytes for volume in self._volumes)

    def reserve(self, slot_bytes: int, count: int, near: int | None, block_tokens: int) -> Slots:
        """Up to `count` slots, in the volume of `near` while it has room, then in the others."""
        taken = NO_SLOTS
        for number in self._in_order(near):
            more = self._reserve_in(number, slot_bytes, count - len(taken), block_tokens)
            taken = np.concatenate([taken, more])
            if len(taken) >= count:
                break
        return taken

    def has_room(self, slot_bytes: int) -> bool:
        """Whether another segment could be added for a class."""
        return self._slab.fits(slot_bytes) and any(
            self._slab.unassigned(mask) > 0 and self._may_grow(volume, slot_bytes)
            for mask, volume in zip(self._masks, self._volumes, strict=True)
        )

    def reassign(self, segment: int, slot_bytes: int) -> bool:
        """Give a segment without blocks to another class. Returns: whether it could."""
        slab = self._slab
        with self.growing:
            with self._lock:
                out = slab.is_quarantined(segment) or slab.is_retiring(segment)
                if out or not slab.class_of(segment) or len(slab.slots_of(segment)):
                    return False
                slab.retire(segment)  # So that nobody is given a slot of it meanwhile.
            changed = self._volumes[segment % len(self._volumes)].change_class(segment, slot_bytes)
            with self._lock:
                slab.keep(segment)
                if changed:
                    slab.reassign(segment, slot_bytes)
        return changed

    def _in_order(self, near: int | None) -> list[int]:
        """The volumes that can be written, in the order in which to look for slots."""
        usable = [number for number, volume in enumerate(self._volumes) if volume.writable]
        with self._lock:
            usable.sort(key=lambda number: -self._slab.unassigned(self._masks[number]))
        if near is not None:
            home = self._slab.segment_of(near) % len(self._volumes)
            usable.sort(key=lambda number: number != home)
        return usable

    def _reserve_in(self, number: int, slot_bytes: int, count: int, block_tokens: int) -> Slots:
        volume, mask = self._volumes[number], self._masks[number]
        taken = NO_SLOTS
        if volume.knows_rows(slot_bytes, block_tokens):
            taken = self._take(slot_bytes, count, number)
            if len(taken) == count:
                return taken
        with self.growing:
            if not volume.room_for_rows(slot_bytes, block_tokens):
                return taken
            while True:
                more = self._take(slot_bytes, count - len(taken), number)
                taken = np.concatenate([taken, more])
                if len(taken) == count or not self._may_grow(volume, slot_bytes):
                    return taken
                with self._lock:
                    segment = self._slab.next_unassigned(mask)
                if segment is None or not volume.add_segment(segment, slot_bytes):
                    return taken
                with self._lock:
                    self._slab.assign(slot_bytes, mask)

    def _take(self, slot_bytes: int, count: int, number: int) -> Slots:
        with self._lock:
            taken = self._slab.reserve(slot_bytes, count, self._masks[number])
            self._reserved.update(taken.tolist())
        return taken

    @staticmethod
    def _may_grow(volume: Volume, slot_bytes: int) -> bool:
        return volume.writable and volume.growth.allows() and volume.has_room(slot_bytes)
