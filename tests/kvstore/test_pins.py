"""Pins: a prefix that a user wishes to keep stays, until its time is over, within a budget."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.invalidation import Scope
from kvstore.pin_outcomes import Pinned, PinRefusal, PinRefused
from kvstore.pins import TTL_MAX_S
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest
from support.engine import Engine
from support.manual_clock import ManualClock
from support.pinning import (
    BLOCK,
    BLOCKS,
    DISK,
    HOUR_S,
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


# --- kept


def test_a_pinned_prefix_outlives_a_flood_of_host_memory_and_another_does_not(host: Store) -> None:
    engine = engine_of(host)
    engine.save(tokens_of(1))
    engine.save(tokens_of(2))
    pinned = pin(engine, tokens_of(1))
    assert (pinned.blocks, pinned.stored_blocks) == (BLOCKS, BLOCKS)
    fill(engine)
    assert stored(engine, tokens_of(1)) == BLOCKS
    assert stored(engine, tokens_of(2)) == 0
    assert engine.ask(tokens_of(1)).tokens == BLOCKS * BLOCK
    assert host.unpin(pinned.pin_id)
    fill(engine, 2000)
    assert stored(engine, tokens_of(1)) == 0  # So it was the pin.
    assert not host.unpin(pinned.pin_id)


def test_a_pinned_prefix_outlives_a_flood_of_both_tiers_and_another_does_not(
    tmp_path: Path,
) -> None:
    with open_store(tmp_path / "store", **DISK) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        engine.save(tokens_of(2))
        pin(engine, tokens_of(1))
        fill(engine)
        assert store.counters()["evicted_blocks.disk"] > BLOCKS
        assert found(engine, tokens_of(1)) == {TierName.HOST: BLOCKS, TierName.DISK: 0}
        assert stored(engine, tokens_of(2)) == 0
        assert store.pins()[0].stored_blocks == BLOCKS
        assert_at_rest(store)
        placement = store._placement
        rows = placement.index.rows_of(tier=TierName.DISK)
        on_disk = {bytes(key) for key in placement.index.rows.keys(rows)}
        assert {bytes(key) for key in engine.space.sequence(tokens_of(1)).keys} <= on_disk
    with open_store(tmp_path / "store", **DISK) as store:
        assert stored(engine_of(store), tokens_of(1)) == BLOCKS


def test_a_pin_has_its_blocks_written_although_all_else_is_younger(tmp_path: Path) -> None:
    """Write-back passes over what is colder than all it would displace, but for what is pinned."""
    with open_store(tmp_path / "store", **DISK | {"dirty_age_s": HOUR_S}) as store:
        engine = engine_of(store)
        fill(engine)
        engine.save(tokens_of(1))
        engine.save(tokens_of(2))
        pin(engine, tokens_of(1))
        placement = store._placement
        with placement.lock:
            index = placement.index
            rows = index.table.probe(engine.space.sequence(tokens_of(1)).keys)
            written = placement.dirty_changed.wait_for(
                lambda: np.all(index.slots(TierName.DISK, rows) >= 0), 30
            )
        assert written
        assert_at_rest(store)


def test_a_block_key_pins_it_and_all_before_it(host: Store) -> None:
    engine, other = engine_of(host), engine_of(host, "other")
    sequence, _ = engine.save(tokens_of(1))
    key = sequence.keys[3].tobytes()
    for name in (key, key.hex()):
        answer = host.pin(name, ttl_s=60, namespace=engine.space)
        assert isinstance(answer, Pinned)
        assert (answer.pin_id, answer.blocks, answer.key) == (1, 4, key.hex())
        assert answer.label == "m"
    assert host.pin(key, ttl_s=60, namespace=other.space) == PinRefused(PinRefusal.NOT_STORED)
    fill(engine)
    assert stored(engine, tokens_of(1)) == 4


def test_blocks_that_are_saved_later_come_under_the_pin(host: Store) -> None:
    engine = engine_of(host)
    engine.save(tokens_of(1)[: 3 * BLOCK + 1])
    pinned = pin(engine, tokens_of(1))
    assert (pinned.blocks, pinned.stored_blocks) == (BLOCKS, 3)
    engine.save(tokens_of(1))
    assert host.pins()[0].stored_blocks == BLOCKS
    fill(engine)
    assert stored(engine, tokens_of(1)) == BLOCKS


def test_a_bad_block_leaves_its_pin_and_a_save_brings_it_back(host: Store) -> None:
    engine = engine_of(host)
    sequence, _ = engine.save(tokens_of(1))
    pin(engine, tokens_of(1))
    row = int(host._placement.index.table.probe(sequence.keys[2:3])[0])
    host._placement.drop_bad(row, TierName.HOST)
    assert host.pins()[0].stored_blocks == 2
    fill(engine)
    assert stored(engine, tokens_of(1)) == 2
    engine.save(tokens_of(1))
    assert host.pins()[0].stored_blocks == BLOCKS
    fill(engine, 2000)
    assert stored(engine, tokens_of(1)) == BLOCKS


def test_another_slot_size_takes_no_segment_with_pinned_blocks(host: Store) -> None:
    engine = engine_of(host)
    engine.save(tokens_of(1))
    engine.save(tokens_of(2))
    pin(engine, tokens_of(1))
    layout = Layout.opaque(
        layers=1, run_bytes=(90_000,), dtype="int4", format="engine-1", block_tokens=BLOCK
    )
    other = Engine(host.namespace(layout, model="m", mixed=True), 2 * BLOCKS)
    fill(other, prompts=20)
    assert stored(engine, tokens_of(1)) == BLOCKS
    assert stored(other, tokens_of(1019)) == BLOCKS


# --- its time


def test_a_pin_ends_after_its_ttl_without_a_hit_and_each_hit_renews_it(
    host: Store, clock: ManualClock
) -> None:
    engine = engine_of(host)
    for seed in (1, 2):
        engine.save(tokens_of(seed))
        pin(engine, tokens_of(seed), ttl_s=100)
    for _ in range(3):
        clock.advance(60)
        assert stored(engine, tokens_of(1)) == BLOCKS  # a hit
        assert stored(engine, tokens_of(2)[: -2 * BLOCK]) == BLOCKS - 2  # of a part of it: no hit
    assert [one.expires_at for one in host.pins()] == [clock.time() + 100]
    fill(engine)
    assert (stored(engine, tokens_of(1)), stored(engine, tokens_of(2))) == (BLOCKS, 0)
    clock.advance(101)
    assert host.pins() == []
    assert host.counters()["pinned_blocks"] == 0
    fill(engine, 2000)
    assert stored(engine, tokens_of(1)) == 0


def test_a_prompt_that_ends_with_the_pin_hits_it(host: Store, clock: ManualClock) -> None:
    """A lookup stops one token short, so it cannot find the last block of just this prompt."""
    engine = engine_of(host)
    engine.save(tokens_of(1))
    pin(engine, tokens_of(1), ttl_s=100)
    clock.advance(60)
    assert stored(engine, tokens_of(1)[:-1]) == BLOCKS - 1
    assert host.pins()[0].expires_at == clock.time() + 100


def test_pinning_again_renews_the_pin_with_the_new_ttl(host: Store, clock: ManualClock) -> None:
    engine = engine_of(host)
    engine.save(tokens_of(1))
    first, second = (pin(engine, tokens_of(1), ttl_s=ttl_s) for ttl_s in (100, 10))
    assert first.pin_id == second.pin_id
    assert host.pins() == [second]
    assert second.expires_at == clock.time() + 10
    clock.advance(11)
    assert host.pins() == []


# --- misuse


def test_what_makes_no_sense_is_refused_in_a_sentence(host: Store) -> None:
    engine = engine_of(host)
    engine.save(tokens_of(1))
    for ttl_s in (0, -1, TTL_MAX_S + 1, float("nan")):
        with pytest.raises(ConfigError, match="ttl_s"):
            host.pin(engine.space.sequence(tokens_of(1)), ttl_s=ttl_s)
    for key in ("", "zz", "00" * 15, bytes(17)):
        with pytest.raises(ConfigError, match="32 hex digits"):
            host.pin(key, ttl_s=60)
    assert host.pins() == []


def test_what_is_not_stored_is_not_pinned(host: Store) -> None:
    engine = engine_of(host)
    for prefix in (engine.space.sequence(tokens_of(1)), engine.space.sequence([1]), bytes(16)):
        assert host.pin(prefix, ttl_s=60) == PinRefused(PinRefusal.NOT_STORED)
    assert host.counters()["pin_refusals"] == 3


# --- invalidation


@pytest.mark.parametrize("depth", [0, 4, 7])
def test_an_invalidated_prefix_is_not_pinned_any_more(host: Store, depth: int) -> None:
    engine = engine_of(host)
    sequence, _ = engine.save(tokens_of(1))
    engine.save(tokens_of(2))
    for key in sequence.keys[[2, 7]]:
        assert isinstance(host.pin(key.tobytes(), ttl_s=60), Pinned)
    pin(engine, tokens_of(2))
    host.invalidate(Scope(prefix=sequence.keys[depth].tobytes().hex()))
    host.check_integrity()
    assert [one.pin_id for one in host.pins()] == ([3] if depth == 0 else [1, 3])
    engine.save(tokens_of(1))
    fill(engine)
    assert stored(engine, tokens_of(1)) == (0 if depth == 0 else 3)
    assert stored(engine, tokens_of(2)) == BLOCKS


def test_an_invalidated_namespace_has_no_pins_and_others_keep_theirs(host: Store) -> None:
    for model in ("m", "other"):
        engine = engine_of(host, model)
        engine.save(tokens_of(1))
        pin(engine, tokens_of(1))
    host.invalidate(Scope(model="m"))
    assert [one.label for one in host.pins()] == ["other"]
    host.invalidate(Scope(everything=True))
    assert host.pins() == []
    host.check_integrity()
