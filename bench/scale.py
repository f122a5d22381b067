"""A million small blocks: memory of the process, and how soon it answers after a restart.

Fills a disk tier with --blocks blocks of 16 tokens, the smallest there are, through a store; prints
anonymous memory a block. Then opens it in a fresh process and measures from the call of open: the
first hit, on the prompt committed last, and the whole index.

Bars: anonymous memory at most pools + 64 MiB + 400 B a block; first hit within 3 s, before that
Miss(starting); whole index within 10 s (aim 1 s).

usage: python -m bench.scale [--json] [--blocks N] [--keep DIR]
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.tiers.layout import Layout

BLOCKS = 1_000_000
PROMPT_BLOCKS = 250
HOST_BYTES = 64 << 20
SLOT_BYTES = 8192
LAYOUT = Layout.attention(layers=1, kv_heads=1, head_dim=64, dtype="bfloat16")
BAR_BASE_BYTES, BAR_BLOCK_BYTES = 64 << 20, 400


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; shared memory (the arena) is not in it."""
    text = Path("/proc/self/smaps_rollup").read_text()
    match = re.search(r"^Anonymous:\s+(\d+) kB", text, re.M)
    assert match is not None
    return int(match[1]) * 1024


def prompt(number: int) -> npt.NDArray[np.int32]:
    tokens = PROMPT_BLOCKS * LAYOUT.block_tokens + 1
    return np.random.default_rng(number).integers(0, 50_000, tokens, dtype=np.int32)


def open_store(directory: Path, blocks: int, *, wait: bool) -> kvstore.Store:
    capacity = blocks * SLOT_BYTES * 5 // 4 + (64 << 20)
    return kvstore.open(directory, host=HOST_BYTES, disk_capacity=capacity, wait=wait)


def pool_of(space: kvstore.Space) -> kvstore.PagePool:
    return space.pool([np.ones((PROMPT_BLOCKS, 2048), np.uint8) for _ in range(LAYOUT.runs)])


def fill(directory: Path, blocks: int) -> dict[str, Any]:
    """Save until the disk tier holds `blocks` blocks, then go on for a tenth, evicting nothing."""
    began = time.perf_counter()
    store = open_store(directory, blocks, wait=True)
    space = store.namespace(LAYOUT, model="bench")
    pool, table = pool_of(space), np.arange(PROMPT_BLOCKS)
    for number in range(blocks // PROMPT_BLOCKS):
        while space.sequence(prompt(number)).save(pool, table).result().dropped:
            time.sleep(0.02)  # Host memory is full of what is not on disk yet.
        if number % 400 == 0:
            print(f"{number * PROMPT_BLOCKS} blocks saved", file=sys.stderr, flush=True)
    store.flush()
    used = anonymous_bytes()
    pools = LAYOUT.runs * PROMPT_BLOCKS * 2048
    report = {
        "blocks": store.counters()["written_blocks"],
        "fill_s": time.perf_counter() - began,
        "anonymous_bytes": used,
        "bytes_a_block_over_64_mib": (used - pools - BAR_BASE_BYTES) / blocks,
        "within_bar": used <= pools + BAR_BASE_BYTES + BAR_BLOCK_BYTES * blocks,
    }
    store.close()
    return report


def restart(directory: Path, blocks: int) -> dict[str, Any]:
    """In a fresh process: seconds from the call of open to hits on the last prompt."""
    began = time.perf_counter()
    store = open_store(directory, blocks, wait=False)
    opened_s = time.perf_counter() - began
    space = store.namespace(LAYOUT, model="bench")
    last = prompt(blocks // PROMPT_BLOCKS - 1)
    reasons = set()
    while True:
        with space.sequence(last).lookup() as ticket:
            if ticket.tokens:
                loaded = ticket.load(pool_of(space), np.arange(PROMPT_BLOCKS)).result()
                break
            reasons |= {str(reason) for reason in ticket.misses}
        time.sleep(0.005)
    first_hit_s = time.perf_counter() - began
    store.flush()
    report = {
        "open_returns_s": opened_s,
        "first_hit_s": first_hit_s,
        "tokens_hit": loaded.tokens,
        "misses_before": sorted(reasons),
        "blocks": store.stats()["tiers"]["disk"]["blocks"],
        "anonymous_bytes": anonymous_bytes(),
    }
    store.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--keep", type=Path, help="use this directory, and leave the store in it")
    parser.add_argument("--restart", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.restart:
        print(json.dumps(restart(arguments.restart, arguments.blocks)))
        return
    build = Path("build")
    build.mkdir(exist_ok=True)
    directory = arguments.keep or Path(tempfile.mkdtemp(dir=build)) / "store"
    filled = {} if (directory / "store.toml").exists() else fill(directory, arguments.blocks)
    command = [sys.executable, "-m", "bench.scale", "--blocks", str(arguments.blocks)]
    child = subprocess.run(
        [*command, "--restart", str(directory)], check=True, capture_output=True, text=True
    )
    report = {"filled": filled, "restarted": json.loads(child.stdout)}
    if not arguments.keep:
        shutil.rmtree(directory.parent)
    print(json.dumps(report, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
