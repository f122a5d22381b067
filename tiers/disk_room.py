"""Where new blocks go on disk: which volume, which segment, and when a segment is added.

The tier's lock guards every call.
"""

import numpy as np

from kvstore.tiers.disk_outcomes import NO_SLOTS, Slots
from kvstore.tiers.slab import Slab
from kvstore.tiers.volume import Volume


class Room:
    """The free slots of a slab over volumes: segment s belongs to volume s modulo their number."""

    def __init__(self, slab: Slab, volumes: list[Volume]) -> None:
        self._slab = slab
        self._volumes = volumes
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
            self._slab.unassigned(mask) > 0 and volume.writable and volume.has_room(slot_bytes)
            for mask, volume in zip(self._masks, self._volumes, strict=True)
        )

    def reassign(self, segment: int, slot_bytes: int) -> bool:
        """Give a segment without blocks to another class. Returns: whether it could."""
        slab = self._slab
        if slab.is_quarantined(segment) or not slab.class_of(segment):
            return False
        if len(slab.slots_of(segment)):
            return False
        if not self._volumes[segment % len(self._volumes)].change_class(segment, slot_bytes):
            return False
        slab.reassign(segment, slot_bytes)
        return True

    def _in_order(self, near: int | None) -> list[int]:
        """The volumes that can be written, in the order in which to look for slots."""
        usable = [number for number, volume in enumerate(self._volumes) if volume.writable]
        usable.sort(key=lambda number: -self._slab.unassigned(self._masks[number]))
        if near is not None:
            home = self._slab.segment_of(near) % len(self._volumes)
            usable.sort(key=lambda number: number != home)
        return usable

    def _reserve_in(self, number: int, slot_bytes: int, count: int, block_tokens: int) -> Slots:
        slab, volume, mask = self._slab, self._volumes[number], self._masks[number]
        if not volume.room_for_rows(slot_bytes, block_tokens):
            return NO_SLOTS
        taken = slab.reserve(slot_bytes, count, mask)
        while len(taken) < count and volume.has_room(slot_bytes):
            segment = slab.assign(slot_bytes, mask)
            if segment is None:
                break
            if not volume.add_segment(segment, slot_bytes):
                slab.unassign(segment)
                break
            more = slab.reserve(slot_bytes, count - len(taken), mask)
            taken = np.concatenate([taken, more])
        return taken
