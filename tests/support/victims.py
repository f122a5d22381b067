"""Processes that work on a store until they kill themselves, at a failpoint or at a file call.

One process forks a child for each line on its standard input, "STORE ROUND PLACE PASSING": the
child passes through most of the code, and ends itself with SIGKILL when it reaches a place for the
PASSING-th time. PLACE is one of FAILPOINTS, "file-call" (any call that changes a file), or "none".
The child prints "open", the marks of support/marks.py, "invalidating NUMBER" before and
"invalidated NUMBER" after it drops all of a prompt but its root, and "done COUNTS" if it lived to
its end. The process adds "ended".
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore.opening
from kvstore.config import Config
from kvstore.invalidation import Scope
from kvstore.space import Space
from kvstore.store import Store
from kvstore.tiers.failpoints import FAILPOINTS, armed
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from support.engine import Engine
from support.marks import Marks, Promised
from support.shim import TESTS

# Two sizes of slots, of which each soon wants what the other has.
LAYOUTS = (
    Layout.opaque(layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4),
    Layout.opaque(layers=2, run_bytes=(1_500,), dtype="fp8", format="engine-1", block_tokens=4),
)
SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 5 << 20
SMALLER_BYTES = 4 << 20
BLOCKS = 30
ROOT_BLOCKS = 3
INVALIDATED = 5
PROMPTS = 12
TURN = 8  # Prompts of the first layout, enough to fill both tiers; the others are of the second.
TELLING = threading.Lock()
FILE_CALL = "file-call"
CHANGES = (
    *("make_directory", "unlink", "rename", "pwritev", "fdatasync", "fsync", "allocate"),
    *("truncate", "bind"),
)


def config_of(directory: Path, dirty_age_s: float = 0.02) -> Config:
    """Of a victim's store, and of the one that is opened after it."""
    return Config(
        host_capacity_bytes=CAPACITY_BYTES,
        disk_paths=(directory,),
        # What it was killed in the middle of giving itself is in the store.
        disk_capacity_bytes=0 if (directory / "store.toml").exists() else CAPACITY_BYTES,
        persist=True,
        direct=False,
        io_threads=2,
        dirty_age_s=dirty_age_s,
    )


def small_segments() -> None:
    """Stores of this process have segments so small that a few MiB are many."""
    kvstore.opening.segment_bytes = lambda capacity: SEGMENT_BYTES  # type: ignore[assignment]


def space_of(store: Store, number: int) -> Space:
    """The namespace that a prompt is saved in."""
    which, tenant = _place_of(number)
    return store.namespace(LAYOUTS[which], model=f"model {which}", tenant=f"{tenant}")


def share_a_space(one: int, other: int) -> bool:
    """Whether two prompts are saved in the same namespace."""
    return _place_of(one) == _place_of(other)


def _place_of(number: int) -> tuple[int, int]:
    return number % PROMPTS // TURN, number // PROMPTS % 3


def prompt_of(number: int) -> npt.NDArray[np.int32]:
    """The tokens of a prompt: one of three roots, then something of its own."""
    root = np.full(4 * ROOT_BLOCKS, number % 3, np.int32)
    own = np.random.default_rng(number).integers(
        0, 1000, 4 * (BLOCKS - ROOT_BLOCKS) + 1, dtype=np.int32
    )
    return np.concatenate([root, own])


class Death:
    """Kills this process at its n-th call."""

    def __init__(self, passing: int) -> None:
        self.passing = passing
        self.passed = 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed == self.passing:
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyIo(FileIo):
    """Dies at the n-th call that would change a file, before it; opens count too."""

    def __init__(self, death: Death) -> None:
        self._death = death

    def __getattribute__(self, name: str) -> Any:
        if name in CHANGES:
            object.__getattribute__(self, "_death")()
        return object.__getattribute__(self, name)

    def open(self, path: str | Path, **options: Any) -> int:
        if options.get("create"):
            self._death()
        return super().open(path, **options)


def tell(name: str, data: bytes) -> None:
    """A mark on standard output."""
    with TELLING:
        os.write(1, f"{name} {data.hex()}\n".encode())


def work(directory: Path, round_number: int, place: str, passing: int) -> None:
    """What a child does."""
    small_segments()
    Marks(tell).install()
    deaths = {name: Death(passing if name == place else -1) for name in (*FAILPOINTS, FILE_CALL)}
    io = DeadlyIo(deaths[FILE_CALL]) if place == FILE_CALL else FileIo()
    with ExitStack() as arming:
        for name in FAILPOINTS:
            arming.enter_context(armed(name, deaths[name]))
        store = Store(config_of(directory), io=io)
        os.write(1, b"open\n")
        # One that was killed may have left it smaller.
        store.resize(host_bytes=CAPACITY_BYTES, disk_bytes=CAPACITY_BYTES)
        save_prompts(store, round_number * PROMPTS)
        # Both tiers become smaller, and what they were again.
        for size in (SMALLER_BYTES, CAPACITY_BYTES):
            resized = store.resize(host_bytes=size, disk_bytes=size)
            assert resized.reason is None, resized
        store.close()
    counts = {name: death.passed for name, death in deaths.items()}
    os.write(1, f"done {json.dumps(counts)}\n".encode())


def save_prompts(store: Store, first: int) -> None:
    """Save PROMPTS prompts, each on disk before the next, and invalidate one of them on the way."""
    for number in range(first, first + PROMPTS):
        engine = Engine(space_of(store, number), 2 * BLOCKS)
        sequence, saved = engine.save(prompt_of(number))
        store.flush()
        if saved.saved + saved.present == sequence.blocks:
            tell("flushed", sequence.keys[: sequence.blocks].tobytes())
        if number == first + INVALIDATED:
            prefix = sequence.keys[ROOT_BLOCKS].tobytes().hex()
            os.write(1, f"invalidating {number}\n".encode())
            assert store.invalidate(Scope(prefix=prefix)).durable
            os.write(1, f"invalidated {number}\n".encode())


@dataclass
class Ended:
    """What a victim had said. passed: if it lived to its end, how often it passed each place.

    invalidated: of which prompt all but the root was dropped. unsettled: the same, if that had not
    returned: then all of the prompt's namespace may be gone.
    """

    opened: bool = False
    passed: dict[str, int] | None = None
    invalidated: int | None = None
    unsettled: int | None = None
    promised: Promised = field(default_factory=Promised)


class Victims:
    """Starts victims, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.victims"],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, directory: Path, round_number: int, place: str, passing: int) -> Ended:
        """Run one to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{directory} {round_number} {place} {passing}\n")
        self._process.stdin.flush()
        ended = Ended()
        for line in self._process.stdout:
            word, *rest = line.split()
            if word == "ended":
                return ended
            if word == "open":
                ended.opened = True
            elif word == "done":
                ended.passed = json.loads(line.removeprefix(word))
            elif word == "invalidating":
                ended.unsettled = int(rest[0])
            elif word == "invalidated":
                ended.invalidated, ended.unsettled = int(rest[0]), None
            else:
                ended.promised.apply(word, bytes.fromhex("".join(rest)))
        raise AssertionError("the process that forks the victims ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def main() -> None:
    for line in sys.stdin:
        directory, round_number, place, passing = line.split()
        pid = os.fork()
        if pid == 0:
            work(Path(directory), int(round_number), place, int(passing))
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
