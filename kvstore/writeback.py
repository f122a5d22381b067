"""Write-back: what host memory alone holds goes to disk in the background, root-first, in groups.

The daily budget (write_budget.py) is asked before a group is taken. Without allowance nothing is
written and host memory is evicted as if the disk took nothing; flush and close leave the rest.

A group is up to GROUP_BLOCKS blocks of one namespace. While one group is committed the next is
written. When the disk is full, colder blocks give way: their removal rides on the next commit, and
a reserve of free slots keeps groups from waiting for it. A block that is colder than all
that it would displace is not written.
"""

import logging
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.config import Config
from kvstore.eviction import Evictor
from kvstore.placement import Placement
from kvstore.plans import Dirty, SpaceFacts
from kvstore.rows import Ints, Longs
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue_row import Rows, rows_of
from kvstore.tiers.disk_outcomes import WriteFailed, WriteFault, Written
from kvstore.tiers.failpoints import planted, reach

LOG = logging.getLogger(__name__)
GROUP_BLOCKS = 64
RESERVE_BLOCKS = 3 * GROUP_BLOCKS  # One being written, one being committed, one to come.
PROBE_BLOCKS = 8  # What may be evicted for a write while writes fail.
WRITERS = 2
CHECK_S = 0.25
RETRY_S = 1.0
FLUSH_FAILURES_MAX = 3  # After so many in a row a flush, or a stop, gives up the rest.
START_AT = 0.5
ROOM_TRIES = 4
NO_SLOTS: Longs = np.zeros(0, np.int64)


@dataclass
class Group:
    """Rows, root first, that are being written. All are held, and so are their parents on disk."""

    number: int
    space: SpaceFacts
    rows: Ints
    host: Longs  # their slots in host memory: kept by the holds, also if a row is dropped meanwhile
    parents: Ints
    age: int  # of its oldest block: only older blocks give way to it
    planned_bytes: int = 0  # of the daily budget


@dataclass
class Ended:
    """A group that was written, or not. outcome: None where there was no slot for any of it."""

    group: Group
    slots: Longs
    outcome: Written | WriteFailed | None


