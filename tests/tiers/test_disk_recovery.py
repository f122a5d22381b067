"""A disk tier comes back by itself: catalogues after a fault of their device, lost segments."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.catalogue import Change, CommitFault
from kvstore.tiers.disk_outcomes import DiskState, WriteFailed, WriteFault, Written
from kvstore.tiers.record import RecordFormat
from support.checks import disk_usage
from support.disk_blocks import SEGMENT, FaultyIo, Rig, block, found_blocks, open_rig
from support.failing_catalogues import FailingCatalogues
from support.manual_clock import ManualClock

SLOT = RecordFormat.of(block(0).layout).slot_bytes


class Case:
    """A tier with blocks 0..39 whose catalogue, files and clock obey a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.catalogues, self.io, self.clock = FailingCatalogues(), FaultyIo(), ManualClock()
        self.rig = open_rig(
            path, self.io, catalogues=self.catalogues, monotonic=self.clock.monotonic
        )
        slots, outcome = self.rig.write(range(40))
        assert isinstance(outcome, Written)
        self.stored = dict(enumerate(slots.tolist()))

    def fail_commit(self) -> None:
        """A group whose commit meets a device that fails."""
        self.catalogues.fail = lambda: CommitFault.DEVICE
        outcome = self.rig.write(range(100, 110))[1]
        assert isinstance(outcome, WriteFailed)
        assert outcome.reason is WriteFault.CATALOGUE_DEVICE

    def come_back(self) -> float:
        """Tend until writes are taken. Returns: seconds that it took."""
        began = self.clock.now_s
        while not self.rig.tier.health.takes_writes:
            self.clock.advance(0.05)
            assert len(self.rig.tier.tend()) == 0
            assert self.clock.now_s - began < 5.0
        return self.clock.now_s - began

    def reopened(self) -> Rig:
        """The tier after a kill: from a copy of what is in its directory now."""
        copy = self.path.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.path, copy)
        return open_rig(copy)

    def check(self, numbers: set[int]) -> None:
        """Exactly these blocks are there, now and after a kill, and all are good."""
        tier = self.rig.tier
        tier.check_integrity()
        assert tier.blocks == len(numbers) and not tier.removing()
        assert all(self.rig.good(self.stored[number], number) for number in numbers)
        after = self.reopened()
        found = found_blocks(after)
        assert set(found) == numbers
        assert all(after.good(slot, number) for number, slot in found.items())
        after.tier.close()


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path / "d")
    yield made
    made.rig.tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("committed", [False, True], ids=["not_made", "made_but_not_told"])
def test_a_catalogue_whose_device_failed_is_made_anew(case: Case, committed: bool) -> None:
    case.catalogues.after = committed
    gone = np.array([case.stored.pop(n) for n in range(5)], np.int64)
    case.rig.tier.remove(gone)
    case.fail_commit()
    tier = case.rig.tier
    assert tier.health.state is DiskState.READ_ONLY and not tier.health.takes_writes
    assert len(case.rig.reserve(4)) == 0
    assert all(case.rig.good(slot, number) for number, slot in case.stored.items())
    # While the device still fails nothing changes but the back-off.
    for _ in range(30):
        case.clock.advance(0.1)
        assert len(tier.tend()) == 0
    assert not tier.health.takes_writes
    assert 2 <= tier._upkeep.failed <= 4
    case.catalogues.fail = lambda: None
    assert case.come_back() <= 2.1
    assert tier.health.state is DiskState.ON
    assert tier.flush_removals() is None
    case.check(set(case.stored))
    slots, outcome = case.rig.write(range(200, 210))
    assert isinstance(outcome, Written)
    case.stored |= dict(zip(range(200, 210), slots.tolist(), strict=True))
    case.check(set(case.stored))


def test_a_catalogue_that_cannot_be_read_is_made_from_headers(case: Case) -> None:
    case.fail_commit()
    case.catalogues.fail = lambda: None
    data = case.path / "catalogue" / "data.mdb"
    with data.open("r+b") as file:
        file.write(b"\xff" * 8192)
    case.come_back()
    assert case.rig.tier.flush_removals() is None
    case.check(set(case.stored))


def test_blocks_whose_row_is_lost_leave_the_tier(case: Case) -> None:
    """As when the device forgot a commit that it had confirmed."""
    catalogue: Any = case.rig.tier._volumes[0].catalogue
    case.fail_commit()
    per = case.rig.tier.per
    lost = sorted(case.stored.pop(n) for n in (3, 17))
    keys = [b"".join(part.to_bytes(4, "big") for part in divmod(slot, per)) for slot in lost]
    case.catalogues.fail = lambda: None
    assert type(catalogue).commit(catalogue, Change(removed=keys)) is None
    case.clock.advance(1.0)
    assert case.rig.tier.tend().tolist() == lost
    case.rig.tier.remove(np.array(lost, np.int64))  # as the index does
    assert case.rig.tier.flush_removals() is None
    case.check(set(case.stored))


