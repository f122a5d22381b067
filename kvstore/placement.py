"""Where blocks lie and which must go: the one lock of a store, and what happens under it.

Saves, loads and write-back call this; copies and reads are made by them, without the lock. Nothing
here waits for a disk.
"""

import itertools
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.clock import Clock
from kvstore.counters import Counters
from kvstore.disk_watch import DiskWatch
from kvstore.eviction import Evictor
from kvstore.home import Home
from kvstore.index import Index
from kvstore.outcomes import Left
from kvstore.pins import Pins
from kvstore.plans import Dirty, SpaceFacts
from kvstore.rows import VERIFIED, Ints, Longs
from kvstore.sequence import Sequence
from kvstore.ticket import Leases
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.errors import StoreError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.host import HostTier
from kvstore.tiers.pinning import PinnedMemory
from kvstore.write_budget import WriteBudget

if TYPE_CHECKING:
    from kvstore.loading import LoadResult
    from kvstore.tiers.disk import DiskTier

GAUGES = {n: (f"{n}_capacity_bytes", f"{n}_used_bytes", f"{n}_blocks") for n in TierName}
EVICT_BLOCKS = 32  # at a time, from a host tier of many blocks


class Placement:
    """The index and the two tiers under one lock. Methods that change them take the lock."""

    def __init__(
        self,
        index: Index,
        host: HostTier,
        disk: "DiskTier | None",
        counters: Counters,
        *,
        boot: int,
        leases: Leases,
        clock: Clock,
        budget: WriteBudget,
        pin_fraction: float,
        home: Home | None,
    ) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.host = host
        self.disk = disk
        self.counters = counters
        self.started = threading.Event()  # the disk's rows are in the index
        self.dirty_changed = threading.Condition(self.lock)
        self.dirty: deque[Dirty] = deque()  # what write-back has to do, root first
        self.short_of_room = False  # somebody found no slot while there was something to write
        self.writes_fail = False  # the last group was not written
        self.disk_watch = DiskWatch(disk, counters)
        self.spaces: dict[int, SpaceFacts] = {}  # by their number in the index
        # By a space's number: up with every invalidation. What was found, or begun to be computed,
        # under another epoch is neither saved nor given out.
        self.epochs: defaultdict[int, int] = defaultdict(int)
        self.space_digests: dict[int, bytes] = {}  # of all of them, also those not opened yet
        self.leases = leases
        self.clock = clock
        self.budget = budget
        self._evict_host = Evictor(index, TierName.HOST)
        self._generation = itertools.count(boot << 32)
        self.pins = Pins(self, pin_fraction, home)
        self._page_locked: PinnedMemory | None = None  # as the counters have it

    # --- lookups

    def visible_prefix(self, rows: Ints) -> int:
        """How many leading rows are still in some tier."""
        inside = self.index.slots(TierName.HOST, rows) >= 0
        if self.disk is not None:
            inside |= self.index.slots(TierName.DISK, rows) >= 0
        return len(rows) if inside.all() else int(inside.argmin())

    # --- blocks that came

    def new_generations(self, count: int) -> npt.NDArray[np.uint64]:
        """Numbers that no record of this store ever had: uint64 [count]."""
        return np.fromiter(itertools.islice(self._generation, count), np.uint64, count)

    def entered_host(self, rows: Ints) -> None:
        """Rows came into host memory with checked bytes; those not on disk are dirty now."""
        self.index.rows.flags[rows] |= VERIFIED
        if self.disk is not None:
            self.mark_dirty(rows[self.index.slots(TierName.DISK, rows) < 0])
            if self.host.used_bytes * 2 > self.host.capacity_bytes:
                self.dirty_changed.notify_all()

    def mark_dirty(self, rows: Ints) -> None:
        """Queue rows, root first, for write-back."""
        if len(rows) and self.disk is not None:
            self.dirty.append(Dirty(rows, self.index.generations(rows), self.clock.monotonic()))

    def mark_dirty_first(self, rows: Ints) -> None:
        """Put rows back at the head of the queue."""
        if not len(rows):
            return
        self.dirty.appendleft(Dirty(rows, self.index.generations(rows), 0.0))

    # --- slots of host memory

    def host_slots(self, slot_bytes: int, count: int) -> Longs:
        """Up to `count` host slots; the coldest blocks give way, leaf-first, if they are on disk.

        Without a disk tier any block may go. Never waits. Fewer slots mean host memory is full.
        """
        slots = self.host.reserve(slot_bytes, count)
        while len(slots) < count:
            if not self._make_host_room(slot_bytes, count - len(slots)):
                if self.dirty:
                    # A load may be waiting for this: write now, and not when blocks are old.
                    self.short_of_room = True
                    self.dirty_changed.notify_all()
                break
            more = self.host.reserve(slot_bytes, count - len(slots))
            slots = np.concatenate([slots, more])
        return slots

    def _make_host_room(self, slot_bytes: int, count: int) -> bool:
        """Evict blocks of this slot size, or take a segment from another size. Returns success."""
        self.expire_leases()
        clean = self.only_clean()
        # A few more than are needed, of many: choosing costs the same for one and for thirty.
        count = max(count, min(EVICT_BLOCKS, self.index.blocks(TierName.HOST) // 64))
        rows = self._evict_host.coldest(count, slot_bytes=slot_bytes, clean_only=clean)
        left = self.index.clear(TierName.HOST, rows)
        if len(left.rows):
            self.count_evicted(left.rows)
            reach("host.evict")
            self.release_host_slots(left.free_slots)
            return True
        return self._steal_host_segment(slot_bytes)

    def only_clean(self) -> bool:
        """Whether host memory gives up only what is on disk too.

        Not while the disk takes nothing or the day's budget is spent, and not when write-back has
        passed over what is left: blocks that never get to disk would freeze host memory.
        """
        fails = self.writes_fail or self.disk_watch.writes_fail
        writes = not fails and self.budget.ready()
        return self.disk is not None and bool(self.dirty) and writes

    def count_evicted(self, rows: Ints) -> None:
        """Count rows that left host memory, and those of them that never got to disk."""
        self.counters.add("evicted_blocks.host", len(rows))
        if self.disk is not None:
            unwritten = int((self.index.slots(TierName.DISK, rows) < 0).sum())
            self.counters.add("evicted_blocks.unwritten", unwritten)

    def _steal_host_segment(self, slot_bytes: int) -> bool:
        """Give the coldest segment of another size to this one; its blocks and all below leave."""
        slab = self.host.slab
        segment = self._evict_host.coldest_segment(slab, slot_bytes, clean_only=self.only_clean())
        if segment is None:
            return False
        first = segment * slab.slots_per_segment_max
        rows = self.index.rows_in_slots(TierName.HOST, first, first + slab.slots_per_segment_max)
        left = self.index.drop_subtree(rows, TierName.HOST)
        self.count_evicted(left.rows)
        self.release_host_slots(left.free_slots)
        if len(slab.slots_of(segment)):
            return False
        reach("host.steal")
        self.host.reassign(segment, slot_bytes)
        return True

    def release_host_slots(self, slots: Longs) -> None:
        """Give host slots back."""
        if len(slots):
            self.host.release(slots)

    # --- leaving, and being used

    def expire_leases(self) -> None:
        """End leases and pins whose time is over: for lookups, and for whoever needs room."""
        self.pins.settle()
        for rows in self.leases.expired():
            self.unlease(rows)

    def unhold(self, rows: Ints) -> None:
        """End holds; slots whose block left meanwhile are freed now."""
        self._free(self.index.unhold(rows))

    def unlease(self, rows: Ints) -> None:
        """End leases; likewise."""
        self._free(self.index.unlease(rows))

    def _free(self, slots: dict[TierName, Longs]) -> None:
        if TierName.HOST in slots:
            self.release_host_slots(slots[TierName.HOST])
        if TierName.DISK in slots and self.disk is not None:
            self.disk.remove(slots[TierName.DISK])

    def drop_bad(self, row: int, tier: TierName) -> None:
        """A block failed its check: it leaves the tier with its descendants; a save heals it."""
        with self.lock:
            self.counters.add(f"bad_blocks.{tier}")
            rows = np.array([row], np.int32)
            self.left(tier, self.index.drop_subtree(rows, tier, MissReason.EVICTED))

    def left(self, tier: TierName, left: Left) -> None:
        """Blocks left a tier: free their slots; what host memory alone has now is dirty again."""
        if tier is TierName.HOST:
            self.release_host_slots(left.free_slots)
            return
        if self.disk is not None and len(left.free_slots):
            self.disk.remove(left.free_slots)
        only_host = left.rows[self.index.slots(TierName.HOST, left.rows) >= 0]
        order = np.argsort(self.index.rows.depth[only_host], kind="stable")
        self.mark_dirty(only_host[order])

    def drop_disk_slots(self, slots: Longs) -> None:
        """The disk tier gave slots up by itself: their blocks are not on disk any more."""
        if len(slots):
            rows = self.index.rows_of(tier=TierName.DISK)
            lost = rows[np.isin(self.index.slots(TierName.DISK, rows), slots)]
            self.left(TierName.DISK, self.index.drop_subtree(lost, TierName.DISK))

    def disk_namespace(self, space: SpaceFacts) -> int:
        """The catalogue's number of a namespace."""
        assert self.disk is not None
        number = self.disk.namespace_number(space.digest, space.layout, space.label)
        if number is None:
            raise StoreError("the disk tier holds too many namespaces; start a new store")
        return number

    # --- reading

    def unverified(self, rows: Ints) -> Longs:
        """Which of the rows lie in host memory as a former owner left them: places in `rows`."""
        return np.flatnonzero((self.index.rows.flags[rows] & VERIFIED) == 0)

    def mark_verified(self, row: int) -> None:
        """A block of a taken-over arena passed its check."""
        with self.lock:
            self.index.rows.flags[row] |= VERIFIED

    def write_gauges(self) -> None:
        """What the tiers hold now goes into the counters, for readers beside this process."""
        for name, tier in ((TierName.HOST, self.host), (TierName.DISK, self.disk)):
            if tier is not None:
                capacity, used, blocks = GAUGES[name]
                self.counters.set(capacity, tier.capacity_bytes)
                self.counters.set(used, tier.used_bytes)
                self.counters.set(blocks, self.index.blocks(name))
        self.pins.settle()
        locked = self.host.pinned()
        if locked != self._page_locked:
            self._page_locked = locked
            for gauge, value in locked.gauges().items():
                self.counters.set(gauge, value)
        self.disk_watch.note()

    def publish_reads(self, rows: Ints, slots: Longs, good: npt.NDArray[np.bool_]) -> None:
        """Blocks read from disk stay in host memory where their parent is; other slots go back."""
        kept = np.zeros(len(rows), bool)
        kept[good] = self.index.place(TierName.HOST, rows[good], slots[good])
        self.entered_host(rows[kept])
        self.release_host_slots(slots[~kept])
        self.write_gauges()

    def count_load(
        self,
        sequence: Sequence,
        skip: int,
        from_disk: npt.NDArray[np.bool_],
        result: "LoadResult",
    ) -> None:
        """Count a load. A block of a request is one hit, however often it is loaded."""
        block_tokens = sequence.space.layout.block_tokens
        with self.lock:
            fresh = sequence.outcomes.take(skip, skip + len(from_disk))
        disk = int((fresh & from_disk).sum())
        self.counters.add("loads")
        self.counters.add("tokens_hit.disk", disk * block_tokens)
        self.counters.add("tokens_hit.host", (int(fresh.sum()) - disk) * block_tokens)
        for tier, size in result.bytes_by_tier.items():
            self.counters.add(f"loaded_bytes.{tier}", size)

    def count_misses(self, sequence: Sequence, first: int, last: int, reason: MissReason) -> None:
        """Count blocks first..last-1 as missed for a reason, those that were not counted yet."""
        with self.lock:
            fresh = int(sequence.outcomes.take(first, last).sum())
        self.counters.add(f"misses.{reason}", fresh * sequence.space.layout.block_tokens)