class Writer:
    """The threads that write back. One queue, at most WRITERS groups under way.

    Without `threads` whoever calls `step` writes.
    """

    def __init__(self, placement: Placement, config: Config, *, threads: bool = True) -> None:
        assert placement.disk is not None
        self._placement = placement
        self._disk = placement.disk
        self._config = config
        self._evict = Evictor(placement.index, TierName.DISK)
        self._flying: set[int] = set()  # rows of the groups under way
        self._groups = 0  # taken so far
        self._settled = 0  # finished so far; groups finish in the order they were taken
        self._ended: dict[int, Ended] = {}  # by number: groups that wait for those before them
        self._flushing = 0
        self._closed = False
        self._retry_at = 0.0
        self._failures = 0  # groups in a row that were not written
        self._aside: list[Dirty] = []  # what a flush could not write, to be tried again after it
        self._changed = placement.dirty_changed
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-write-{n}", daemon=True)
            for n in range(WRITERS if threads else 0)
        ]
        for thread in self._threads:
            thread.start()

    def flush(self) -> None:
        """Wait until everything dirty now was written, or could not be."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
        self._step_through()
        with self._changed:
            self._changed.wait_for(lambda: not self._placement.dirty and not self._flying)
            self._flushing -= 1
            if not self._flushing:
                self._placement.dirty.extend(self._aside)
                self._aside.clear()

    def close(self) -> None:
        """Write what is dirty and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._step_through()
        for thread in self._threads:
            thread.join()
        with self._changed:
            left = [self._wanted(batch.rows, batch.generations) for batch in self._aside]
            lost = len(np.unique(np.concatenate(left))) if left else 0
            self._placement.counters.add("evicted_blocks.unwritten", lost)

    def step(self, wait_s: float = 0.0) -> bool:
        """Write the next group if one is due; else wait so long for something to change.

        Returns: whether there was one.
        """
        self._placement.pins.write_if_due()
        with self._changed:
            due = self._is_due()
            group = self._take() if due else None
            if group is None:
                if due and not self._placement.dirty:
                    # Nothing of the queue was left to write: a flush may wait for just this.
                    self._changed.notify_all()
                if wait_s and not self._is_over():
                    self._changed.wait(wait_s)
                return False
        reach("writeback.take")
        self._write(group)
        return True

    def _run(self) -> None:
        while self.step(CHECK_S) or not self._is_over():
            pass

    def _step_through(self) -> None:
        """Without threads: write all that is dirty."""
        while not self._threads and self._placement.dirty:
            self.step()

    def _is_over(self) -> bool:
        return self._closed and not self._placement.dirty

    def _is_due(self) -> bool:
        """Whether to write now: asked to, short of clean memory, or blocks waited long enough."""
        placement = self._placement
        if not placement.dirty or self._groups - self._settled >= WRITERS:
            return False
        if self._closed or self._flushing:
            return True
        if placement.clock.monotonic() < self._retry_at or not placement.budget.ready():
            return False
        if placement.short_of_room:
            placement.short_of_room = False
            return True
        if placement.clock.monotonic() - placement.dirty[0].since_s >= self._config.dirty_age_s:
            return True
        index, host = placement.index, placement.host
        blocks = index.blocks(TierName.HOST)
        dirty_bytes = host.used_bytes * (blocks - index.in_both) // max(1, blocks)
        # Begin at half of what may be dirty: writing must be ahead of the saves when room is short.
        return dirty_bytes > START_AT * (1.0 - self._config.clean_fraction) * host.capacity_bytes

    # --- choosing

    def _take(self) -> Group | None:
        """The next group off the queue, with the ancestors it needs. Under the lock."""
        placement, index = self._placement, self._placement.index
        rows: list[int] = []
        space = -1
        while placement.dirty and len(rows) < GROUP_BLOCKS:
            batch = placement.dirty[0]
            wanted = self._wanted(batch.rows, batch.generations)
            wanted = wanted[::-1] if planted("leaf_first") else wanted
            spaces = index.rows.space[wanted]
            space = int(spaces[0]) if len(wanted) and space < 0 else space
            other = np.flatnonzero(spaces != space)
            end = min(int(other[0]) if len(other) else len(wanted), GROUP_BLOCKS - len(rows))
            rows += wanted[:end].tolist()
            if end == len(wanted):
                placement.dirty.popleft()
                continue
            batch.rows, batch.generations = wanted[end:], index.generations(wanted[end:])
            break
        if not rows:
            return None
        return self._group(np.array(list(dict.fromkeys(rows)), np.int32), space)

    def _wanted(self, rows: Ints, generations: npt.NDArray[np.uint32]) -> Ints:
        """Those of queued rows that are still to be written."""
        index = self._placement.index
        wanted = index.alive(rows, generations)
        wanted &= index.slots(TierName.HOST, rows) >= 0
        wanted &= index.slots(TierName.DISK, rows) < 0
        if self._flying:
            wanted &= ~np.isin(rows, np.fromiter(self._flying, np.int32, len(self._flying)))
        return rows[wanted]

    def _group(self, rows: Ints, space: int) -> Group | None:
        placement, index = self._placement, self._placement.index
        needed = index.missing_ancestors(rows, TierName.DISK)
        needed = rows if planted("leaf_first") else needed
        needed = self._wanted(needed, index.generations(needed))
        if len(needed) > GROUP_BLOCKS:
            placement.mark_dirty_first(needed[GROUP_BLOCKS:])
            needed = needed[:GROUP_BLOCKS]
        slot_bytes = placement.spaces[space].record.slot_bytes
        fit = self._within_budget(needed, slot_bytes)
        if not fit:
            return None
        needed = needed[:fit]
        parents = index.rows.parent[needed]
        parents = np.unique(parents[parents >= 0])
        parents = parents[index.slots(TierName.DISK, parents) >= 0]
        index.hold(needed)
        index.hold(parents)
        self._flying.update(needed.tolist())
        self._groups += 1
        age = int(index.rows.age[needed].min())
        if placement.pins.is_pinned(needed):
            age = index.clock  # Whatever no pin covers gives way to it.
        space_facts = placement.spaces[space]
        host = index.slots(TierName.HOST, needed)
        return Group(self._groups, space_facts, needed, host, parents, age, fit * slot_bytes)

    def _within_budget(self, rows: Ints, slot_bytes: int) -> int:
        """How many of the rows the day's budget lets write; the others are queued again.

        A flush, or a stop, takes what there is and does not wait for more.
        """
        placement, hurry = self._placement, self._closed or self._flushing > 0
        placement.budget.charge(self._disk.room.written_bytes)
        fit = placement.budget.plan(slot_bytes, len(rows), urgent=hurry)
        placement.mark_dirty_first(rows[fit:])
        if not fit and hurry:
            self._aside.extend(placement.dirty)
            placement.dirty.clear()
        return fit

    # --- room

    def _room(self, group: Group) -> Longs:
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

    def _refill_reserve(self, group: Group) -> None:
        """After a group was written: let colder blocks give way, so that the next finds slots.

        Their removal rides on the next commit. Nothing is given up for a write that may fail.
        """
        slot_bytes = group.space.record.slot_bytes
        if not self._disk.has_room(slot_bytes):
            spare = self._disk.free(slot_bytes) + self._disk.removing()
            if spare < RESERVE_BLOCKS:
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

    # --- writing

    def _write(self, group: Group) -> None:
        slots = NO_SLOTS
        outcome: Written | WriteFailed | None = None
        try:
            slots = self._room(group)
            if len(slots):
                outcome = self._write_records(group, slots)
        except Exception:
            # The groups after this one wait for its turn to end, and so do flush and close.
            LOG.exception("a group was not written")
            self._disk.cancel(slots)
            outcome = WriteFailed(WriteFault.IO_ERROR)
        with self._changed:
            self._ended[group.number] = Ended(group, slots, outcome)
            # In turn: a block enters the disk's index only after its parent, in an earlier group.
            while ended := self._ended.pop(self._settled + 1, None):
                self._settle(ended.group, ended.slots, ended.outcome)
                self._settled += 1
            self._changed.notify_all()
        if isinstance(outcome, Written):
            self._refill_reserve(group)

    def _write_records(self, group: Group, slots: Longs) -> Written | WriteFailed:
        placement, record = self._placement, group.space.record
        host = group.host[: len(slots)].tolist()
        headers = np.stack([placement.host.header_view(s, record.header_bytes) for s in host])
        records = [placement.host.record_view(slot, record.slot_bytes) for slot in host]
        number = placement.disk_namespace(group.space)
        journal: Rows = rows_of(record, headers, slots, number, self._disk.per)
        return self._disk.write_group(slots, records, journal)

    def _settle(self, group: Group, slots: Longs, outcome: Written | WriteFailed | None) -> None:
        """Publish a group that was written, or put it aside. Under the lock."""
        placement, rows = self._placement, group.rows[: len(slots)]
        placement.budget.settle(group.planned_bytes, self._disk.room.written_bytes)
        if isinstance(outcome, Written):
            reach("writeback.publish")
            placed = placement.index.place(TierName.DISK, rows, slots)
            self._disk.remove(slots[~placed])
            self._again(rows[~placed])  # Their parents' group failed.
            placement.mark_dirty_first(group.rows[len(slots) :])  # There was room for a part.
            self._failures, placement.writes_fail = 0, False
            placement.counters.add("written_blocks", int(placed.sum()))
            placement.counters.add("written_bytes", outcome.bytes)
        elif outcome is not None:
            placement.counters.add("write_failures")
            placement.drop_disk_slots(outcome.abandoned)
            self._retry_at = placement.clock.monotonic() + RETRY_S
            self._failures, placement.writes_fail = self._failures + 1, True
            self._again(group.rows)
        placement.unhold(group.rows)
        placement.unhold(group.parents)
        self._flying.difference_update(group.rows.tolist())
        placement.write_gauges()

    def _again(self, rows: Ints) -> None:
        """Queue rows that were not written; a flush or a stop does not wait for another try."""
        placement = self._placement
        if self._closed or self._flushing:
            now = placement.clock.monotonic()
            self._aside.append(Dirty(rows, placement.index.generations(rows), now))
            if self._failures >= FLUSH_FAILURES_MAX:
                self._aside.extend(placement.dirty)
                placement.dirty.clear()
        else:
            placement.mark_dirty(rows)
