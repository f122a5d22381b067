"""The counters tell the truth: each token asked for is one hit or one miss, counted once."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.loading import LoadResult
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import MissReason
from support.checks import assert_at_rest
from support.engine import Engine, prompt
from support.layouts import small_layout
from support.moves import emptied_host, restarted

BLOCK = 4
LAYOUT = small_layout(BLOCK)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host="8MiB") as opened:
        yield opened
        assert_at_rest(opened)


@pytest.fixture
def disk_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", host="8MiB", disk_capacity="32MiB")


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="sha256:weights"), 64)


class Counted:
    """How counters changed since it was made."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._before = store.counters()

    def __getitem__(self, name: str) -> int:
        return self._store.counters()[name] - self._before[name]

    def sum(self, prefix: str) -> int:
        return sum(self[name] for name in self._before if name.startswith(prefix))

    def assert_identity(self) -> None:
        """Every token asked for is exactly one of hit and missed; declined is a miss's reason."""
        assert self["tokens_asked"] == self.sum("tokens_hit.") + self.sum("misses.")


def test_a_hit_is_counted_once_however_often_it_is_asked_and_loaded(store: Store) -> None:
    engine = engine_of(store)
    tokens = prompt(10 * BLOCK + 1)
    engine.save(tokens)
    counted = Counted(store)
    sequence = engine.space.sequence(tokens)
    for _ in range(4):
        with sequence.lookup() as ticket:
            assert engine.load(ticket).tokens == 10 * BLOCK
    assert counted["lookups"] == 4
    assert counted["tokens_asked"] == counted["tokens_hit.host"] == 10 * BLOCK
    assert counted.sum("misses.") == 0


def test_ten_requests_one_preempted_one_aborted_one_retried(store: Store) -> None:
    engine = engine_of(store)
    tokens = prompt(10 * BLOCK + 1)
    engine.save(tokens)
    counted = Counted(store)
    for number in range(10):
        sequence = engine.space.sequence(tokens)
        if number == 3:  # aborted between lookup and load
            sequence.lookup().release()
            continue
        with sequence.lookup() as ticket:
            engine.load(ticket)
        if number == 5:  # preempted: it comes back and asks again
            with sequence.lookup() as ticket:
                engine.load(ticket)
        if number == 7:  # retried at once, with nothing of its own
            sequence.lookup().release()
    assert counted["tokens_asked"] == 10 * 10 * BLOCK
    assert counted["tokens_hit.host"] == 9 * 10 * BLOCK
    assert counted["misses.declined"] == 10 * BLOCK
    counted.assert_identity()


def test_what_was_missed_and_comes_later_stays_a_miss(store: Store) -> None:
    engine = engine_of(store)
    tokens = prompt(10 * BLOCK + 1)
    counted = Counted(store)
    sequence = engine.space.sequence(tokens)
    with sequence.lookup() as ticket:
        assert ticket.misses == {MissReason.ABSENT: 10 * BLOCK}
    engine.save(tokens)
    with sequence.lookup() as ticket:
        engine.load(ticket)
    assert counted["misses.absent"] == 10 * BLOCK
    counted.assert_identity()


def test_device_hits_and_part_loads(store: Store) -> None:
    engine = engine_of(store)
    tokens = prompt(10 * BLOCK + 1)
    engine.save(tokens[: 8 * BLOCK])
    counted = Counted(store)
    ticket = engine.space.sequence(tokens).lookup(skip_tokens=2 * BLOCK)
    engine.load(ticket, stop_tokens=6 * BLOCK)
    assert counted["tokens_hit.device"] == 2 * BLOCK
    assert counted["tokens_hit.host"] == 4 * BLOCK
    assert counted["misses.declined"] == 2 * BLOCK
    assert counted["misses.absent"] == 2 * BLOCK
    counted.assert_identity()


def test_hits_are_counted_by_the_tier_that_served_them(disk_store: Store) -> None:
    tokens = prompt(10 * BLOCK + 1)
    engine_of(disk_store).save(tokens)
    with restarted(disk_store) as store:
        engine = engine_of(store)
        engine.ask(tokens[: 4 * BLOCK + 1])  # these come into host memory
        counted = Counted(store)
        result: LoadResult = engine.ask(tokens)
        assert result.by_tier == {"host": 4 * BLOCK, "disk": 6 * BLOCK}
        assert counted["tokens_hit.host"] == 4 * BLOCK
        assert counted["tokens_hit.disk"] == 6 * BLOCK
        assert counted["loaded_bytes.disk"] == 6 * LAYOUT.payload_bytes
        counted.assert_identity()


def test_a_lease_that_ran_out_is_counted_as_such() -> None:
    with open_store(host="8MiB", lease_s=0.01) as store:
        engine = engine_of(store)
        tokens = prompt(5 * BLOCK + 1)
        engine.save(tokens)
        counted = Counted(store)
        ticket = engine.space.sequence(tokens).lookup()
        time.sleep(0.05)
        engine.load(ticket)
        assert counted["misses.expired"] == 5 * BLOCK
        counted.assert_identity()


def test_counters_hold_over_random_requests_and_never_go_down(disk_store: Store) -> None:
    random = np.random.default_rng(5)
    store = disk_store
    counted, last = Counted(store), store.counters()
    engine = engine_of(store)
    kept: list[Any] = []
    for _ in range(150):
        tokens = np.concatenate(
            [prompt(int(random.integers(0, 40)), 1), prompt(9, int(random.integers(5)))]
        )
        sequence = engine.space.sequence(tokens)
        if kept and random.random() < 0.3:
            sequence = kept[int(random.integers(len(kept)))]
        kept.append(sequence)
        own = int(random.integers(0, 3)) * BLOCK
        with sequence.lookup(skip_tokens=own) as ticket:
            if random.random() < 0.8:
                stop = int(random.integers(0, ticket.blocks + 1)) * BLOCK
                engine.load(ticket, stop_tokens=stop)
        if random.random() < 0.5:
            engine.save(tokens)
        if random.random() < 0.1:
            emptied_host(store)
        now = store.counters()
        falling = [n for n in now if now[n] < last[n] and not n.endswith(("_bytes", "_blocks"))]
        assert falling == []
        last = now
        counted.assert_identity()
    assert_at_rest(store)
    store.close()


def test_counters_survive_a_restart(disk_store: Store) -> None:
    engine = engine_of(disk_store)
    tokens = prompt(5 * BLOCK + 1)
    engine.save(tokens)
    engine.ask(tokens)
    with restarted(disk_store) as store:
        stats = store.stats()
        assert stats["tokens_asked"] == stats["tokens_hit"]["host"] == 5 * BLOCK
        assert stats["tiers"]["disk"]["blocks"] == 5
        assert stats["tiers"]["disk"]["used_bytes"] == 5 * engine.space.record.slot_bytes
        assert stats["tiers"]["host"]["blocks"] == 0
        assert stats["tiers"]["disk"]["capacity_bytes"] == 32 << 20
