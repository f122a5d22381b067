"""Slab against a plain model: dicts and sets, no bitmaps."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.tiers.slab import Slab

CLASSES = (8192, 12288, 20480, 65536)
SEGMENT = 128 * 1024
CLASS = st.sampled_from(CLASSES)


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int64)


class SlabAgainstModel(RuleBasedStateMachine):
    """The model knows, for each segment, its class, its occupied indices and whether it is out."""

    @initialize(segments=st.integers(1, 6), first=st.sampled_from([0, 4096]))
    def start(self, segments: int, first: int) -> None:
        self.slab = Slab(segments, SEGMENT, first)
        self.first = first
        self.classes: dict[int, int] = {}
        self.occupied: dict[int, set[int]] = {}
        self.out: set[int] = set()
        self.retiring: set[int] = set()
        self.segments = self.limit = segments

    def slots(self, slot_bytes: int) -> int:
        return (SEGMENT - self.first) // slot_bytes

    def free_of(self, slot_bytes: int) -> int:
        return sum(
            self.slots(slot_bytes) - len(self.occupied[segment])
            for segment, owner in self.classes.items()
            if owner == slot_bytes and segment not in self.out | self.retiring
        )

    def held(self) -> list[int]:
        per = self.slab.slots_per_segment_max
        return [s * per + i for s, taken in sorted(self.occupied.items()) for i in sorted(taken)]

    @rule(slot_bytes=CLASS)
    def assign(self, slot_bytes: int) -> None:
        left = [s for s in range(self.segments) if s not in self.classes and s not in self.out]
        assert self.slab.unassigned() == len(left)
        may = left and len(self.classes) < self.limit
        assert self.slab.assign(slot_bytes) == (left[0] if may else None)
        if may:
            self.classes[left[0]], self.occupied[left[0]] = slot_bytes, set()

    @rule(limit=st.integers(0, 6))
    def move_limit(self, limit: int) -> None:
        self.limit = self.slab.segments_limit = min(limit, self.segments)

    @rule(segment=st.integers(0, 5))
    def retire(self, segment: int) -> None:
        if segment in self.classes and segment not in self.out | self.retiring:
            self.slab.retire(segment)
            self.retiring.add(segment)
        else:
            with pytest.raises(ValueError):
                self.slab.retire(segment)

    @rule(segment=st.integers(0, 5))
    def keep(self, segment: int) -> None:
        if segment in self.retiring:
            self.slab.keep(segment)
            self.retiring.discard(segment)
        else:
            with pytest.raises(ValueError):
                self.slab.keep(segment)

    @rule(slot_bytes=CLASS, count=st.integers(0, 40))
    def reserve(self, slot_bytes: int, count: int) -> None:
        free = self.free_of(slot_bytes)
        got = self.slab.reserve(slot_bytes, count)
        assert len(got) == min(count, free)
        for slot in got.tolist():
            segment, index = divmod(slot, self.slab.slots_per_segment_max)
            assert self.classes[segment] == slot_bytes
            assert segment not in self.out | self.retiring
            assert index < self.slots(slot_bytes) and index not in self.occupied[segment]
            self.occupied[segment].add(index)
            assert self.slab.segment_of(slot) == segment
            assert self.slab.offset_of(slot) == self.first + index * slot_bytes

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.held()
        if not held:
            return
        chosen = data.draw(st.lists(st.sampled_from(held), unique=True))
        self.slab.release(np.array(chosen, np.int64))
        for slot in chosen:
            segment, index = divmod(slot, self.slab.slots_per_segment_max)
            self.occupied[segment].remove(index)

    @rule(slot=st.integers(-40, 120))
    def release_what_is_not_held(self, slot: int) -> None:
        if slot not in self.held():
            with pytest.raises(ValueError):
                self.slab.release(ids(slot))
        assert self.slab.is_occupied(ids(slot)).tolist() == [slot in self.held()]

    @rule(segment=st.integers(0, 5), slot_bytes=CLASS)
    def reassign(self, segment: int, slot_bytes: int) -> None:
        movable = segment in self.classes and segment not in self.out | self.retiring
        if movable and not self.occupied[segment]:
            self.slab.reassign(segment, slot_bytes)
            self.classes[segment] = slot_bytes
        else:
            with pytest.raises(ValueError):
                self.slab.reassign(segment, slot_bytes)

    @rule(segment=st.integers(0, 5))
    def unassign(self, segment: int) -> None:
        movable = segment in self.classes and segment not in self.out
        if movable and not self.occupied[segment]:
            self.slab.unassign(segment)
            del self.classes[segment], self.occupied[segment]
            self.retiring.discard(segment)

    @rule(segment=st.integers(0, 5))
    def quarantine(self, segment: int) -> None:
        if segment < self.segments:
            self.slab.quarantine(segment)
            self.out.add(segment)
            self.retiring.discard(segment)

    @rule()
    def restart(self) -> None:
        """A slab restored from what the old one held is the same slab, but for what was out."""
        fresh = Slab(self.segments, SEGMENT, self.first)
        for segment, slot_bytes in self.classes.items():
            fresh.restore(segment, slot_bytes, self.slab.slots_of(segment))
        self.slab, self.out, self.retiring, self.limit = fresh, set(), set(), self.segments

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "slab"):
            return
        self.slab.check_integrity()
        per = self.slab.slots_per_segment_max
        for segment in range(self.segments):
            taken = sorted(self.occupied.get(segment, ()))
            assert self.slab.class_of(segment) == self.classes.get(segment, 0)
            assert self.slab.slots_of(segment).tolist() == [segment * per + i for i in taken]
            assert self.slab.is_quarantined(segment) == (segment in self.out)
            assert self.slab.is_retiring(segment) == (segment in self.retiring)
        assert self.slab.assigned().tolist() == sorted(self.classes)
        for size in CLASSES:
            owners = [s for s, owner in self.classes.items() if owner == size]
            held = sum(len(self.occupied[s]) for s in owners)
            assert self.slab.free(size) == self.free_of(size)
            assert self.slab.occupied(size) == held
            assert self.slab.capacity(size) == held + self.free_of(size)
            live = sorted(s for s in owners if s not in self.out | self.retiring)
            assert self.slab.segments_of_class(size).tolist() == live
        used = sum(self.classes[s] * len(taken) for s, taken in self.occupied.items())
        assert self.slab.used_bytes() == used
        assert self.slab.allocated_bytes() == len(self.classes) * SEGMENT
        assert self.slab.occupied() == len(self.held())
        assert self.slab.classes() == sorted(set(self.classes.values()))


TestSlabAgainstModel = SlabAgainstModel.TestCase
TestSlabAgainstModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def filled(segments: int = 2, slot_bytes: int = 8192) -> Slab:
    slab = Slab(segments, SEGMENT, 0)
    for _ in range(segments):
        slab.assign(slot_bytes)
    return slab


def test_a_run_of_neighbours_is_preferred_to_holes() -> None:
    slab = filled()
    slots = slab.reserve(8192, 16)
    slab.release(slots[[1, 3, 5, 6, 7, 8, 11]])
    assert slab.reserve(8192, 4).tolist() == [5, 6, 7, 8]
    assert slab.reserve(8192, 4).tolist() == [16, 17, 18, 19]  # No run is left in segment 0.
    assert slab.reserve(8192, 1).tolist() == [1]


def test_without_a_run_the_emptiest_segment_comes_first() -> None:
    slab = filled()
    slots = slab.reserve(8192, 32)
    slab.release(slots[[0, 2, 16, 18, 20, 22]])
    assert slab.reserve(8192, 5).tolist() == [16, 18, 20, 22, 0]


def test_freed_slots_of_a_lower_segment_are_found_again() -> None:
    slab = filled(segments=3)
    slab.reserve(8192, 33)  # Into the third segment: the search starts there now.
    slab.reserve(8192, 1)
    slab.release(ids(4, 20, 21))
    slab.check_integrity()
    assert slab.reserve(8192, 2).tolist() == [20, 21]
    assert slab.reserve(8192, 1).tolist() == [4]
    slab.release(ids(7))
    assert slab.reserve(8192, 16).tolist() == [*range(34, 48), 7]


def test_a_mask_limits_segments() -> None:
    slab = Slab(4, SEGMENT, 0)
    odd = np.array([False, True, False, True])
    assert [slab.assign(8192, odd), slab.assign(8192, odd), slab.assign(8192, odd)] == [1, 3, None]
    assert slab.unassigned(odd) == 0 and slab.unassigned() == 2
    assert slab.assign(8192) == 0
    assert set(slab.segments_of(slab.reserve(8192, 99, odd)).tolist()) == {1, 3}
    assert slab.free(8192) == 16


def test_a_refused_release_changes_nothing() -> None:
    slab = filled()
    held = slab.reserve(8192, 4)
    for bad in (ids(0, 1, 9), ids(0, 0), ids(0, -1), ids(0, 32), ids(0, 31)):
        with pytest.raises(ValueError):
            slab.release(bad)
        assert slab.slots_of(0).tolist() == held.tolist()
        slab.check_integrity()


def test_restore_refuses_slots_outside_the_segment_and_a_second_time() -> None:
    slab = Slab(2, SEGMENT, 4096)
    for bad in (ids(16), ids(1), ids(0, 0)):  # 65,536 bytes: one slot beside the header, id 0.
        with pytest.raises(ValueError):
            slab.restore(0, 65536, bad)
    assert slab.class_of(0) == 0
    slab.restore(0, 65536, ids(0))
    with pytest.raises(ValueError):
        slab.restore(0, 65536, ids())
    assert slab.slots_of(0).tolist() == [0]
    slab.check_integrity()


@pytest.mark.parametrize("size", [0, 4096, 8193, SEGMENT + 4096])
def test_a_class_that_does_not_fit_is_refused(size: int) -> None:
    slab = Slab(1, SEGMENT, 0)
    assert not slab.fits(size)
    with pytest.raises(ValueError, match="do not fit: use a multiple of 4096"):
        slab.assign(size)
    assert slab.unassigned() == 1


def test_the_file_header_is_not_given_to_slots() -> None:
    slab = Slab(1, SEGMENT, 4096)
    assert slab.fits(SEGMENT - 4096) and not slab.fits(SEGMENT)
    slab.assign(8192)
    slots = slab.reserve(8192, 100)
    assert len(slots) == 15
    assert slab.offsets_of(slots).tolist() == [4096 + 8192 * i for i in range(15)]


def test_a_quarantined_segment_is_never_used_again() -> None:
    slab = filled()
    held = slab.reserve(8192, 3)
    slab.quarantine(0)
    assert slab.capacity(8192) == 3 + 16
    slab.release(held)
    assert slab.capacity(8192) == 16
    assert slab.segments_of(slab.reserve(8192, 99)).tolist() == [1] * 16
    with pytest.raises(ValueError):
        slab.reassign(0, 12288)


def test_check_integrity_notices_a_lost_slot() -> None:
    slab = filled()
    slab.reserve(8192, 3)
    slab._occupied[0] -= 1
    with pytest.raises(AssertionError):
        slab.check_integrity()


def test_a_million_slots_of_several_classes_under_random_load() -> None:
    slab = Slab(128, 64 << 20, 0)
    for _ in range(126):
        slab.assign(8192)
    slab.assign(1 << 20)
    slab.assign(12288)
    rng = np.random.default_rng(7)
    held = slab.reserve(8192, 1 << 20)
    assert len(held) == 126 * 8192 == len(np.unique(held))
    for _ in range(5):
        chosen = rng.permutation(held)[:30_000]
        slab.release(chosen)
        again = slab.reserve(8192, 1 << 20)
        assert sorted(again.tolist()) == sorted(chosen.tolist())
    slab.check_integrity()
    assert slab.free(1 << 20) == 64 and slab.free(12288) == (64 << 20) // 12288
