"""used = the sum of occupied slots <= allocated = du <= capacity, after any random steps."""

import errno
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.disk_outcomes import WriteFailed, Written
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import RecordFormat
from support.checks import disk_usage
from support.disk_blocks import MIB, SMALL, Block, Rig, block, open_rig
from support.failing_device import WRITES, FailingDevice
from support.manual_clock import ManualClock

CAPACITY = 3 * MIB
WIDER = Layout(16, (CacheGroup("full", 2, (3000, 3000), "uint8"),))  # 16 KiB slots
LAYOUTS = (SMALL, WIDER)
BLOCKS = {layout: [block(number, layout) for number in range(64)] for layout in LAYOUTS}


class Steps:
    """A tier on a real directory and the slots that it must have. One random step after another."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random = path, random.Random(seed)
        self.clock, self.device = ManualClock(), FailingDevice()
        self.held: dict[int, Layout] = {}  # slot -> layout of the block in it
        self.faults = self.stolen = self.restarts = 0
        self.rig = self.open()

    def open(self) -> Rig:
        return open_rig(
            self.path, self.device, capacity_bytes=CAPACITY, monotonic=self.clock.monotonic
        )

    def put(self) -> None:
        layout = self.random.choice(LAYOUTS)
        slots = self.rig.reserve(self.random.randrange(1, 9), layout)
        if not len(slots):
            self.steal(layout)
            return
        chosen: list[Block] = self.random.sample(BLOCKS[layout], len(slots))
        outcome = self.rig.put(slots, chosen)
        if isinstance(outcome, Written):
            self.held.update(dict.fromkeys(slots.tolist(), layout))
        else:
            self.fail(outcome)

    def fail(self, outcome: WriteFailed) -> None:
        self.faults += 1
        for slot in outcome.abandoned.tolist():
            del self.held[slot]
        self.rig.tier.remove(outcome.abandoned)

    def remove(self, slots: list[int]) -> None:
        for slot in slots:
            del self.held[slot]
        self.rig.tier.remove(np.array(slots, np.int64))

    def steal(self, layout: Layout) -> None:
        """As write-back does for a class without room: empty a segment of another class."""
        per = self.rig.tier.per
        other = sorted({slot // per for slot, held in self.held.items() if held != layout})
        if not other:
            return
        segment = self.random.choice(other)
        self.remove([slot for slot in self.held if slot // per == segment])
        if self.rig.tier.flush_removals() is None:
            size = RecordFormat.of(layout).slot_bytes
            self.stolen += self.rig.tier.reassign(segment, size)

    def restart(self) -> None:
        self.device.fault = lambda name: 0
        self.rig.tier.close()
        self.rig = self.open()
        assert sorted(found_slots(self.rig)) == sorted(self.held)
        self.restarts += 1

    def step(self) -> None:
        what = self.random.random()
        if what < 0.5:
            self.put()
        elif what < 0.9:
            some = self.random.sample(sorted(self.held), min(len(self.held), 5))
            self.remove(some)
        elif what < 0.97:
            self.rig.tier.flush_removals()
        elif what < 0.995:
            # The next write of one kind fails.
            kind, number = self.random.choice(WRITES), self.random.choice((errno.EIO, errno.ENOSPC))
            left = [1]
            self.device.fault = lambda name: number if name == kind and left and left.pop() else 0
        elif what < 0.998:
            self.restart()
        self.clock.advance(0.1)
        for slot in self.rig.tier.tend().tolist():
            self.remove([slot])

    def check(self) -> None:
        tier = self.rig.tier
        assert tier.flush_removals() is None
        used = sum(RecordFormat.of(layout).slot_bytes for layout in self.held.values())
        assert tier.used_bytes == used
        assert used <= tier.allocated_bytes == disk_usage(self.path) <= CAPACITY
        tier.check_integrity()


def found_slots(rig: Rig) -> list[int]:
    per = rig.tier.per
    return [
        int(segment) * per + int(index)
        for rows in rig.loaded.rows.values()
        for segment, index in zip(rows["segment"], rows["index"], strict=True)
    ]


def run(path: Path, seed: int, steps: int) -> Steps:
    case = Steps(path, seed)
    most = 0
    for number in range(steps):
        case.step()
        if number % 100 == 99:
            case.check()
            most = max(most, case.rig.tier.used_bytes)
    case.check()
    case.rig.tier.close()
    assert most > CAPACITY // 3
    return case


@pytest.mark.slow
def test_used_is_at_most_allocated_is_du_is_at_most_the_capacity(tmp_path: Path) -> None:
    case = run(tmp_path / "d", seed=7, steps=10_000)
    injected = sum(case.device.injected.values())
    print(f"{injected} faults, {case.stolen} segments stolen, {case.restarts} restarts")
    assert injected > 50 and case.faults > 20 and case.stolen > 20 and case.restarts > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_accounting_long(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "d", seed, steps=50_000)
