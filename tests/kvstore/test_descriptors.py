"""A store takes few descriptors, however many segments it has: the engine needs its own.

Run as a program, this file is the engine's process, with `ulimit -n 256`.
"""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvstore.opening
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest
from support.engine import Engine, prompt

LIMIT = 256
DESCRIPTORS_MAX = 64
THREADS = 8
TURNS = 60
BLOCKS = 5
SEGMENT_BYTES = 128 << 10
LAYOUT = Layout.opaque(layers=2, run_bytes=(15_000,), dtype="x", format="engine-1", block_tokens=4)


def use(store: Store, number: int, most: list[int]) -> None:
    """Save prompts and ask for older ones, most of which lie on disk alone."""
    engine = Engine(store.namespace(LAYOUT, model="m"), BLOCKS)
    for turn in range(TURNS):
        engine.save(prompt(BLOCKS * 4 + 1, 1000 * number + turn))
        if turn % 4 == 3:
            store.flush()  # so that host memory has room for all that follows
            engine.ask(prompt(BLOCKS * 4 + 1, 1000 * number + turn // 2))
        most.append(len(os.listdir("/proc/self/fd")))


def engine_process(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    kvstore.opening.segment_bytes = lambda capacity_bytes: SEGMENT_BYTES  # many small ones
    most: list[int] = []
    with open_store(path, host="4MiB", disk_capacity="64MiB", dirty_age_s=0.0) as store:
        threads = [threading.Thread(target=use, args=(store, n, most)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_at_rest(store)
        counters = store.counters()
    segments = len(list((path / "disk0").glob("*.seg")))
    bad = counters["bad_blocks.disk"] + counters["write_failures"]
    print(max(most), segments, counters["loaded_bytes.disk"], bad)


@pytest.mark.slow
def test_a_store_of_many_segments_stays_below_64_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "store")]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    child = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    most, segments, loaded, bad = map(int, child.stdout.split())
    print(f"{most} descriptors at most, {segments} segments")
    assert segments > 200 and loaded > 0 and bad == 0
    assert most < DESCRIPTORS_MAX


if __name__ == "__main__":
    engine_process(Path(sys.argv[1]))
