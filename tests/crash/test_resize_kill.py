"""kill -9 in the middle of a resize: the store opens, within its capacity, with the right bytes."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.home import read_facts
from kvstore.store import open as open_store
from kvstore.tiers.arena_file import ArenaStart
from kvstore.tiers.io import FileIo
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine
from support.resize_victim import DISK_BYTES, HOST_BYTES, PROMPTS, prompt_of
from support.writer import LAYOUT, PAGES

MIB = 1 << 20
BLOCKS = 20
LATEST = 8  # Prompts that fit the least capacity of a test, and are used last.
TESTS = Path(__file__).resolve().parents[1]
# Failpoint, and the capacities that lead to it: host memory, disk.
KILLS = [
    ("resize.give_back", 4 * MIB, DISK_BYTES),
    ("resize.drop", HOST_BYTES, 6 * MIB),
    ("resize.dropped", HOST_BYTES, 6 * MIB),
    ("resize.shrink", HOST_BYTES, 6 * MIB),
    ("resize.grow", 64 * MIB, 24 * MIB),  # A new arena of that size would have larger segments.
    ("disk.free", HOST_BYTES, 6 * MIB),
    ("catalogue.commit", HOST_BYTES, 6 * MIB),
]


class Victims:
    """Processes that resize a store, one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.resize_victim"],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill(
        self, failpoint: str, host: int, disk: int, seed: int = 0, after_s: float = 0.0
    ) -> None:
        """A store that was filled by a process that was killed while it resized it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with open_store(self.directory, host=HOST_BYTES, disk_capacity=DISK_BYTES):
            pass
        self._process.stdin.write(f"{self.directory} {failpoint} {host} {disk} {seed}\n")
        self._process.stdin.flush()
        pid = 0
        for line in self._process.stdout:
            word, *number = line.split()
            if word == "ended":
                assert int(number[0]) == signal.SIGKILL, f"{failpoint} was not reached"
                return
            if word == "pid":
                pid = int(number[0])
            if word == "full" and failpoint == "random":
                threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()
        raise AssertionError("the process that forks the victims ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    made = Victims(tmp_path / "store")
    yield made
    made.close()


def capacity_of(directory: Path) -> int:
    facts = read_facts(directory, FileIo())
    assert facts is not None
    return facts.disk_capacity_bytes


def check(directory: Path, host: int, disk: int | None, latest: int) -> None:
    """Open it with so much host memory; every hit is exact, and it goes on."""
    capacity = capacity_of(directory)
    assert disk_usage(directory) <= max(capacity, DISK_BYTES)
    with open_store(directory, host=host, persist=True) as store:
        arena = store._placement.host.arena
        assert arena.start is ArenaStart.TAKEN_OVER
        assert os.fstat(arena.fd).st_blocks * 512 <= host
        assert disk_usage(directory) <= capacity
        store.check_integrity()
        engine = Engine(store.namespace(LAYOUT, model="m"), PAGES)
        found = [engine.ask(prompt_of(number)).tokens // 4 for number in range(PROMPTS)]
        assert found[PROMPTS - latest :] == [BLOCKS] * latest, found
        if disk is not None:
            done = store.resize(disk_bytes=disk, host_bytes=host)
            assert (done.disk_bytes, done.reason) == (disk, None)
        _, saved = engine.save(prompt_of(PROMPTS))
        assert saved.dropped == {}
        assert_at_rest(store)
        counters = store.counters()
        assert not any(counters[name] for name in counters if name.startswith("bad_blocks"))
    assert disk_usage(directory) <= capacity_of(directory)


@pytest.mark.slow
def test_a_kill_at_every_step_of_a_resize(victims: Victims) -> None:
    for failpoint, host, disk in KILLS:
        shutil.rmtree(victims.directory, ignore_errors=True)
        victims.kill(failpoint, host, disk)
        assert capacity_of(victims.directory) == (
            disk if failpoint == "resize.shrink" else DISK_BYTES
        )
        # The next owner knows nothing of a resize of host memory, or all of it.
        check(victims.directory, max(HOST_BYTES, host), disk, LATEST)


def kill_at_random(victims: Victims, kills: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for number in range(kills):
        shutil.rmtree(victims.directory, ignore_errors=True)
        after_s = float(random.uniform(0, 0.3))
        victims.kill("random", 0, 0, seed=number, after_s=after_s)
        check(victims.directory, HOST_BYTES, None, 0)


@pytest.mark.slow
def test_kills_at_random_instants_of_resizes(victims: Victims) -> None:
    kill_at_random(victims, 2, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_kills_at_random_instants_of_resizes(victims: Victims) -> None:
    kill_at_random(victims, 300, seed=2)
