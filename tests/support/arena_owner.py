"""Fills host memory and goes on saving until it is killed: support.arena_owner STORE BYTES.

Prints "full NUMBER" when the prompts before NUMBER have taken most of it; "saved NUMBER" after each
later one.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import Config
from kvstore.store import Store
from kvstore.tiers.layout import Layout
from support.engine import Engine

LAYOUT = Layout.opaque(
    layers=8, run_bytes=(126_000, 126_000), dtype="fp8", format="engine-1", block_tokens=16
)  # just under 2 MiB a block
BLOCKS = 8
DISK_BYTES = 80 << 20  # Far less than host memory: most blocks are in the arena alone.
SHARE = 0.75


def config_of(directory: Path, host_bytes: int) -> Config:
    """Of the owner that is killed, and of the next one."""
    return Config(
        host_capacity_bytes=host_bytes,
        disk_paths=(directory,),
        disk_capacity_bytes=DISK_BYTES,
        persist=True,
        dirty_age_s=3600,
        clean_fraction=0.0,
    )


def prompts_in(host_bytes: int) -> int:
    """How many prompts take SHARE of host memory."""
    return int(host_bytes * SHARE) // (BLOCKS * LAYOUT.payload_bytes)


def prompt_of(number: int) -> Any:
    """The tokens of a prompt."""
    return np.random.default_rng(number).integers(0, 50_000, BLOCKS * 16 + 1, dtype=np.int32)


def main(directory: Path, host_bytes: int) -> None:
    store = Store(config_of(directory, host_bytes))
    engine = Engine(store.namespace(LAYOUT, model="m"), BLOCKS)
    full = prompts_in(host_bytes)
    for number in itertools.count():
        _, saved = engine.save(prompt_of(number))
        assert number >= full or saved.saved == BLOCKS, saved
        if number >= full:
            print(f"full {full}" if number == full else f"saved {number}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
