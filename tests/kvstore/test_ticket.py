"""Tickets: what was found stays until it is loaded, given back, or its time is over."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.clock import Clock
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.ticket import SWEEP_MIN, Leases
from kvstore.tiers.base import MissReason, SaveDrop, TierName
from kvstore.tiers.layout import Layout
from support.engine import Engine, prompt

BLOCK = 4
BLOCKS = 8
NO_LEAKS = {"leases": 0, "holds": 0}


def engine_of(store: Store) -> Engine:
    """Blocks of 100 KB in a tier of 4 MiB: a few dozen fill it."""
    layout = Layout.opaque(
        layers=2, run_bytes=(50_001,), dtype="int4", format="engine-1", block_tokens=BLOCK
    )
    return Engine(store.namespace(layout, model="m"), 2 * BLOCKS)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host="4MiB", lease_s=3600) as opened:
        yield opened
        assert opened.leaks() == NO_LEAKS
        opened.check_integrity()


def ask_for(length: int, seed: int = 1) -> np.ndarray:
    return prompt(length * BLOCK + 1, seed)


def fill(engine: Engine, first_seed: int = 100) -> dict[SaveDrop, int]:
    """Save more than the tier holds; what was dropped."""
    dropped: dict[SaveDrop, int] = {}
    for seed in range(first_seed, first_seed + 10):
        for reason, blocks in engine.save(ask_for(BLOCKS, seed))[1].dropped.items():
            dropped[reason] = dropped.get(reason, 0) + blocks
    return dropped


def test_a_leased_prefix_outlives_a_flood(store: Store) -> None:
    engine = engine_of(store)
    engine.save(ask_for(BLOCKS))
    ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
    fill(engine)
    assert engine.load(ticket).tokens == BLOCKS * BLOCK
    fill(engine, 200)
    # The same without a lease is gone: the test could fail.
    assert engine.ask(ask_for(BLOCKS)).tokens == 0


def test_release_ends_the_lease_and_may_be_called_again(store: Store) -> None:
    engine = engine_of(store)
    engine.save(ask_for(BLOCKS))
    ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
    assert store.leaks()["leases"] > 0
    for _ in range(3):
        ticket.release()
        assert store.leaks() == NO_LEAKS
    with ticket:
        pass
    assert store.leaks() == NO_LEAKS


def test_a_released_ticket_loads_nothing(store: Store) -> None:
    engine = engine_of(store)
    engine.save(ask_for(BLOCKS))
    ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
    ticket.release()
    result = engine.load(ticket)
    assert (result.tokens, result.reason) == (0, MissReason.EXPIRED)


def test_a_ticket_loads_once(store: Store) -> None:
    engine = engine_of(store)
    engine.save(ask_for(BLOCKS))
    ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
    assert engine.load(ticket).tokens == BLOCKS * BLOCK
    again = engine.load(ticket)
    assert (again.tokens, again.reason) == (0, MissReason.EXPIRED)


def test_a_lookup_that_finds_nothing_leases_nothing(store: Store) -> None:
    engine = engine_of(store)
    ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
    assert store.leaks() == NO_LEAKS
    result = engine.load(ticket)
    assert (result.tokens, result.reason) == (0, None)


def test_two_tickets_lease_apart(store: Store) -> None:
    engine = engine_of(store)
    engine.save(ask_for(BLOCKS))
    one = engine.space.sequence(ask_for(BLOCKS)).lookup()
    two = engine.space.sequence(ask_for(BLOCKS)).lookup()
    one.release()
    fill(engine)
    assert engine.load(two).tokens == BLOCKS * BLOCK


def test_an_expired_lease_is_a_miss_and_leaves_the_engines_pages_alone() -> None:
    with open_store(host="4MiB", lease_s=0.01) as store:
        engine = engine_of(store)
        engine.save(ask_for(BLOCKS))
        ticket = engine.space.sequence(ask_for(BLOCKS)).lookup()
        time.sleep(0.05)
        assert store.leaks() == NO_LEAKS
        engine.clear()
        before = [array.copy() for array in engine.arrays]
        result = ticket.load(engine.pool, range(BLOCKS)).result(60)
        assert (result.tokens, result.reason) == (0, MissReason.EXPIRED)
        assert all(np.array_equal(a, b) for a, b in zip(before, engine.arrays, strict=True))


def test_leases_that_ran_out_make_room_for_saves_that_no_lookup_follows() -> None:
    with open_store(host="4MiB", lease_s=0.2) as store:
        engine = engine_of(store)
        stored = 0
        while True:  # lease all there is
            blocks = engine.save(ask_for(BLOCKS, stored))[1].saved
            engine.space.sequence(ask_for(BLOCKS, stored)).lookup()
            stored += 1
            if blocks < BLOCKS:
                break
        time.sleep(0.25)
        assert engine.save(ask_for(BLOCKS, 999))[1].saved == BLOCKS


def test_a_tier_leased_whole_drops_saves_at_once_and_recovers(store: Store) -> None:
    engine = engine_of(store)
    tickets, seed = [], 0
    while engine.save(ask_for(BLOCKS, seed))[1].saved == BLOCKS:
        tickets.append(engine.space.sequence(ask_for(BLOCKS, seed)).lookup())
        seed += 1
    tickets.append(engine.space.sequence(ask_for(BLOCKS, seed)).lookup())
    dropped = fill(engine)
    assert dropped == {SaveDrop.HOST_FULL: 10 * BLOCKS}
    assert store.counters()["save_drops.host_full"] >= 10 * BLOCKS
    for ticket in tickets:
        ticket.release()
    assert fill(engine) == {}


@pytest.mark.slow
def test_ten_thousand_lookups_that_never_load() -> None:
    """A third given back, a third covered by the engine's own pages, a third forgotten."""
    with open_store(host="4MiB", lease_s=0.5) as store:
        engine = engine_of(store)
        for seed in range(3):
            engine.save(ask_for(BLOCKS, seed))
        sequences = [engine.space.sequence(ask_for(BLOCKS, seed)) for seed in range(3)]
        for number in range(10_000):
            sequence = sequences[number % 3]
            if number % 3 == 0:
                with sequence.lookup():
                    pass
            elif number % 3 == 1:
                ticket = sequence.lookup(skip_tokens=BLOCKS * BLOCK)
                load = ticket.load(engine.pool, range(BLOCKS))
                assert load.result(60).by_tier[TierName.HOST] == 0
            else:
                sequence.lookup()
        time.sleep(0.6)
        assert store.leaks() == NO_LEAKS
        assert [engine.ask(ask_for(BLOCKS, seed)).tokens for seed in range(3)] == [32, 32, 32]
        assert fill(engine) == {}
        assert engine.ask(ask_for(BLOCKS, 0)).tokens == 0  # and so eviction works
        store.check_integrity()


def test_leases_that_ended_take_no_memory() -> None:
    leases = Leases(3600.0, Clock())
    kept = [leases.add(np.array([n], np.int32)) for n in range(10)]
    for n in range(100 * SWEEP_MIN):
        leases.add(np.array([n], np.int32)).live = False
    assert len(leases) <= SWEEP_MIN + len(kept)
    assert all(lease.live for lease in kept)
    assert leases.expired() == []