def test_a_crash_while_a_catalogue_is_made_anew_loses_no_block(case: Case) -> None:
    case.fail_commit()
    calls = 0

    def first() -> CommitFault | None:
        nonlocal calls
        calls += 1
        return CommitFault.DEVICE if calls == 1 else None

    case.catalogues.fail = first
    case.clock.advance(1.0)
    case.rig.tier.tend()
    assert calls == 1 and not case.rig.tier.health.takes_writes
    after = case.reopened()  # the new catalogue has no row
    assert after.loaded.rebuilt == (0,)
    found = found_blocks(after)
    assert set(case.stored) <= set(found)
    assert all(after.good(slot, number) for number, slot in found.items())
    after.tier.close()
    case.catalogues.fail = lambda: None
    case.come_back()
    case.check(set(case.stored))


def lose_a_segment(case: Case) -> tuple[set[int], list[int]]:
    """A group whose sync fails. Returns: numbers of the blocks lost with it, and their slots."""
    slots = case.rig.reserve(4)
    segment = int(slots[0]) // case.rig.tier.per
    lost = {n for n, slot in case.stored.items() if slot // case.rig.tier.per == segment}
    case.io.fail = lambda name: errno.EIO if name == "fdatasync" else 0
    outcome = case.rig.put(slots, [block(n) for n in range(50, 54)])
    case.io.fail = lambda name: 0
    assert isinstance(outcome, WriteFailed) and outcome.reason is WriteFault.SYNC_FAILED
    assert lost and sorted(outcome.abandoned.tolist()) == sorted(case.stored[n] for n in lost)
    return lost, outcome.abandoned.tolist()


def test_the_file_of_a_lost_segment_goes_when_nobody_reads_it(case: Case) -> None:
    before = disk_usage(case.path)
    lost, slots = lose_a_segment(case)
    tier, segment = case.rig.tier, slots[0] // case.rig.tier.per
    file = case.path / f"{segment:08x}.seg"
    tier.tend()
    assert file.exists(), "its blocks are still in the index"
    reader = slots.pop()
    tier.remove(np.array(slots, np.int64))
    assert tier.flush_removals() is None
    tier.tend()
    assert file.exists(), "somebody still reads one"
    assert case.rig.good(reader, next(n for n in lost if case.stored[n] == reader))
    tier.remove(np.array([reader], np.int64))
    with tier._files.use(segment):
        tier.tend()
        assert file.exists(), "it is being read"
    tier.tend()
    assert not file.exists() and tier._upkeep.reclaimed == 1
    assert disk_usage(case.path) <= before - SEGMENT
    case.check(set(case.stored) - lost)
    # Its number and its room are used again.
    slots_now = np.concatenate([case.rig.reserve(10), case.rig.reserve(10)])
    assert segment in set((slots_now // tier.per).tolist())
    assert isinstance(case.rig.put(slots_now, [block(n) for n in range(300, 320)]), Written)
    for number in lost:
        del case.stored[number]
    case.stored |= dict(zip(range(300, 320), slots_now.tolist(), strict=True))
    case.check(set(case.stored))


@pytest.mark.parametrize("moment", ["abandoned", "removed", "unlinked", "used_again"])
def test_a_kill_at_each_step_of_losing_a_segment_serves_nothing_of_it(
    case: Case, moment: str
) -> None:
    lost, slots = lose_a_segment(case)
    tier, kept = case.rig.tier, set(case.stored) - lost
    if moment != "abandoned":
        tier.remove(np.array(slots, np.int64))
        tier.flush_removals()
    if moment in {"unlinked", "used_again"}:
        tier.tend()
        assert tier._upkeep.reclaimed == 1
    if moment == "used_again":
        assert len(case.rig.reserve(20)) == 20  # a new file of that number; nothing committed
    after = case.reopened()
    assert set(found_blocks(after)) == kept
    assert isinstance(after.write(range(400, 420))[1], Written)
    after.tier.check_integrity()
    after.tier.close()
    tier.cancel(np.array(sorted(tier._uncommitted), np.int64))


def test_a_group_committed_to_a_segment_that_is_lost_meanwhile_is_not_kept(case: Case) -> None:
    """Two writers: one's commit is under way while the other's sync fails."""
    slots = case.rig.reserve(4)
    other = case.rig.reserve(2)
    volume = case.rig.tier._volumes[0]
    commit, lost = volume.commit, set[int]()

    def lose_first(rows: Any) -> CommitFault | None:
        volume.commit = commit  # type: ignore[method-assign]
        case.io.fail = lambda name: errno.EIO if name == "fdatasync" else 0
        failed = case.rig.put(other, [block(n) for n in (60, 61)])
        case.io.fail = lambda name: 0
        assert isinstance(failed, WriteFailed)
        lost.update(failed.abandoned.tolist())
        case.rig.tier.remove(failed.abandoned)
        return commit(rows)

    volume.commit = lose_first  # type: ignore[method-assign]
    outcome = case.rig.put(slots, [block(n) for n in range(50, 54)])
    assert isinstance(outcome, WriteFailed) and outcome.reason is WriteFault.SYNC_FAILED
    assert case.rig.tier.flush_removals() is None
    case.clock.advance(1.0)
    case.rig.tier.tend()
    assert not len(case.rig.tier.slab.quarantined())
    case.check({n for n, s in case.stored.items() if s not in lost})
