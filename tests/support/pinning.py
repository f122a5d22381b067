"""Stores of a few prompts, for tests of what stays when more comes than they hold."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.pin_outcomes import Pinned
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.layout import Layout
from support.engine import Engine, prompt

BLOCK = 4
BLOCKS = 8
HOUR_S = 3600.0
DISK: dict[str, Any] = {"host": "4MiB", "disk_capacity": "12MiB", "dirty_age_s": 0.0}


def engine_of(store: Store, model: str = "m") -> Engine:
    """Blocks of 50 KB in a host tier of 4 MiB: 8 prompts of 8 blocks fill it."""
    layout = Layout.opaque(
        layers=2, run_bytes=(25_001,), dtype="int4", format="engine-1", block_tokens=BLOCK
    )
    return Engine(store.namespace(layout, model=model), 2 * BLOCKS)


def tokens_of(seed: int, blocks: int = BLOCKS) -> npt.NDArray[np.int32]:
    return prompt(blocks * BLOCK + 1, seed)


def fill(engine: Engine, first_seed: int = 1000, prompts: int = 40) -> None:
    """Save several times what host memory, and a disk of 12 MiB, holds."""
    for seed in range(first_seed, first_seed + prompts):
        engine.save(tokens_of(seed))
        engine.space.store.flush()


def found(engine: Engine, tokens: npt.NDArray[np.int32]) -> dict[TierName, int]:
    """Blocks that a lookup finds, by tier."""
    with engine.space.sequence(tokens).lookup() as ticket:
        return {tier: count // BLOCK for tier, count in ticket.by_tier.items()}


def stored(engine: Engine, tokens: npt.NDArray[np.int32]) -> int:
    return sum(found(engine, tokens).values())


def pin(engine: Engine, tokens: npt.NDArray[np.int32], ttl_s: float = HOUR_S) -> Pinned:
    answer = engine.space.store.pin(engine.space.sequence(tokens), ttl_s=ttl_s)
    assert isinstance(answer, Pinned)
    return answer


def pin_and_wait(directory: Path) -> None:
    """Two pins, one of blocks that are on disk and one of blocks that are not; then for ever."""
    store = open_store(directory, **DISK | {"dirty_age_s": HOUR_S})
    engine = engine_of(store)
    engine.save(tokens_of(1))
    store.flush()
    pin(engine, tokens_of(1))
    engine.save(tokens_of(2, 3))
    store.flush()
    pin(engine, tokens_of(2))
    os.write(1, b"pinned\n")
    time.sleep(HOUR_S)


if __name__ == "__main__":
    pin_and_wait(Path(sys.argv[1]))
