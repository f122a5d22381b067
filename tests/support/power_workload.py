"""What is recorded once, to lose power at any instant of it: python -m support.power_workload.

    support.power_workload ROOT PROMPTS [BUG]

A store of two layouts and several namespaces in ROOT/store fills its disk many times over: saves,
write-back, evictions, slots used again, segments that change class. It is stopped, started, and
started with a damaged catalogue on the way. The marks of support/marks.py are in the log.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvstore.opening
from kvstore.config import Config
from kvstore.store import Store
from kvstore.tiers.failpoints import plant
from kvstore.tiers.layout import Layout
from support.engine import Engine
from support.marks import Marks
from support.recording import RecordingIo
from support.shim import Event, Log

LAYOUTS = (
    Layout.opaque(layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4),
    Layout.opaque(layers=2, run_bytes=(1_500,), dtype="fp8", format="engine-1", block_tokens=4),
)
SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 4 << 20
BLOCKS = 18
DAMAGE_AT = 2 * 4096


def config_of(root: Path) -> Config:
    """Of the recorded store, and of the one that is opened over an image."""
    return Config(
        host_capacity_bytes=CAPACITY_BYTES,
        disk_paths=(root / "store",),
        disk_capacity_bytes=CAPACITY_BYTES,
        direct=False,
        io_threads=2,
        dirty_age_s=0.02,
    )


def small_segments() -> None:
    """Stores of this process have segments so small that a few MiB are many."""
    kvstore.opening.segment_bytes = lambda capacity: SEGMENT_BYTES  # type: ignore[assignment]


def prompt_of(number: int) -> Any:
    """The tokens of a prompt: one of five roots, then something of its own."""
    root = np.full(12, number % 5, np.int32)
    own = np.random.default_rng(number).integers(0, 1000, 4 * (BLOCKS - 3) + 1, dtype=np.int32)
    return np.concatenate([root, own])


def run_prompts(store: Store, marks: Marks, numbers: range) -> None:
    """Save these prompts, and flush after each; two layouts and a new namespace now and then."""
    for number in numbers:
        which = number // 6 % 2
        tenant = f"tenant {number // 12 % 3}"
        space = store.namespace(LAYOUTS[which], model=f"model {which}", tenant=tenant)
        marks.add("space", space.digest + bytes([which]))
        engine = Engine(space, 2 * BLOCKS)
        sequence, saved = engine.save(prompt_of(number))
        store.flush()
        if saved.saved + saved.present == sequence.blocks:
            marks.add("flushed", sequence.keys[: sequence.blocks].tobytes())
    store.check_integrity()


def main(root: Path, prompts: int, bug: str) -> None:
    log = Log()
    marks = Marks(lambda name, data: log.add(Event.MARK, name, 0, data))
    marks.install()
    small_segments()
    io = RecordingIo(root)
    data = root / "store" / "disk0" / "catalogue" / "data.mdb"
    third = prompts // 3
    with plant(bug) if bug else contextlib.nullcontext():
        for part in range(3):
            store = Store(config_of(root), io=io)
            run_prompts(store, marks, range(part * third, (part + 1) * third))
            store.close()
            if part == 1:
                fd = os.open(data, os.O_RDWR)
                os.pwrite(fd, b"\xff" * 16 * 4096, DAMAGE_AT)
                os.fdatasync(fd)
                os.close(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
