"""kill -9 of the process that saves: afterwards every hit is exactly the bytes, or it is a miss."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.home import read_facts
from kvstore.store import open as open_store
from kvstore.tiers.io import FileIo
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine
from support.writer import DISK_BYTES, HOST_BYTES, LAYOUT, PAGES, PROMPTS_MAX, prompt_of

KILLS = 80
ARENA_KILLS = 20
LONG_KILLS = 1_600
LONG_ARENA_KILLS = 400
LATEST = 6  # Prompts of the last round that are young enough to be on disk still.
TESTS = Path(__file__).resolve().parents[1]


class Victims:
    """Processes that save for ever, one at a time."""

    def __init__(self, directory: Path, persist: bool) -> None:
        self.directory = directory
        self.persist = persist
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.writer"],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, round_number: int, *, opening: bool, after_s: float) -> list[int]:
        """Let one run and kill it. Returns: the prompts that it was told are durable.

        opening: the seconds count from its start, else from when its store is open.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{self.directory} {round_number} {self.persist}\n")
        self._process.stdin.flush()
        pid = 0
        durable: list[int] = []
        for line in self._process.stdout:
            word, *number = line.split()
            if word == "ended":
                return durable
            if word == "pid":
                pid = int(number[0])
            if word == "durable":
                durable.append(int(number[0]))
            if word == ("pid" if opening else "open"):
                threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()
        raise AssertionError("the process that forks the victims ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture(params=[False, True], ids=["disk", "arena"])
def victims(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Victims]:
    """Whose host memory ends with them, or lies in an arena that the next owner takes over."""
    made = Victims(tmp_path / "store", request.param)
    yield made
    made.close()


def check(victims: Victims, round_number: int, durable: list[int]) -> tuple[int, int]:
    """Reopen, and load what can be found of this and earlier rounds. Blocks found, and asked."""
    found = asked = 0
    sizes: dict[str, Any] = {"host": HOST_BYTES, "disk_capacity": DISK_BYTES}
    with open_store(victims.directory, persist=victims.persist, **sizes) as store:
        store.check_integrity()
        engine = Engine(store.namespace(LAYOUT, model="m"), PAGES)
        last = durable[-1] if durable else -1
        prompts = [(round_number, number) for number in range(max(0, last - 9), last + 6)]
        prompts += [(max(0, round_number - ago), 0) for ago in (1, 2, 3)]
        for prompt in prompts:
            sequence = engine.space.sequence(prompt_of(*prompt))
            with sequence.lookup() as ticket:
                result = engine.load(ticket)  # asserts every byte of it
                assert result.tokens == ticket.tokens, result.reason
            asked += sequence.blocks
            found += ticket.blocks
            if prompt[0] == round_number and prompt[1] in durable[-LATEST:]:
                assert ticket.blocks == sequence.blocks, "a durable block was lost"
        # It goes on: a save after the crash is a save.
        _, saved = engine.save(prompt_of(round_number, PROMPTS_MAX))
        assert saved.dropped == {}
        assert_at_rest(store)
        bad = {n: c for n, c in store.counters().items() if n.startswith("bad_blocks") and c}
        assert not bad
    assert disk_usage(victims.directory) <= DISK_BYTES
    return found, asked


def store_id(directory: Path) -> str:
    facts = read_facts(directory, FileIo())
    assert facts is not None
    return facts.store_id.hex()


def kill_many(victims: Victims, kills: int) -> None:
    random = np.random.default_rng(1)
    found = asked = durable_prompts = 0
    began = time.monotonic()
    for round_number in range(kills):
        # One in five dies while it opens the store, the others while they save and flush.
        opening = round_number % 5 == 4
        after_s = float(random.uniform(0.001, 0.04 if opening else 0.15))
        durable = victims.kill_one(round_number, opening=opening, after_s=after_s)
        hit, of = check(victims, round_number, durable)
        found, asked, durable_prompts = found + hit, asked + of, durable_prompts + len(durable)
    print(
        f"{kills} kills in {time.monotonic() - began:.0f} s: {durable_prompts} prompts durable, "
        f"{found} of {asked} blocks found and exact"
    )
    assert durable_prompts > 0  # or the victims died before they did anything
    assert found > 0
    left = Path("/dev/shm").glob(f"kvstore-{os.geteuid()}-{store_id(victims.directory)}*")
    assert not list(left), "a clean stop leaves no arena"


@pytest.mark.slow
def test_kills(victims: Victims) -> None:
    kill_many(victims, ARENA_KILLS if victims.persist else KILLS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_thousand_kills(victims: Victims) -> None:
    kill_many(victims, LONG_ARENA_KILLS if victims.persist else LONG_KILLS)
