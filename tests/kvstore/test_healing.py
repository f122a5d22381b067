"""A block that an engine found bad leaves every tier, and the next save writes it again."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import SaveDrop
from kvstore.tiers.errors import TokenError
from support.checks import NO_LEAKS, assert_at_rest
from support.engine import WAIT_S, Engine, prompt
from support.layouts import small_layout
from support.moves import emptied_host

BLOCK, BLOCKS = 4, 8
LAYOUT = small_layout(BLOCK)
TOKENS = prompt(BLOCK * BLOCKS + 1)
WHOLE = BLOCK * BLOCKS
SIZES: dict[str, Any] = {"host": "8MiB", "disk_capacity": "16MiB"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="m", tenant="t"), 64)


def found(store: Store) -> int:
    """Tokens of the prompt that can be loaded, every byte of them checked."""
    return engine_of(store).ask(TOKENS).tokens


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_block_reported_bad_goes_everywhere_and_is_written_again(home: Path, where: str) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        store.flush()
        if where == "disk":
            emptied_host(store)
        sequence = engine.space.sequence(TOKENS)
        elsewhere = engine.space.sequence(TOKENS)
        epoch = engine.space.epoch
        assert store.report_bad(sequence, 3) == BLOCKS - 3
        assert engine.space.epoch != epoch, "an engine with blocks of its own must notice"
        assert store.counters()[f"bad_blocks.{where}"] == 1
        assert found(store) == 3 * BLOCK
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        poisoned = elsewhere.save(engine.pool, table).result(WAIT_S)
        assert poisoned.dropped == {SaveDrop.INVALIDATED: BLOCKS}
        healed = sequence.save(engine.pool, table).result(WAIT_S)
        assert (healed.saved, healed.present) == (BLOCKS - 3, 3)
        assert found(store) == WHOLE
        assert_at_rest(store)
        assert store.report_bad(engine.space.sequence(prompt(9, 7)), 1) == 0
        assert store.counters()["bad_blocks.device"] == 1
        with pytest.raises(TokenError, match="full blocks"):
            store.report_bad(sequence, BLOCKS)
    with open_store(home, **SIZES) as store:
        assert found(store) == WHOLE
        assert store.leaks() == NO_LEAKS
