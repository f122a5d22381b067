"""An engine notices an invalidation: its own pages are not given out again, and nothing is saved of
requests that began before.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.invalidation import Scope
from kvstore.planner import Planner
from kvstore.runtime.engine import Engine
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.request import SamplingParams
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from support.tiny_llama import VOCAB, load_model, make_pool, write_model

B = 16
PROMPT = np.random.default_rng(4).integers(2, VOCAB, 6 * B + 3).astype(np.int32)
USABLE = 6 * B


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_model(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store", host="32MiB", disk_capacity="64MiB") as store:
        yield store
        store.check_integrity()
        assert store.leaks() == {"leases": 0, "holds": 0}


def engine(model: LlamaModel, store: Store, name: str = "tiny") -> Engine:
    pool = make_pool(128)
    space = store.namespace(pool.layout, model=name)
    return Engine(model, pool, space=space, planner=Planner(eager=True))


def reused(engine: Engine, store: Store) -> dict[TierName, int]:
    """Tokens of the prompt that came from each tier."""
    request = engine.generate([PROMPT], SamplingParams(max_tokens=2))[0]
    store.flush()
    engine.check_integrity()
    return {tier: tokens for tier, tokens in request.tier_tokens.items() if tokens}


def test_pages_on_the_device_are_forgotten_with_the_other_tiers(
    model: LlamaModel, store: Store
) -> None:
    one, other = engine(model, store), engine(model, store, "other")
    for each in (one, other):
        assert reused(each, store) == {}
        assert reused(each, store) == {TierName.DEVICE: USABLE}
    assert store.invalidate(Scope(model="tiny")).blocks == USABLE // B
    assert reused(one, store) == {}
    assert reused(one, store) == {TierName.DEVICE: USABLE}
    assert reused(other, store) == {TierName.DEVICE: USABLE}
    assert reused(engine(model, store), store) == {TierName.HOST: USABLE}


def test_a_prefix_that_only_the_device_still_has(model: LlamaModel, store: Store) -> None:
    one = engine(model, store)
    reused(one, store)
    key = one._space.sequence(PROMPT).keys[0].tobytes().hex()
    placement = store._placement
    with placement.lock:
        for tier in (TierName.HOST, TierName.DISK):
            rows = placement.index.rows_of(tier=tier)
            placement.left(tier, placement.index.drop_subtree(rows, tier))
    assert store.invalidate(Scope(prefix=key)).blocks == 0
    assert reused(one, store) == {}


def test_a_running_request_ends_and_leaves_nothing(model: LlamaModel, store: Store) -> None:
    one = engine(model, store)
    running = one.submit(PROMPT, SamplingParams(max_tokens=2 * B))
    while len(running.output) < B // 2:
        one.step()
    store.invalidate(Scope(model="tiny"))
    one.run()
    assert len(running.output) == 2 * B
    store.flush()
    assert store.counters()["save_drops.invalidated"] > 0
    assert reused(one, store) == {}


def test_a_block_that_an_engine_reports_is_computed_and_written_again(
    model: LlamaModel, store: Store
) -> None:
    one = engine(model, store)
    reused(one, store)
    assert store.report_bad(one._space.sequence(PROMPT), 2) == USABLE // B - 2
    assert reused(one, store) == {TierName.HOST: 2 * B}
    assert reused(engine(model, store), store) == {TierName.HOST: USABLE}
