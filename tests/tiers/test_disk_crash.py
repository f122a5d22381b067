"""Kills and power losses while groups are written.

Run as a program, this file is the writer that gets killed.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.disk_outcomes import Written
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.record import RecordFormat
from support.disk_blocks import (
    MIB,
    SMALL,
    found_blocks,
    open_rig,
)

SLOT = RecordFormat.of(SMALL).slot_bytes


def write_for_ever(path: Path) -> None:
    """What the child does until it is killed: groups that replace older ones."""
    rig = open_rig(path)
    groups: list[np.ndarray] = []
    for number in count(int(time.time() * 1000) % 1_000_000 * 1000, 8):
        remove = groups.pop(0) if len(groups) > 10 else np.zeros(0, np.int64)
        slots, outcome = rig.write(range(number, number + 8), remove=remove)
        if isinstance(outcome, Written):
            groups.append(slots)
            print(number, flush=True)
        if rig.tier.blocks > 200:
            rig.tier.remove(np.array(list(found_blocks(rig).values())[:64], np.int64))
            rig.tier.flush_removals()


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_blocks(tmp_path: Path) -> None:
    rng = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "d")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(1 + rng.randrange(8))]
        child.kill()
        told += [int(line) for line in child.stdout.read().split("\n")[:-1]]
        child.wait()
        rig = open_rig(tmp_path / "d")
        found = found_blocks(rig)
        assert all(rig.good(slot, number) for number, slot in found.items())
        assert {told[-1] + n for n in range(8)} <= set(found), "an acknowledged group is gone"
        rig.tier.check_integrity()
        rig.tier.close()


class PowerLoss(BaseException):
    """The moment the power goes."""


class Lossy(FileIo):
    """Keeps what a segment had before each unsynced write, to lose some of it at once."""

    def __init__(self, rng: random.Random, syncs: bool) -> None:
        self._rng, self._syncs = rng, syncs
        self.left = 1 << 30
        self.before: dict[str, list[tuple[int, bytes]]] = {}

    def _tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PowerLoss

    def pwritev(self, fd: int, buffers: Any, offset: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith(".seg"):
            old = aligned_buffer(sum(map(len, buffers)))
            super().pread(fd, old, offset)
            self.before.setdefault(name, []).append((offset, bytes(old)))
        super().pwritev(fd, buffers, offset)
        self._tick()

    def fdatasync(self, fd: int) -> None:
        self._tick()
        if self._syncs:
            self.before.pop(os.readlink(f"/proc/self/fd/{fd}"), None)

    def lose(self) -> None:
        """Each page that was not synced is as it was before, by a throw of a coin."""
        for name, writes in self.before.items():
            with Path(name).open("r+b") as file:
                for offset, old in reversed(writes):
                    for at in range(0, len(old), 4096):
                        if self._rng.random() < 0.5:
                            file.seek(offset + at)
                            file.write(old[at : at + 4096])


def lose_power(root: Path, seed: int, syncs: bool) -> tuple[int, int, int]:
    """Write until the power goes. Returns: (blocks found, bad ones, acknowledged ones missing)."""
    rng = random.Random(seed)
    io = Lossy(rng, syncs)
    rig = open_rig(root / "d", io, capacity_bytes=2 * MIB)
    acknowledged: dict[int, int] = {}
    io.left = rng.randrange(1, 120)
    try:
        for number in count(0, 8):
            gone = rng.sample(sorted(acknowledged), 8) if len(acknowledged) > 60 else []
            remove = np.array([acknowledged.pop(n) for n in gone], np.int64)
            slots, outcome = rig.write(range(number, number + 8), remove=remove)
            assert isinstance(outcome, Written)
            acknowledged.update(zip(range(number, number + 8), slots.tolist(), strict=True))
    except PowerLoss:
        io.lose()
    shutil.copytree(root / "d", root / "after")
    io.left = 1 << 30
    rig.tier.close()
    rig = open_rig(root / "after", capacity_bytes=2 * MIB)
    found = found_blocks(rig)
    bad = sum(not rig.good(slot, number) for number, slot in found.items())
    rig.tier.close()
    return len(found), bad, len(acknowledged.keys() - found.keys())


@pytest.mark.slow
def test_power_loss_leaves_whole_blocks_and_all_that_was_acknowledged(tmp_path: Path) -> None:
    total = 0
    for seed in range(12):
        (tmp_path / str(seed)).mkdir()
        found, bad, missing = lose_power(tmp_path / str(seed), seed, syncs=True)
        assert (bad, missing) == (0, 0), seed
        total += found
    assert total > 200


@pytest.mark.slow
def test_the_power_loss_test_would_find_a_missing_sync(tmp_path: Path) -> None:
    bad = 0
    for seed in range(6):
        (tmp_path / str(seed)).mkdir()
        bad += lose_power(tmp_path / str(seed), seed, syncs=False)[1]
    assert bad > 0


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]))
