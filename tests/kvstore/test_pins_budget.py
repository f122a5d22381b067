"""What pins keep stays within their share of a tier, and a tier full of them freezes nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.pin_outcomes import Pinned, PinRefusal, PinRefused
from kvstore.pins import PINS_MAX
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import SaveDrop, TierName
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest
from support.engine import Engine, prompt
from support.manual_clock import ManualClock
from support.pinning import (
    BLOCK,
    BLOCKS,
    DISK,
    engine_of,
    fill,
    found,
    pin,
    stored,
    tokens_of,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def host(clock: ManualClock) -> Iterator[Store]:
    with open_store(host="4MiB", clock=clock, lease_s=1) as store:
        yield store
        assert_at_rest(store)


def test_what_is_shared_counts_once_and_what_is_too_much_is_refused(host: Store) -> None:
    """A quarter of 4 MiB: 18 blocks of 57,344 bytes."""
    engine = engine_of(host)
    slot_bytes = engine.space.record.slot_bytes
    budget_bytes = (4 << 20) // 4
    shared = tokens_of(1, 6)[:-1]
    pins = []
    for seed in range(10):
        tokens = np.concatenate([shared, tokens_of(100 + seed, 2)])
        engine.save(tokens)
        answer = host.pin(engine.space.sequence(tokens), ttl_s=60)
        fits = (6 + 2 * (seed + 1)) * slot_bytes <= budget_bytes
        assert isinstance(answer, Pinned) == fits
        if isinstance(answer, Pinned):
            assert answer.bytes == 8 * slot_bytes
            pins.append(answer)
        else:
            assert answer == PinRefused(PinRefusal.OVER_BUDGET)
        host.check_integrity()
    assert 1 < len(pins) < 10
    counters = host.counters()
    assert counters["pinned_blocks"] == 6 + 2 * len(pins)
    assert counters["pinned_bytes"] == (6 + 2 * len(pins)) * slot_bytes <= budget_bytes
    assert counters["pin_refusals"] == 10 - len(pins)
    assert host.pins() == pins
    for one in pins:
        assert host.unpin(one.pin_id)
    assert (host.counters()["pinned_blocks"], host.counters()["pinned_bytes"]) == (0, 0)


def test_a_pin_may_be_larger_than_its_share_of_host_memory_beside_a_disk(tmp_path: Path) -> None:
    sizes = {"host": "4MiB", "disk_capacity": "32MiB", "dirty_age_s": 0.0}
    with open_store(tmp_path / "store", **sizes) as store:
        engine = engine_of(store)
        seeds = range(1, 11)
        for seed in seeds:
            engine.save(tokens_of(seed))
            pin(engine, tokens_of(seed))
            store.flush()
            store.check_integrity()
        fill(engine, prompts=80)
        assert all(stored(engine, tokens_of(seed)) == BLOCKS for seed in seeds)
        for seed in seeds:
            assert engine.ask(tokens_of(seed)).tokens == BLOCKS * BLOCK
            store.check_integrity()
        # The oldest pin is kept in host memory too; the newest is beyond its share there.
        fill(engine, 2000, prompts=20)
        assert found(engine, tokens_of(1))[TierName.HOST] == BLOCKS
        assert found(engine, tokens_of(10)) == {TierName.HOST: 0, TierName.DISK: BLOCKS}
        assert_at_rest(store)


def test_where_the_share_shrinks_the_newest_pins_lose_first(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", **DISK) as store:
        engine = engine_of(store)
        for seed in (1, 2):
            engine.save(tokens_of(seed))
            pin(engine, tokens_of(seed))
        nine_blocks = 9.5 * engine.space.record.slot_bytes / (12 << 20)
    with open_store(tmp_path / "store", pin_fraction=nine_blocks, **DISK) as store:
        engine = engine_of(store)
        store.check_integrity()
        fill(engine)
        assert (stored(engine, tokens_of(1)), stored(engine, tokens_of(2))) == (BLOCKS, 1)
        assert [one.stored_blocks for one in store.pins()] == [BLOCKS, 1]
        assert store.unpin(1)
        engine.save(tokens_of(2))
        store.flush()
        fill(engine, 2000)
        assert (stored(engine, tokens_of(1)), stored(engine, tokens_of(2))) == (0, BLOCKS)
        assert_at_rest(store)


def test_only_so_many_pins() -> None:
    with open_store(host="32MiB", pin_fraction=1.0) as store:
        layout = Layout.opaque(layers=1, run_bytes=(16,), dtype="x", format="e", block_tokens=1)
        engine = Engine(store.namespace(layout, model="m"), PINS_MAX + 1)
        sequence, saved = engine.save(prompt(PINS_MAX + 1))
        assert saved.saved == PINS_MAX + 1
        keys = [key.tobytes() for key in sequence.keys]
        for key in keys[:PINS_MAX]:
            assert isinstance(store.pin(key, ttl_s=60), Pinned)
        assert store.pin(keys[PINS_MAX], ttl_s=60) == PinRefused(PinRefusal.TOO_MANY)
        assert len(store.pins()) == PINS_MAX
        assert store.unpin(7)
        assert isinstance(store.pin(keys[PINS_MAX], ttl_s=60), Pinned)
        store.check_integrity()


def test_a_tier_that_is_pinned_whole_drops_saves_at_once_and_goes_on_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Field report A23: a tier full of pinned blocks wedged, with a log line for each failure."""
    with open_store(host="4MiB", pin_fraction=1.0) as store:
        engine = engine_of(store)
        pinned = []
        for seed in range(20):
            saved = engine.save(tokens_of(seed))[1].saved
            if saved:
                pinned.append(pin(engine, tokens_of(seed, saved)))
        before = store.counters()
        table = engine.table(BLOCKS)
        with caplog.at_level(logging.INFO):
            for seed in range(1000):
                save = engine.space.sequence(tokens_of(seed + 100)).save(engine.pool, table)
                assert save.result(10).dropped == {SaveDrop.HOST_FULL: BLOCKS}
            store.check_integrity()
        assert len(caplog.records) <= 1
        name = f"save_drops.{SaveDrop.HOST_FULL}"
        assert store.counters()[name] - before[name] == 1000 * BLOCKS
        assert all(one.stored_blocks == one.blocks for one in store.pins())
        assert store.unpin(pinned[3].pin_id)
        assert engine.save(tokens_of(100))[1].saved == BLOCKS
        assert engine.ask(tokens_of(100)).tokens == BLOCKS * BLOCK
        assert stored(engine, tokens_of(3)) == 0
        assert all(one.stored_blocks == one.blocks for one in store.pins())
        assert_at_rest(store)


@pytest.mark.parametrize("tier", ["host_bytes", "disk_bytes"])
def test_pins_keep_no_tier_from_shrinking_and_stay_within_their_share(
    tmp_path: Path, tier: str
) -> None:
    sizes: dict[str, Any] = {"host": "12MiB", "disk_capacity": "24MiB", "dirty_age_s": 0.0}
    with open_store(tmp_path / "store", pin_fraction=1.0, **sizes) as store:
        engine = engine_of(store)
        for seed in range(20):
            engine.save(tokens_of(seed))
            pin(engine, tokens_of(seed))
            store.flush()
        assert store.resize(**{tier: 8 << 20}).reason is None
        store.check_integrity()
        assert len(store.pins()) == 20
        assert 0 < sum(one.stored_blocks for one in store.pins()) <= 20 * BLOCKS
        assert_at_rest(store)
