"""Slots on disk for a group that is to be written: free ones, or those of colder blocks."""

import numpy as np

from kvstore.eviction import Evictor
from kvstore.placement import Placement
from kvstore.plans import Group
from kvstore.rows import Longs
from kvstore.tiers.base import TierName
from kvstore.tiers.failpoints import reach

GROUP_BLOCKS = 64
RESERVE_BLOCKS = 3 * GROUP_BLOCKS  # One being written, one being committed, one to come.
PROBE_BLOCKS = 8  # What may be evicted for a write while writes fail.
ROOM_TRIES = 4
NO_SLOTS: Longs = np.zeros(0, np.int64)


class DiskSlots:
    """What write-back asks for room. Thread-safe: its evictor works under the placement's lock."""

    def __init__(self, placement: Placement) -> None:
        assert placement.disk is not None
        self._placement = placement
        self._disk = placement.disk
        self._evict = Evictor(placement.index, TierName.DISK)

    def take(self, group: Group) -> Longs:
        """Slots for as much of a group as has room. Blocks are evicted only for want of a slot."""
        record, count = group.space.record, len(group.rows)
        near = self._near(group)
        slots = NO_SLOTS
        for tries in range(ROOM_TRIES):
            more = self._disk.reserve(
                record.slot_bytes,
                count - len(slots),
                near=near,
                block_tokens=record.block_tokens,
            )
            slots = np.concatenate([slots, more])
            short = count - len(slots)
            if short == 0 or (tries and len(slots)):
                break
            leaving = self._evict_for(group, short)
            if not len(leaving) and not self._steal_segment(record.slot_bytes):
                break
            self._disk.remove(leaving)
            if self._disk.flush_removals() is not None:
                break
        return slots

    def refill_reserve(self, group: Group) -> None:
        """After a group was written: let colder blocks give way, so that the next finds slots.

        Their removal rides on the next commit. Nothing is given up for a write that may fail.
        """
        slot_bytes = group.space.record.slot_bytes
        if not self._disk.has_room(slot_bytes):
            spare = self._disk.free(slot_bytes) + self._disk.removing()
            if spare < RESERVE_BLOCKS:
                with self._placement.lock:  # A flush may be over: index and slots stay one.
                    self._disk.remove(self._evict_for(group, RESERVE_BLOCKS - spare))

    def _near(self, group: Group) -> int | None:
        """A slot of the group's chain, so that a chain stays on one device."""
        if not len(group.parents):
            return None
        return int(self._placement.index.slots(TierName.DISK, group.parents[:1])[0])

    def _evict_for(self, group: Group, count: int) -> Longs:
        """Take colder blocks out of the index; their slots are still to be removed."""
        placement = self._placement
        with placement.lock:
            index = placement.index
            placement.expire_leases()
            # Never more than a quarter of what is there at once: the write may fail yet.
            count = min(count, max(1, index.blocks(TierName.DISK) // 4))
            if placement.writes_fail:
                count = min(count, PROBE_BLOCKS)
            rows = self._evict.coldest(count, slot_bytes=group.space.record.slot_bytes)
            group.starved &= not len(rows)
            rows = rows[index.rows.age[rows] < group.age]
            left = index.clear(TierName.DISK, rows)
            placement.counters.add("evicted_blocks.disk", len(left.rows))
            reach("disk.evict")
            return left.free_slots

    def _steal_segment(self, slot_bytes: int) -> bool:
        """Give the coldest segment of another slot size to this one."""
        placement, slab = self._placement, self._disk.slab
        with placement.lock:
            segment = self._evict.coldest_segment(slab, slot_bytes)
            if segment is None:
                return False
            first = segment * slab.slots_per_segment_max
            end = first + slab.slots_per_segment_max
            rows = placement.index.rows_in_slots(TierName.DISK, first, end)
            left = placement.index.drop_subtree(rows, TierName.DISK)
            placement.counters.add("evicted_blocks.disk", len(left.rows))
            self._disk.remove(left.free_slots)
        if self._disk.flush_removals() is not None:
            return False
        reach("disk.steal")
        return self._disk.reassign(segment, slot_bytes)
