"""A process that saves and flushes without end, to be killed in the middle of it.

One process forks a child for each line on its standard input, "STORE ROUND PERSIST", so that
fifty kills do not pay for fifty interpreters. It answers "pid PID" and, when the child was killed,
"ended"; the child prints "open", and "durable NUMBER" for each prompt that `flush` said is durable.
"""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.store import open as open_store
from kvstore.tiers.layout import Layout
from support.engine import Engine

LAYOUT = Layout.opaque(
    layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4
)
HOST_BYTES = 4 << 20
DISK_BYTES = 24 << 20
PAGES = 32
PROMPTS_MAX = 500


def prompt_of(round_number: int, number: int) -> npt.NDArray[np.int32]:
    """The tokens of one prompt: a few shared roots, then something of its own."""
    root = np.full(8, number % 3, np.int32)
    random = np.random.default_rng((round_number, number))
    return np.concatenate([root, random.integers(0, 1000, 4 * 20 + 1, dtype=np.int32)])


def save_for_ever(directory: Path, round_number: int, persist: bool) -> None:
    """Save prompt after prompt; say which ones are durable."""
    store = open_store(
        directory, host=HOST_BYTES, disk_capacity=DISK_BYTES, persist=persist, dirty_age_s=0.05
    )
    engine = Engine(store.namespace(LAYOUT, model="m"), PAGES)
    os.write(1, b"open\n")
    for number in itertools.islice(itertools.count(), PROMPTS_MAX):
        sequence, saved = engine.save(prompt_of(round_number, number))
        if persist and number % 2:
            continue  # So that some blocks are in the arena alone.
        store.flush()
        if saved.saved + saved.present == sequence.blocks:
            os.write(1, f"durable {number}\n".encode())


def main() -> None:
    for line in sys.stdin:
        directory, round_number, persist = line.split()
        pid = os.fork()
        if pid == 0:
            save_for_ever(Path(directory), int(round_number), persist == "True")
            os._exit(0)
        os.write(1, f"pid {pid}\n".encode())
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
