"""Which slots are free: segments of one size, each given to one size class. Pure; no I/O, no locks.

A class is an exact `slot_bytes`. A slot id is `segment * slots_per_segment_max + index`, where
`slots_per_segment_max` is fixed for the slab, so ids stay unique when a segment changes its class.

    free(class) + occupied(class) = capacity(class), always; a quarantined segment counts with the
    slots that are still occupied in it, and with nothing once they are released.
"""

import numpy as np
import numpy.typing as npt

SLOT_BYTES_MIN = 8192  # One page of header and one page of payload: the smallest record.
SLOT_ALIGN = 4096
PROBES_MAX = 8  # Segments searched for one run before a reservation is scattered.

Slots = npt.NDArray[np.int64]
SegmentMask = npt.NDArray[np.bool_]


class Slab:
    """Slots of `segments_max` segments of `segment_bytes` each.

    Not thread-safe: its owner's lock guards it.

    segments_limit: how many segments may belong to a class at once; it may be moved at any time,
    also below what there is: then no more are assigned until enough were unassigned.

    first_slot_at: bytes at the start of every segment that hold no slot (a file header, or 0).
    A misused call (a slot released twice, a class that does not fit) raises ValueError and changes
    nothing.
    """

    def __init__(self, segments_max: int, segment_bytes: int, first_slot_at: int) -> None:
        if segments_max < 0 or first_slot_at < 0 or segment_bytes < first_slot_at + SLOT_BYTES_MIN:
            raise ValueError(f"a segment of {segment_bytes} bytes cannot hold one slot")
        self.segments_max = self.segments_limit = segments_max
        self.segment_bytes = segment_bytes
        self.first_slot_at = first_slot_at
        self.slots_per_segment_max = segment_bytes // SLOT_BYTES_MIN
        self._slot_bytes = np.zeros(segments_max, np.int64)
        self._free = np.zeros(segments_max, np.int32)
        self._occupied = np.zeros(segments_max, np.int32)
        self._quarantined = np.zeros(segments_max, np.bool_)
        self._retiring = np.zeros(segments_max, np.bool_)
        # Per assigned segment one byte a slot, True = free. Separate arrays, because their sizes
        # differ by class: the worst case for all segments would be far more than what is used.
        self._maps: list[SegmentMask | None] = [None] * segments_max
        # Per class a segment below which the class has no free slot: where a search starts.
        self._lowest: dict[int, int] = {}

    # --- segments and classes

    def fits(self, slot_bytes: int) -> bool:
        """Whether a segment can hold a slot of this size."""
        return (
            slot_bytes >= SLOT_BYTES_MIN
            and slot_bytes % SLOT_ALIGN == 0
            and slot_bytes <= self.segment_bytes - self.first_slot_at
        )

    def slots_in_segment(self, slot_bytes: int) -> int:
        """How many slots of this size one segment has."""
        return (self.segment_bytes - self.first_slot_at) // slot_bytes

    def class_of(self, segment: int) -> int:
        """The slot_bytes of a segment, or 0 while it belongs to no class."""
        return int(self._slot_bytes[self._known(segment)])

    def classes(self) -> list[int]:
        """The slot_bytes of all classes that have a segment, ascending."""
        return [int(size) for size in np.unique(self._slot_bytes) if size]

    def segments_of_class(self, slot_bytes: int) -> npt.NDArray[np.int64]:
        """The segments of a class, without quarantined and retiring ones, ascending: int64 [n]."""
        out = self._quarantined | self._retiring
        return np.flatnonzero((self._slot_bytes == slot_bytes) & ~out)

    def assigned(self) -> npt.NDArray[np.int64]:
        """The segments that belong to a class, ascending: int64 [n]."""
        return np.flatnonzero(self._slot_bytes)

    def is_quarantined(self, segment: int) -> bool:
        """Whether a segment was abandoned."""
        return bool(self._quarantined[self._known(segment)])

    def unassigned(self, among: SegmentMask | None = None) -> int:
        """How many segments belong to no class yet."""
        return len(self._unassigned(among))

    def next_unassigned(self, among: SegmentMask | None = None) -> int | None:
        """The segment that `assign` would give, or None."""
        left = self._unassigned(among)
        full = not len(left) or len(self.assigned()) >= self.segments_limit
        return None if full else int(left[0])

    def assign(self, slot_bytes: int, among: SegmentMask | None = None) -> int | None:
        """Give the lowest unassigned segment to a class.

        among: bool [segments_max], the segments to choose from; None for all.

        Returns: the segment, or None when none is left, or the limit is reached.
        """
        self._refuse_misfit(slot_bytes)
        segment = self.next_unassigned(among)
        if segment is not None:
            self._give(segment, slot_bytes)
        return segment

    def reassign(self, segment: int, slot_bytes: int) -> None:
        """Give an assigned segment without occupied slots to another class."""
        self._refuse_misfit(slot_bytes)
        self._refuse_unmovable(segment)
        self._give(segment, slot_bytes)

    def unassign(self, segment: int) -> None:
        """Take a segment without occupied slots from its class, as if never assigned."""
        self._refuse_unmovable(segment, retiring=self._retiring[segment])
        self._retiring[segment] = False
        self._slot_bytes[segment] = self._free[segment] = 0
        self._maps[segment] = None

    def quarantine(self, segment: int) -> None:
        """Abandon a segment: no slot of it is handed out again; occupied ones may be released."""
        self._quarantined[self._known(segment)] = True
        self._retiring[segment] = False
        self._free[segment] = 0

    def retire(self, segment: int) -> None:
        """Hand out no more slots of an assigned segment, until `unassign` or `keep`."""
        self._refuse_unmovable(segment, empty=False)
        self._retiring[segment] = True
        self._free[segment] = 0

    def is_retiring(self, segment: int) -> bool:
        """Whether a segment was told to retire, and neither kept nor abandoned since."""
        return bool(self._retiring[self._known(segment)])

    def keep(self, segment: int) -> None:
        """A segment that was to retire stays: its free slots can be had again."""
        if not self.is_retiring(segment):
            raise ValueError(f"segment {segment} was not about to retire")
        self._retiring[segment] = False
        self._free[segment] = np.count_nonzero(self._map(segment))
        self._lower(segment)

    def reclaim(self, segment: int) -> None:
        """Take a quarantined segment without occupied slots back, as if never assigned."""
        if not self.is_quarantined(segment) or self._occupied[segment]:
            raise ValueError(f"segment {segment} is not quarantined, or holds occupied slots")
        self._quarantined[segment] = False
        self._slot_bytes[segment] = self._free[segment] = 0
        self._maps[segment] = None

    def quarantined(self) -> npt.NDArray[np.int64]:
        """The abandoned segments, ascending: int64 [n]."""
        return np.flatnonzero(self._quarantined)

    # --- slots

    def reserve(self, slot_bytes: int, count: int, among: SegmentMask | None = None) -> Slots:
        """Occupy up to `count` free slots of a class: int64 [<= count]. Assigns no segment.

        One contiguous run in the lowest segment that has one is preferred; else the slots come from
        the emptiest segments, the lowest free slots of each first. `among` limits the segments.
        """
        if count <= 0:
            return np.zeros(0, np.int64)
        lowest = self._lowest.get(slot_bytes, -1)
        if among is None and lowest >= 0 and self._slot_bytes[lowest] == slot_bytes:
            start = _first_run(self._map(lowest), count) if self._free[lowest] >= count else -1
            if start >= 0:
                return self._occupy(lowest, np.arange(start, start + count))
        usable = (self._slot_bytes == slot_bytes) & (self._free > 0)
        segments = np.flatnonzero(usable if among is None else usable & among)
        if not len(segments):
            return np.zeros(0, np.int64)
        if among is None:
            self._lowest[slot_bytes] = int(segments[0])
        free = self._free[segments]
        for segment in segments[free >= count][:PROBES_MAX].tolist():
            start = _first_run(self._map(segment), count)
            if start >= 0:
                return self._occupy(segment, np.arange(start, start + count))
        taken, missing = [], count
        for segment in segments[np.argsort(-free, kind="stable")].tolist():
            indices = np.flatnonzero(self._map(segment))[:missing]
            taken.append(self._occupy(segment, indices))
            missing -= len(indices)
            if not missing:
                break
        return np.concatenate(taken)

    def release(self, slots: Slots) -> None:
        """Free occupied slots: int64 [n], any order, any segments, no slot twice."""
        groups = self._grouped(slots)
        for segment, indices in groups:
            slot_map = self._maps[segment]
            if slot_map is None or indices[-1] >= len(slot_map) or slot_map[indices].any():
                raise ValueError(f"segment {segment}: a slot to release is not occupied")
        for segment, indices in groups:
            self._map(segment)[indices] = True
            self._occupied[segment] -= len(indices)
            if not self._quarantined[segment] and not self._retiring[segment]:
                self._free[segment] += len(indices)
                self._lower(segment)

    def restore(self, segment: int, slot_bytes: int, slots: Slots) -> None:
        """At start: give an unassigned segment to a class, with these slots of it occupied."""
        self._refuse_misfit(slot_bytes)
        if self.class_of(segment) or self._quarantined[segment]:
            raise ValueError(f"segment {segment} is already in use; restore each segment once")
        groups = self._grouped(slots)
        capacity = self.slots_in_segment(slot_bytes)
        if any(owner != segment or indices[-1] >= capacity for owner, indices in groups):
            raise ValueError(f"a slot to restore does not lie in segment {segment}")
        self._give(segment, slot_bytes)
        for _, indices in groups:
            self._occupy(segment, indices)

    def segment_of(self, slot: int) -> int:
        """The segment of a slot id."""
        return slot // self.slots_per_segment_max

    def offset_of(self, slot: int) -> int:
        """Where a slot starts, in bytes from the start of its segment."""
        segment, index = divmod(slot, self.slots_per_segment_max)
        return self.first_slot_at + index * self.class_of(segment)

    def segments_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        """The segments of slot ids: int64 [n]."""
        return slots // self.slots_per_segment_max

    def offsets_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Where slots start, in bytes from the start of each one's segment: int64 [n]."""
        segments, indices = np.divmod(slots, self.slots_per_segment_max)
        return self.first_slot_at + indices * self._slot_bytes[segments]

    def positions_of(self, slots: Slots, base: int) -> npt.NDArray[np.int64]:
        """Where slots start when segments lie one after the other from `base` on: int64 [n]."""
        segments, indices = np.divmod(slots, self.slots_per_segment_max)
        starts = segments * self.segment_bytes + indices * self._slot_bytes[segments]
        positions: npt.NDArray[np.int64] = starts + (base + self.first_slot_at)
        return positions

    def slots_of(self, segment: int) -> Slots:
        """The occupied slots of a segment, ascending: int64 [n]."""
        slot_map = self._maps[self._known(segment)]
        if slot_map is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(~slot_map) + segment * self.slots_per_segment_max

    def is_occupied(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """For each slot id, whether it is occupied; ids that cannot exist are not: bool [n]."""
        result = np.zeros(len(slots), np.bool_)
        segments, indices = np.divmod(slots, self.slots_per_segment_max)
        for at, (segment, index) in enumerate(
            zip(segments.tolist(), indices.tolist(), strict=True)
        ):
            slot_map = self._maps[segment] if 0 <= segment < self.segments_max else None
            result[at] = slot_map is not None and index < len(slot_map) and not slot_map[index]
        return result

    # --- sums

    def occupied(self, slot_bytes: int | None = None) -> int:
        """How many slots are occupied, of one class or of all."""
        return self._sum(self._occupied, slot_bytes)

    def free(self, slot_bytes: int) -> int:
        """How many slots of a class can be reserved without another segment."""
        return self._sum(self._free, slot_bytes)

    def capacity(self, slot_bytes: int) -> int:
        """How many slots a class has: free + occupied."""
        return self.free(slot_bytes) + self.occupied(slot_bytes)

    def used_bytes(self) -> int:
        """Bytes of all occupied slots."""
        return int(self._occupied @ self._slot_bytes)

    def allocated_bytes(self) -> int:
        """Bytes of all segments that belong to a class, quarantined ones included."""
        return int(np.count_nonzero(self._slot_bytes)) * self.segment_bytes

    def check_integrity(self) -> None:
        """AssertionError if the sums, the maps and the classes do not agree. Reads everything."""
        none = self._slot_bytes == 0
        assert not (self._free[none].any() or self._occupied[none].any()), "slots in no class"
        assert not self._retiring[none].any(), "a segment without a class is retiring"
        mapped = [n for n, slot_map in enumerate(self._maps) if slot_map is not None]
        assert mapped == np.flatnonzero(~none).tolist(), "maps and classes disagree"
        for segment in mapped:
            size, slot_map = int(self._slot_bytes[segment]), self._map(segment)
            free, occupied = int(self._free[segment]), int(self._occupied[segment])
            assert self.fits(size), f"segment {segment}: {size} bytes do not fit"
            assert len(slot_map) == self.slots_in_segment(size), f"segment {segment}: wrong length"
            assert occupied == np.count_nonzero(~slot_map), f"segment {segment}: occupied is wrong"
            out = self._quarantined[segment] or self._retiring[segment]
            expected = 0 if out else np.count_nonzero(slot_map)
            assert free == expected, f"segment {segment}: free is wrong"
        for size in self.classes():
            roomy = np.flatnonzero((self._slot_bytes == size) & (self._free > 0))
            assert not len(roomy) or self._lowest[size] <= roomy[0], (
                f"class {size}: search too high"
            )
        assert self.used_bytes() <= self.allocated_bytes() <= self.segments_max * self.segment_bytes

    # --- inside

    def _known(self, segment: int) -> int:
        if not 0 <= segment < self.segments_max:
            raise ValueError(f"segment {segment} is not one of {self.segments_max}")
        return segment

    def _refuse_misfit(self, slot_bytes: int) -> None:
        if not self.fits(slot_bytes):
            room = self.segment_bytes - self.first_slot_at
            raise ValueError(
                f"slots of {slot_bytes} bytes do not fit: use a multiple of {SLOT_ALIGN} in "
                f"{SLOT_BYTES_MIN}..{room}, or larger segments"
            )

    def _refuse_unmovable(
        self, segment: int, *, retiring: bool = False, empty: bool = True
    ) -> None:
        out = self._quarantined[self._known(segment)] or self._retiring[segment] != retiring
        if not self._slot_bytes[segment] or out:
            raise ValueError(
                f"segment {segment} is unassigned, quarantined or retiring; it stays what it is"
            )
        if empty and self._occupied[segment]:
            raise ValueError(
                f"segment {segment} holds occupied slots; evict and release them first"
            )

    def _unassigned(self, among: SegmentMask | None) -> npt.NDArray[np.int64]:
        left = (self._slot_bytes == 0) & ~self._quarantined
        return np.flatnonzero(left if among is None else left & among)

    def _give(self, segment: int, slot_bytes: int) -> None:
        count = self.slots_in_segment(slot_bytes)
        self._slot_bytes[segment] = slot_bytes
        self._maps[segment] = np.ones(count, np.bool_)
        self._free[segment] = count
        self._lower(segment)

    def _lower(self, segment: int) -> None:
        """Note that a segment has free slots: its class's search starts there, or below."""
        slot_bytes = int(self._slot_bytes[segment])
        self._lowest[slot_bytes] = min(self._lowest.get(slot_bytes, segment), segment)

    def _map(self, segment: int) -> SegmentMask:
        slot_map = self._maps[segment]
        assert slot_map is not None
        return slot_map

    def _occupy(self, segment: int, indices: npt.NDArray[np.int64]) -> Slots:
        self._map(segment)[indices] = False
        self._free[segment] -= len(indices)
        self._occupied[segment] += len(indices)
        return indices + segment * self.slots_per_segment_max

    def _grouped(self, slots: Slots) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Slot ids as (segment, ascending indices); refuses duplicates and unknown segments."""
        if not len(slots):
            return []
        ordered = np.sort(slots)
        first = self._known(int(ordered[0]) // self.slots_per_segment_max)
        last = self._known(int(ordered[-1]) // self.slots_per_segment_max)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a slot appears twice")
        if first == last:
            return [(first, ordered - first * self.slots_per_segment_max)]
        segments, indices = np.divmod(ordered, self.slots_per_segment_max)
        cuts = np.flatnonzero(np.diff(segments)) + 1
        firsts = segments[np.concatenate([np.zeros(1, np.int64), cuts])].tolist()
        return list(zip(firsts, np.split(indices, cuts), strict=True))

    def _sum(self, values: npt.NDArray[np.int32], slot_bytes: int | None) -> int:
        chosen = values if slot_bytes is None else values[self._slot_bytes == slot_bytes]
        return int(chosen.sum(dtype=np.int64))


def _first_run(slot_map: SegmentMask, count: int) -> int:
    """Where the first `count` free slots in a row start, or -1."""
    return slot_map.tobytes().find(b"\1" * count)
