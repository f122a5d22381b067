"""What is loaded is what was saved, for exactly those tokens, or it is a miss.

Random layouts, random trees of prompts, tiers too small for them, and restarts, against a plain
dictionary that knows which prefixes were ever saved. A failing seed is in the test's name.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.space import Space
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine
from support.layouts import random_layout

Tokens = npt.NDArray[np.int32]
HOST_BYTES = 4 << 20
DISK_BYTES = 9 << 20
BLOCK_BYTES_MAX = 256 << 10
TIGHT_BLOCK_BYTES = 120_000  # Blocks of this size soon fill both tiers.
PAGES = 24
SEEDS = 8
LONG_SEEDS = 400


class Prompts:
    """A tree of prompts: shared, repeated, diverging mid-block, and of every awkward length."""

    def __init__(self, random: np.random.Generator, block: int, blocks_max: int) -> None:
        self._random = random
        self._block = block
        self._tokens_max = blocks_max * block + block - 1
        self._known: list[Tokens] = [np.zeros(0, np.int32)]

    def next(self) -> Tokens:
        random, block = self._random, self._block
        base = self._known[int(random.integers(len(self._known)))]
        if len(base) and random.random() < 0.3:
            return base
        cut = int(random.integers(0, len(base) + 1))
        if random.random() < 0.5:
            cut -= cut % block
        whole = int(random.integers(1, 8)) * block
        length = int(random.choice([1, max(1, block - 1), block, block + 1, whole, whole + 1]))
        # Few different tokens: prompts meet again by accident too.
        tail = random.integers(0, 3 if random.random() < 0.3 else 50_000, length, dtype=np.int32)
        made = np.concatenate([base[:cut], tail])[: self._tokens_max]
        self._known.append(made)
        return made


class Run:
    """One random run over one store."""

    def __init__(self, seed: int, directory: Path | None) -> None:
        self.random = np.random.default_rng(seed)
        self.directory = directory
        self.saved: set[bytes] = set()
        self.hits = {TierName.HOST: 0, TierName.DISK: 0}
        layout = random_layout(self.random)
        least = TIGHT_BLOCK_BYTES if seed % 2 else 0
        while not least <= layout.payload_bytes <= BLOCK_BYTES_MAX:
            layout = random_layout(self.random)
        self.layout: Layout = layout
        pieces = [n for n in (1, 2, 4) if not layout.block_tokens % n]
        pieces = [n for n in pieces if not (layout.run_lengths % n).any()]
        self.pages_per_block = int(self.random.choice(pieces))
        self.blocks_max = PAGES // self.pages_per_block
        self.prompts = Prompts(self.random, layout.block_tokens, self.blocks_max)
        self.hash = str(self.random.choice(["xxh3-128", "sha256"]))
        self.store, self.engine = self.open()

    def open(self) -> tuple[Store, Engine]:
        store = open_store(
            self.directory,
            host=HOST_BYTES,
            disk_capacity=DISK_BYTES if self.directory else None,
            hash=self.hash,
        )
        space = store.namespace(self.layout, model="m", tenant="t")
        return store, Engine(space, PAGES, self.pages_per_block)

    @property
    def space(self) -> Space:
        return self.engine.space

    def save(self) -> None:
        tokens = self.prompts.next()
        sequence, result = self.engine.save(tokens)
        assert result.saved + result.present + sum(result.dropped.values()) == sequence.blocks
        kept = result.saved + result.present
        self.saved.update(key.tobytes() for key in sequence.keys[:kept])
        if kept == sequence.blocks and sequence.blocks:
            # Nothing came in between, so nothing can have given way to anything.
            usable = (sequence.length - 1) // self.layout.block_tokens
            with self.space.sequence(tokens).lookup() as ticket:
                assert ticket.blocks == usable

    def ask(self) -> None:
        sequence = self.space.sequence(self.prompts.next())
        known = [key.tobytes() in self.saved for key in sequence.keys]
        longest = len(known) if all(known) else known.index(False)
        with sequence.lookup() as ticket:
            assert ticket.blocks <= min(
                longest, max(0, sequence.length - 1) // self.space.layout.block_tokens
            )
            assert sum(ticket.by_tier.values()) == ticket.tokens
            if not ticket.blocks:
                return
            result = self.engine.load(ticket, seed=int(self.random.integers(1000)))
        assert result.tokens == ticket.tokens, result.reason
        for tier in self.hits:
            self.hits[tier] += result.by_tier[tier]

    def step(self) -> None:
        action = self.random.random()
        if action < 0.5:
            self.save()
        elif action < 0.94:
            self.ask()
        elif action < 0.97 or self.directory is None:
            assert_at_rest(self.store)
        else:
            self.restart()

    def restart(self) -> None:
        self.store.close()
        self.store, self.engine = self.open()
        self.store.check_integrity()

    def finish(self) -> None:
        assert_at_rest(self.store)
        counters = self.store.counters()
        bad = {n: c for n, c in counters.items() if n.startswith("bad_blocks") and c}
        assert not bad
        self.store.close()
        if self.directory is not None:
            assert disk_usage(self.directory) <= DISK_BYTES


def run(seed: int, directory: Path | None, steps: int) -> Run:
    made = Run(seed, directory)
    try:
        for _ in range(steps):
            made.step()
        made.finish()
    finally:
        made.store.close()
    return made


@pytest.mark.parametrize("seed", range(SEEDS))
def test_host(seed: int) -> None:
    run(seed, None, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_host_and_disk_and_restarts(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path / "store", 100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1000 + LONG_SEEDS))
def test_many_runs(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path / "store" if seed % 4 else None, 300)


@pytest.mark.slow
def test_every_tier_serves_hits(tmp_path: Path) -> None:
    """So that the runs above cannot pass on a store that has nothing."""
    found = {TierName.HOST: 0, TierName.DISK: 0}
    for seed in range(4):
        for tier, tokens in run(100 + seed, tmp_path / str(seed), 100).hits.items():
            found[tier] += tokens
    assert found[TierName.HOST] > 0
    assert found[TierName.DISK] > 0
