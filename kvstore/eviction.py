"""Which blocks give way: the coldest leaves first (LRU), and the coldest segment of another size.

Only a leaf of a tier (a block without children there) can go, so the tier stays prefix-closed. The
leaves with the smallest ages are selected from whole columns, thousands at a time, and checked
again one by one when their turn comes: a selection costs milliseconds at 1,000,000 rows, a victim
a few microseconds. When its last child has been chosen, a parent joins the same queue.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.index import Index
from kvstore.rows import KEPT, Ints, Rows
from kvstore.tiers.base import TierName
from kvstore.tiers.slab import Slab

SELECTED_MIN = 256  # leaves a selection takes: between these, and one in SELECTED_SHARE of all rows
SELECTED_MAX = 16384
SELECTED_SHARE = 64

Mask = npt.NDArray[np.bool_]


@dataclass
class Queue:
    """Candidates of one filter, coldest first: (age, row) as a heap.

    It holds every leaf that the filter admits and whose age is at most `horizon`. Older ones that
    came to be admitted since it was filled (they were in use, dirty, or not in the tier) wait for
    the next filling. Entries may have become stale. `changes`: the index's count at the filling.
    """

    heap: list[tuple[int, int]] = field(default_factory=list)
    horizon: int = -1
    complete: bool = False  # every leaf there was is in it
    changes: int = -1
    offered: list[tuple[int, int]] = field(default_factory=list)  # given out by the last call


class Evictor:
    """Chooses victims of one tier of an index, under the same lock. It evicts nothing itself."""

    def __init__(self, index: Index, tier: TierName) -> None:
        self._index = index
        self._tier = index.number(tier)
        self._queues: dict[tuple[int | None, bool], Queue] = {}
        # The last search for a segment that found none, and the index's state then.
        self._no_segment: tuple[int, bool, int] | None = None

    def coldest(
        self,
        count: int,
        *,
        slot_bytes: int | None = None,
        clean_only: bool = False,
        exclude: Iterable[int] = (),
    ) -> Ints:
        """Up to `count` rows that may leave the tier now, in this order: coldest leaves first.

        slot_bytes: only blocks with slots of this size. clean_only: only blocks that the other tier
        has too. exclude: rows not to be chosen. Leased, held and pinned rows never are. A row whose
        children in the tier come before it in the answer counts as a leaf. Fewer rows, or none,
        mean that there are no more. Rows that are not taken out are offered again.
        """
        queue = self._queues.setdefault((slot_bytes, clean_only), Queue())
        for entry in queue.offered:
            heapq.heappush(queue.heap, entry)
        excluded = set(exclude)
        search = _Search(self._index.rows, self._tier, clean_only, excluded)
        search.take(queue, count)
        if len(search.chosen) < count and not self._is_exhausted(queue):
            # The selection finds again what was chosen already, and what is excluded.
            self._fill(queue, slot_bytes, clean_only, 2 * count + len(excluded))
            for age, row in search.late:
                if age <= queue.horizon:
                    heapq.heappush(queue.heap, (age, row))
            search.take(queue, count)
        queue.offered = search.chosen
        return np.array([row for _, row in search.chosen], np.int32)

    def _is_exhausted(self, queue: Queue) -> bool:
        """Whether another selection would find nothing more, because nothing has changed."""
        return queue.complete and queue.changes == self._index.changes

    def _fill(self, queue: Queue, slot_bytes: int | None, clean_only: bool, least: int) -> None:
        rows, high = self._index.rows, self._index.rows.high
        leaves = np.flatnonzero(rows.children[self._tier][:high] == 0)
        if clean_only:
            leaves = leaves[rows.slots[1 - self._tier][leaves] >= 0]
        if slot_bytes is not None and (rows.space_slot_bytes != slot_bytes).any():
            leaves = leaves[rows.space_slot_bytes[rows.space[leaves]] == slot_bytes]
        leaves = leaves[~self._bound(leaves.astype(np.int32))]
        ages = rows.age[leaves]
        most = max(least, min(max(SELECTED_MIN, high // SELECTED_SHARE), SELECTED_MAX))
        queue.complete = len(leaves) <= most
        queue.horizon = self._index.clock
        if not queue.complete:
            coldest = np.argpartition(ages, most)[:most]
            leaves, ages = leaves[coldest], ages[coldest]
            queue.horizon = int(ages.max())
        order = np.argsort(ages, kind="stable")
        # Sorted lists are heaps already.
        queue.heap = list(zip(ages[order].tolist(), leaves[order].tolist(), strict=True))
        queue.changes = self._index.changes

    def coldest_segment(
        self,
        slab: Slab,
        slot_bytes: int,
        *,
        clean_only: bool = False,
        among: Mask | None = None,
    ) -> int | None:
        """The segment of another size whose latest used block is the oldest; None if none may go.

        slot_bytes: 0 for a segment of any size, as the tier shrinks: pinned blocks may go then,
        where no segment is without. among: bool [segments], those to choose from.

        A segment may go if every slot taken in it belongs to a row, and none of these rows and
        their descendants in the tier is leased, held or pinned (clean_only: or not in the other).
        Scans all rows: tens to hundreds of milliseconds at 1,000,000, for the thousands it frees;
        not again while nothing has changed.
        """
        question = (slot_bytes, clean_only, self._index.changes)
        others = [
            segment
            for size in slab.classes()
            if size != slot_bytes
            for segment in slab.segments_of_class(size).tolist()
            if among is None or among[segment]
        ]
        if not others or (among is None and question == self._no_segment):
            return None
        segment = self._search_segments(slab, others, clean_only)
        if segment is None and slot_bytes == 0:
            segment = self._search_segments(slab, others, clean_only, pinned_stay=False)
        if among is None:
            self._no_segment = question if segment is None else None
        return segment

    def _search_segments(
        self, slab: Slab, among: list[int], clean_only: bool, *, pinned_stay: bool = True
    ) -> int | None:
        rows = self._index.rows
        slots = rows.slots[self._tier][: rows.high]
        here = np.flatnonzero(slots >= 0).astype(np.int32)
        segment = slots[here] // slab.slots_per_segment_max
        bound = self._bound(here) if pinned_stay else rows.in_use(here)
        if clean_only:
            bound |= rows.slots[1 - self._tier][here] < 0
        barred = np.bincount(segment[bound], minlength=slab.segments_max) > 0
        if barred[among].all():
            return None
        stays = self._with_ancestors(here[bound])
        barred = np.bincount(segment[stays[here]], minlength=slab.segments_max) > 0
        latest = np.full(slab.segments_max, np.iinfo(np.int64).min)
        np.maximum.at(latest, segment, rows.age[here])
        count = np.bincount(segment, minlength=slab.segments_max)
        for candidate in sorted(among, key=lambda segment: int(latest[segment])):
            if not barred[candidate] and len(slab.slots_of(candidate)) == count[candidate]:
                return candidate
        return None

    def _bound(self, these: Ints) -> Mask:
        """Which rows may not leave the tier, whatever their age: used or pinned."""
        rows = self._index.rows
        bound: Mask = rows.in_use(these) | ((rows.pinned[these] & KEPT[self._tier]) != 0)
        return bound

    def _with_ancestors(self, level: Ints) -> Mask:
        """These rows and all their ancestors: bool [rows]."""
        parents, marked = self._index.rows.parent, np.zeros(self._index.rows.high, bool)
        while len(level):
            marked[level] = True
            level = parents[level]
            level = np.unique(level[level >= 0])
            level = level[~marked[level]]
        return marked


class _Search:
    """One call's choice: takes from a queue, as if every row chosen had left already."""

    def __init__(self, rows: Rows, tier: int, clean_only: bool, exclude: set[int]) -> None:
        self._children = rows.children[tier].data
        self._other = rows.slots[1 - tier].data if clean_only else None
        self._parent = rows.parent.data
        self._age = rows.age.data
        self._leases, self._holds = rows.leases.data, rows.holds.data
        self._pinned, self._kept = rows.pinned.data, KEPT[tier]
        self._exclude = exclude
        self._remaining: dict[int, int] = {}  # children a parent would have left
        self._taken: set[int] = set()
        self.chosen: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []  # parents that came free beyond the horizon
        self._passed: list[tuple[int, int]] = []

    def take(self, queue: Queue, count: int) -> None:
        """Move up to `count` rows in all from the queue to `chosen`, coldest first."""
        while queue.heap and len(self.chosen) < count:
            age, row = heapq.heappop(queue.heap)
            if row in self._taken or not self._may_go(queue, row, age):
                continue
            if row in self._exclude:
                self._passed.append((age, row))
                continue
            self._taken.add(row)
            self.chosen.append((age, row))
            self._release_parent(queue, row, age)
        for entry in self._passed:
            heapq.heappush(queue.heap, entry)
        self._passed.clear()

    def _may_go(self, queue: Queue, row: int, age: int) -> bool:
        if self._leases[row] or self._holds[row] or self._pinned[row] & self._kept:
            return False
        if self._remaining.get(row, self._children[row]) != 0:
            return False
        if self._other is not None and self._other[row] < 0:
            return False
        # A parent is queued with its last child's age if that is later, never with an earlier one.
        # So an age beyond the queued one means a row that was touched, or reused, since.
        if self._age[row] > age:
            queue.complete = False
            return False
        return True

    def _release_parent(self, queue: Queue, row: int, age: int) -> None:
        parent = self._parent[row]
        if parent < 0:
            return
        left = self._remaining.get(parent, self._children[parent]) - 1
        self._remaining[parent] = left
        if left == 0:
            entry = max(age, self._age[parent]), parent
            if entry[0] <= queue.horizon:
                heapq.heappush(queue.heap, entry)
            else:
                self.late.append(entry)
