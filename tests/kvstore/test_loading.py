"""Loads: only what was asked for is touched, layer by layer, and a failure is a shorter prefix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.errors import LayoutError, TokenError
from support.checks import assert_at_rest
from support.engine import UNTOUCHED, WAIT_S, Engine, prompt
from support.faulty import CountingIo, FailingIo
from support.layouts import small_layout
from support.moves import emptied_host

BLOCK = 8
BLOCKS = 12
TOKENS = prompt(BLOCKS * BLOCK + 1)


def engine_of(store: Store, pages_per_block: int = 1) -> Engine:
    space = store.namespace(small_layout(BLOCK, layers=5), model="m")
    return Engine(space, BLOCKS * pages_per_block, pages_per_block)


@pytest.fixture(params=["host", "disk"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store that has TOKENS in host memory, or on disk alone."""
    if request.param == "host":
        store = open_store(host="8MiB")
        engine_of(store).save(TOKENS)
    else:
        with open_store(tmp_path / "store", host="8MiB", disk_capacity="32MiB") as first:
            engine_of(first).save(TOKENS)
        store = open_store(tmp_path / "store", host="8MiB")
    yield store
    assert_at_rest(store)
    store.close()


def touched(engine: Engine) -> set[int]:
    """Pages with any byte that is not as `clear` left it."""
    return {
        page
        for page in range(engine.pages)
        if any((array[page] != UNTOUCHED).any() for array in engine.arrays)
    }


def test_every_layer_is_usable_when_its_wait_returns(stored: Store) -> None:
    engine = engine_of(stored)
    sequence = engine.space.sequence(TOKENS)
    table = engine.table(BLOCKS)
    engine.compute(sequence, table)
    expected = [array.copy() for array in engine.arrays]
    engine.clear()
    load = sequence.lookup().load(engine.pool, table)
    for layer, (first, last) in enumerate(engine.layout.layer_runs):
        assert load.wait_layer(layer, WAIT_S) == BLOCKS * BLOCK
        for run in range(first, last):
            assert np.array_equal(engine.arrays[run], expected[run])
    result = load.result(WAIT_S)
    assert load.done
    assert result.tokens == BLOCKS * BLOCK
    assert sum(result.by_tier.values()) == BLOCKS * BLOCK
    assert sum(result.bytes_by_tier.values()) == BLOCKS * engine.layout.payload_bytes


@pytest.mark.parametrize("pages_per_block", [1, 2, 4])
@pytest.mark.parametrize("skip_pages", [0, 1, 2, 3, 5, 7])
def test_the_engines_own_pages_are_not_touched(
    stored: Store, skip_pages: int, pages_per_block: int
) -> None:
    engine = engine_of(stored, pages_per_block)
    page_tokens = BLOCK // pages_per_block
    table = engine.table(BLOCKS)
    sequence = engine.space.sequence(TOKENS)
    engine.clear()
    load = sequence.lookup(skip_tokens=skip_pages * page_tokens).load(engine.pool, table)
    result = load.result(WAIT_S)
    assert result.tokens == BLOCKS * BLOCK
    assert touched(engine) == set(table[skip_pages:].tolist())
    loaded = [array.copy() for array in engine.arrays]
    engine.compute(sequence, table)  # what the whole prompt's pages must be
    for run, array in enumerate(engine.arrays):
        for page in table[skip_pages:].tolist():
            assert np.array_equal(loaded[run][page], array[page])


def test_a_skip_at_load_wins_over_that_of_the_lookup(stored: Store) -> None:
    engine = engine_of(stored)
    table = engine.table(BLOCKS)
    engine.clear()
    ticket = engine.space.sequence(TOKENS).lookup(skip_tokens=BLOCK)
    ticket.load(engine.pool, table, skip_tokens=3 * BLOCK).result(WAIT_S)
    assert touched(engine) == set(table[3:].tolist())


def test_a_skip_beyond_what_is_stored_loads_nothing(stored: Store) -> None:
    engine = engine_of(stored)
    engine.clear()
    ticket = engine.space.sequence(TOKENS).lookup(skip_tokens=50 * BLOCK)
    result = ticket.load(engine.pool, range(BLOCKS)).result(WAIT_S)
    assert sum(result.by_tier.values()) == sum(result.bytes_by_tier.values()) == 0
    assert touched(engine) == set()


