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
from kvstore.disk_slots import GROUP_BLOCKS, NO_SLOTS, DiskSlots
from kvstore.placement import Placement
from kvstore.plans import Dirty, Group
from kvstore.rows import Ints, Longs
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue_row import Rows, rows_of
from kvstore.tiers.disk_outcomes import WriteFailed, WriteFault, Written
from kvstore.tiers.failpoints import planted, reach

LOG = logging.getLogger(__name__)
WRITERS = 2
CHECK_S = 0.25
RETRY_S = 0.25  # After a group that was not written; the disk's own back-off may be longer.
FLUSH_FAILURES_MAX = 3  # After so many in a row a flush, or a stop, gives up the rest.
START_AT = 0.5


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
        self._slots = DiskSlots(placement)
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
        self._disk.health.retry_now()
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
        self._disk.health.retry_now()
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
        self._tend()
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

    def _tend(self) -> None:
        """Let the disk tier bring back what failed; blocks that it lost leave the index."""
        placement = self._placement
        if placement.started.is_set():
            lost = self._disk.tend()
            if len(lost):
                with placement.lock:
                    placement.drop_disk_slots(lost)
            placement.disk_watch.note()

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
        if not self._disk.health.takes_writes:
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
        needed, rest = needed[:GROUP_BLOCKS], needed[GROUP_BLOCKS:]
        slot_bytes = placement.spaces[space].record.slot_bytes
        fit = self._within_budget(np.concatenate([needed, rest]), len(needed), slot_bytes)
        if not fit:
            return None
        rest = rest[: len(rest) if fit == len(needed) else 0]  # Or it is queued again already.
        left = Dirty(rest, index.generations(rest), 0.0)
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
        return Group(self._groups, space_facts, needed, host, parents, age, fit * slot_bytes, left)

    def _within_budget(self, rows: Ints, count: int, slot_bytes: int) -> int:
        """How many of the first `count` rows the day's budget lets write.

        If not all of them, the others are queued again, with all rows after them.

        A flush, or a stop, takes what there is and does not wait for more.
        """
        placement, hurry = self._placement, self._closed or self._flushing > 0
        placement.budget.charge(self._disk.room.written_bytes)
        fit = placement.budget.plan(slot_bytes, count, urgent=hurry)
        if fit < count:
            placement.mark_dirty_first(rows[fit:])
        if not fit and hurry:
            self._aside.extend(placement.dirty)
            placement.dirty.clear()
        return fit

    # --- writing

    def _write(self, group: Group) -> None:
        slots = NO_SLOTS
        outcome: Written | WriteFailed | None = None
        try:
            if self._disk.health.takes_writes:
                slots = self._slots.take(group)
            else:
                outcome = WriteFailed(WriteFault.IO_ERROR)
            if len(slots):
                outcome = self._write_records(group, slots)
            elif group.starved and self._disk.health.growth_fails:
                outcome = WriteFailed(WriteFault.NO_SPACE)
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
            self._slots.refill_reserve(group)

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
        if isinstance(outcome, Written) and self._disk.abandoned(slots):
            self._disk.remove(slots)
            outcome = WriteFailed(WriteFault.SYNC_FAILED)
        # Before what is put aside: a flush that gives up gives these up as well.
        rest = group.rest if outcome is not None else self._not_below(group)
        if len(rest.rows):
            placement.dirty.appendleft(rest)
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

    def _not_below(self, group: Group) -> Dirty:
        """What of a group's rest does not need a row of it: no slot was found for any of these.

        The others are passed over like it. Queued again, they would ask for its rows for ever.
        """
        parents = self._placement.index.rows.parent[group.rest.rows].tolist()
        passed = set(group.rows.tolist())
        for row, parent in zip(group.rest.rows.tolist(), parents, strict=True):  # root first
            if parent in passed:
                passed.add(row)
        stays = ~np.isin(group.rest.rows, np.fromiter(passed, np.int32, len(passed)))
        return Dirty(group.rest.rows[stays], group.rest.generations[stays], 0.0)

    def _again(self, rows: Ints) -> None:
        """Queue rows that were not written; a flush or a stop does not wait for another try."""
        placement = self._placement
        if not len(rows):
            return
        if self._closed or self._flushing:
            now = placement.clock.monotonic()
            self._aside.append(Dirty(rows, placement.index.generations(rows), now))
            if self._failures >= FLUSH_FAILURES_MAX:
                self._aside.extend(placement.dirty)
                placement.dirty.clear()
        else:
            placement.mark_dirty(rows)