@pytest.mark.parametrize("stop", [0, BLOCK, 5 * BLOCK, BLOCKS * BLOCK, 10**6])
def test_only_a_part_of_the_prefix(stored: Store, stop: int) -> None:
    engine = engine_of(stored)
    table = engine.table(BLOCKS)
    engine.clear()
    ticket = engine.space.sequence(TOKENS).lookup()
    result = ticket.load(engine.pool, table, stop_tokens=stop).result(WAIT_S)
    blocks = min(stop // BLOCK, BLOCKS)
    assert result.tokens == blocks * BLOCK
    assert touched(engine) == set(table[:blocks].tolist())
    assert engine.wrong(ticket.sequence, table, result.tokens) == []


@pytest.mark.parametrize(
    "options",
    [{"skip_tokens": -1}, {"skip_tokens": 3}, {"stop_tokens": -8}, {"stop_tokens": 3}],
)
def test_parts_of_a_page_or_of_a_block_cannot_be_loaded(
    stored: Store, options: dict[str, Any]
) -> None:
    engine = engine_of(stored)
    with engine.space.sequence(TOKENS).lookup() as ticket:
        with pytest.raises(TokenError, match="whole number of") as caught:
            ticket.load(engine.pool, range(BLOCKS), **options)
        assert "\n" not in str(caught.value)
        assert engine.load(ticket).tokens == BLOCKS * BLOCK  # the lease was kept


def test_a_block_table_that_cannot_be_keeps_the_lease(stored: Store) -> None:
    engine = engine_of(stored)
    with engine.space.sequence(TOKENS).lookup() as ticket:
        for table in (range(BLOCKS - 1), [BLOCKS] * BLOCKS, ["a"] * BLOCKS):
            with pytest.raises(LayoutError):
                ticket.load(engine.pool, table)
        assert engine.load(ticket).tokens == BLOCKS * BLOCK


def test_an_engine_may_reuse_its_block_table_at_once(stored: Store) -> None:
    engine = engine_of(stored)
    table = engine.table(BLOCKS)
    buffer = table.copy()
    engine.clear()
    ticket = engine.space.sequence(TOKENS).lookup()
    load = ticket.load(engine.pool, buffer)
    buffer[:] = 0
    assert load.result(WAIT_S).tokens == BLOCKS * BLOCK
    assert engine.wrong(ticket.sequence, table, BLOCKS * BLOCK) == []


def test_waiting_for_less_time_than_it_takes_leaves_the_load_running(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", host="8MiB", disk_capacity="32MiB") as first:
        engine_of(first).save(TOKENS)
    io = CountingIo()
    with open_store(tmp_path / "store", host="8MiB", io=io) as store:
        engine = engine_of(store)
        io.gate.clear()
        ticket = engine.space.sequence(TOKENS).lookup()
        engine.clear()
        load = ticket.load(engine.pool, range(BLOCKS))
        for wait in (lambda: load.result(0.01), lambda: load.wait_layer(0, 0.01)):
            with pytest.raises(TimeoutError) as caught:
                wait()
            assert "\n" not in str(caught.value)
        assert not load.done
        io.gate.set()
        assert load.result(WAIT_S).tokens == BLOCKS * BLOCK
        assert engine.wrong(ticket.sequence, np.arange(BLOCKS), BLOCKS * BLOCK) == []


def test_a_cancelled_load_ends_and_says_how_far_it_is_right(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", host="8MiB", disk_capacity="32MiB") as first:
        engine_of(first).save(TOKENS)
    io = CountingIo()
    with open_store(tmp_path / "store", host="8MiB", io=io) as store:
        engine = engine_of(store)
        sequences = [engine.space.sequence(TOKENS) for _ in range(8)]
        io.gate.clear()
        engine.clear()
        loads = [s.lookup().load(engine.pool, range(BLOCKS)) for s in sequences]
        for load in loads:  # some are reading, some wait for them, some are still queued
            load.cancel()
        io.gate.set()
        for load in loads:
            result = load.result(WAIT_S)
            assert engine.wrong(load.ticket.sequence, np.arange(BLOCKS), result.tokens) == []
            assert result.reason in (None, MissReason.EXPIRED)
        assert_at_rest(store)
        assert engine.ask(TOKENS).tokens == BLOCKS * BLOCK


# --- what a device that fails does to a load

FAULTS = [
    (OSError(5, "Input/output error"), MissReason.IO_ERROR),
    (None, MissReason.IO_ERROR),  # a short read
    (MemoryError("no memory"), MissReason.IO_ERROR),
]


@pytest.mark.parametrize(("error", "reason"), FAULTS, ids=["eio", "short", "memory"])
def test_a_device_that_fails_is_a_miss_and_the_next_save_heals_it(
    tmp_path: Path, error: Exception | None, reason: MissReason
) -> None:
    path = tmp_path / "store"
    with open_store(path, host="8MiB", disk_capacity="32MiB") as first:
        engine_of(first).save(TOKENS)
    io = FailingIo()
    with open_store(path, host="8MiB", io=io) as store:
        engine = engine_of(store)
        io.error, io.fail_reads = error, 10_000
        with engine.space.sequence(TOKENS).lookup() as ticket:
            assert ticket.tokens == BLOCKS * BLOCK
            result = engine.load(ticket)
        assert (result.tokens, result.reason) == (0, reason)
        assert store.counters()["bad_blocks.disk"] > 0
        assert store.counters()[f"misses.{reason}"] > 0
        io.fail_reads = 0
        assert_at_rest(store)
        engine.save(TOKENS)
        store.flush()
        assert engine.ask(TOKENS).tokens == BLOCKS * BLOCK
        assert_at_rest(store)


def test_one_bad_bit_cuts_the_prefix_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, host="8MiB", disk_capacity="32MiB") as first:
        engine_of(first).save(TOKENS)
    io = FailingIo()
    with open_store(path, host="8MiB", io=io) as store:
        engine = engine_of(store)
        header = engine.space.record.header_bytes
        for at, reason in ((header + 77, "checksum"), (40, "checksum"), (0, "header")):
            io.flip_at = at
            result = engine.ask(TOKENS)
            assert result.tokens == 0
            assert result.reason == reason
            io.flip_at = None
            assert engine.ask(TOKENS).tokens == 0  # dropped, with all below
            engine.save(TOKENS)
            store.flush()
            assert engine.ask(TOKENS).tokens == BLOCKS * BLOCK  # from host memory
            emptied_host(store)
            assert engine.ask(TOKENS).by_tier[TierName.DISK] == BLOCKS * BLOCK
            assert_at_rest(store)
            emptied_host(store)
