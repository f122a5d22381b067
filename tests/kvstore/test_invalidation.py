"""What was invalidated is served by no tier again, and nothing else is lost."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import load_config
from kvstore.invalidation import Scope
from kvstore.loading import LoadResult
from kvstore.saving import SaveResult
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import MissReason, SaveDrop, TierName
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.failpoints import armed
from support.checks import assert_at_rest
from support.engine import WAIT_S, Engine, prompt
from support.faulty import CountingIo, FullIo
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


def engine_of(store: Store, model: str = "m", tenant: str = "t") -> Engine:
    return Engine(store.namespace(LAYOUT, model=model, tenant=tenant), 64)


def found(store: Store, model: str = "m", tenant: str = "t", tokens: Any = TOKENS) -> int:
    """Tokens of the prompt that can be loaded, every byte of them checked."""
    return engine_of(store, model, tenant).ask(tokens).tokens


def lose_catalogue(home: Path) -> None:
    (home / "disk0" / "catalogue" / "data.mdb").write_bytes(b"x" * 8192)
    (home / "disk0" / "clean").unlink(missing_ok=True)


def wait_no_longer(store: Store) -> None:
    """Have invalidations not wait for copies that a test holds up."""
    store._parts.invalidator._settle_s = 0.0


@contextmanager
def stopped_at(failpoint: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Whoever reaches the failpoint waits there: (somebody is there, let them go on)."""
    there, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        there.set()
        assert go_on.wait(30)

    with armed(failpoint, stop):
        try:
            yield there, go_on
        finally:
            go_on.set()


def scopes(engine: Engine) -> dict[str, Scope]:
    digest, key = engine.space.digest.hex(), engine.space.sequence(TOKENS).keys[0]
    return {
        "namespace": Scope(namespace=digest),
        "digits": Scope(namespace=digest[:8].upper()),
        "model": Scope(model="m"),
        "tenant": Scope(tenant="t"),
        "both": Scope(model="m", tenant="t"),
        "prefix": Scope(prefix=key.tobytes().hex()),
    }


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(("namespace", "host"), ("digits", "disk"), ("model", "host"), ("tenant", "disk")),
        *(("both", "host"), ("prefix", "host"), ("prefix", "disk")),
    ],
)
def test_every_tier_forgets_and_nobody_else_does(home: Path, name: str, where: str) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        engine_of(store, "m2", "t2").save(TOKENS)
        if where == "disk":
            emptied_host(store)
        else:
            store.flush()
        done = store.invalidate(scopes(engine)[name])
        copies = 1 if where == "disk" else 2
        size = engine.space.record.slot_bytes * BLOCKS * copies
        assert (done.blocks, done.bytes, done.namespaces, done.durable) == (BLOCKS, size, 1, True)
        with engine.space.sequence(TOKENS).lookup() as ticket:
            assert ticket.misses == {MissReason.INVALIDATED: WHOLE}
        assert found(store, "m2", "t2") == WHOLE
        assert store.counters()["invalidated_blocks"] == BLOCKS
        assert_at_rest(store)
    with open_store(home, **SIZES) as store:
        assert (found(store), found(store, "m2", "t2")) == (0, WHOLE)
        engine_of(store).save(TOKENS)
        assert found(store) == WHOLE
    with open_store(home, **SIZES) as store:
        assert (found(store), found(store, "m2", "t2")) == (WHOLE, WHOLE)
        assert store.invalidate(Scope(everything=True)).blocks == 2 * BLOCKS
        assert (found(store), found(store, "m2", "t2")) == (0, 0)


def test_namespaces_that_no_engine_opened_since_the_restart(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine_of(store).save(TOKENS)
    with open_store(home, **SIZES) as store:
        assert store.invalidate(Scope(tenant="other")).blocks == 0
        assert store.invalidate(Scope(tenant="t")).blocks == BLOCKS
        assert found(store) == 0


def test_a_prefix_takes_what_follows_it_and_leaves_what_comes_before(home: Path) -> None:
    other = np.concatenate([TOKENS[: 3 * BLOCK], prompt(5 * BLOCK + 1, 2)])
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        sequence, _ = engine.save(TOKENS)
        engine.save(other)
        store.flush()
        assert store.invalidate(Scope(prefix=sequence.keys[3].tobytes().hex())).blocks == 5
        assert (found(store), found(store, tokens=other)) == (3 * BLOCK, WHOLE)
        assert_at_rest(store)
    with open_store(home, **SIZES) as store:
        assert (found(store), found(store, tokens=other)) == (3 * BLOCK, WHOLE)


# --- the catalogue is lost later


@pytest.mark.parametrize("name", ["namespace", "model", "prefix"])
def test_old_headers_in_freed_slots_do_not_come_back(home: Path, name: str) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        engine_of(store, "m2", "t2").save(TOKENS)
        store.flush()
        store.invalidate(scopes(engine)[name])
        later = prompt(WHOLE + 1, 9)
        engine.save(later)
    lose_catalogue(home)
    with open_store(home, **SIZES) as store:
        assert (found(store), found(store, "m2", "t2")) == (0, WHOLE)
        assert found(store, tokens=later) == WHOLE


def test_without_the_invalidation_they_do_come_back(home: Path) -> None:
    """So that the test above tests something."""
    with open_store(home, **SIZES) as store:
        engine_of(store).save(TOKENS)
        store.flush()
        placement = store._placement
        with placement.lock:
            for tier in (TierName.HOST, TierName.DISK):
                rows = placement.index.rows_of(tier=tier)
                placement.left(tier, placement.index.drop_subtree(rows, tier))
        assert found(store) == 0
    lose_catalogue(home)
    with open_store(home, **SIZES) as store:
        assert found(store) == WHOLE


def test_a_namespace_whose_label_was_lost_matches_every_tenant(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine_of(store).save(TOKENS)
    lose_catalogue(home)
    with open_store(home, **SIZES) as store:
        assert store.invalidate(Scope(tenant="another")).blocks == BLOCKS
        assert found(store) == 0


def test_a_damaged_file_voids_what_was_saved_before_if_the_catalogue_is_lost(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine_of(store).save(TOKENS)
        store.flush()
        store.invalidate(Scope(tenant="t"))
        engine_of(store, "m2", "t2").save(TOKENS)
    data = bytearray((home / "invalidated").read_bytes())
    data[70] ^= 1
    (home / "invalidated").write_bytes(data)
    with (
        pytest.warns(RuntimeWarning, match="invalidated is damaged"),
        open_store(home, **SIZES) as store,
    ):
        assert found(store, "m2", "t2") == WHOLE
    lose_catalogue(home)
    with open_store(home, **SIZES) as store:
        assert (found(store), found(store, "m2", "t2")) == (0, 0)
        engine_of(store).save(TOKENS)
    lose_catalogue(home)
    with open_store(home, **SIZES) as store:
        assert found(store) == WHOLE


def test_a_disk_that_takes_nothing_is_told(home: Path) -> None:
    io = FullIo()
    with open_store(home, io=io, **SIZES) as store:
        engine_of(store).save(TOKENS)
        io.full = True
        assert not store.invalidate(Scope(tenant="t")).durable
        assert found(store) == 0
        io.full = False
        assert store.invalidate(Scope(tenant="t")).durable


# --- what is under way


@pytest.mark.parametrize("first_bad", [0, 3])
def test_a_load_under_way_ends_where_its_blocks_were_invalidated(
    home: Path, first_bad: int
) -> None:
    io = CountingIo()
    with open_store(home, io=io, **SIZES) as store:
        wait_no_longer(store)
        engine = engine_of(store)
        sequence, _ = engine.save(TOKENS)
        emptied_host(store)
        io.gate.clear()
        with engine.space.sequence(TOKENS).lookup() as ticket:
            load = ticket.load(engine.pool, engine.table(BLOCKS))
        assert not load.done
        store.invalidate(Scope(prefix=sequence.keys[first_bad].tobytes().hex()))
        io.gate.set()
        result: LoadResult = load.result(WAIT_S)
        assert (result.tokens, result.reason) == (first_bad * BLOCK, MissReason.INVALIDATED)
        assert found(store) == first_bad * BLOCK
        assert store.counters()["bad_blocks.disk"] == 0
        assert_at_rest(store)
    with open_store(home, **SIZES) as store:
        assert found(store) == first_bad * BLOCK


def test_a_ticket_from_before_loads_nothing(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        store.flush()
        with engine.space.sequence(TOKENS).lookup() as ticket:
            store.invalidate(Scope(tenant="t"))
            catalogue = store._parts.disk._volumes[0].catalogue  # type: ignore[union-attr]
            assert catalogue is not None and catalogue.count() == 0, "a leased block keeps its row"
            result = engine.load(ticket)
        assert (result.tokens, result.reason) == (0, MissReason.INVALIDATED)
        assert_at_rest(store)


@pytest.mark.parametrize("where", ["save.copied", "queued"])
def test_a_save_under_way_publishes_nothing(home: Path, where: str) -> None:
    with open_store(home, **SIZES) as store:
        wait_no_longer(store)
        engine, other = engine_of(store), engine_of(store, "m2", "t2")
        first = other if where == "queued" else engine
        with stopped_at("save.copied") as (there, go_on):
            saves = []
            for saver, tokens in ((first, prompt(9, 5)), (engine, TOKENS)):
                sequence = saver.space.sequence(tokens)
                table = saver.table(sequence.blocks)
                saver.compute(sequence, table)
                saves.append(sequence.save(saver.pool, table))
            assert there.wait(10)
            store.invalidate(Scope(tenant="t"))
            go_on.set()
            results: list[SaveResult] = [save.result(WAIT_S) for save in saves]
        assert results[1].dropped == {SaveDrop.INVALIDATED: BLOCKS}
        assert results[0].saved == (2 if where == "queued" else 0)
        assert found(store) == 0
        assert store.counters()["save_drops.invalidated"] == BLOCKS + 2 - results[0].saved
        assert_at_rest(store)
        engine.save(TOKENS)
        assert found(store) == WHOLE


def test_a_request_from_before_saves_nothing_until_it_starts_over(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        sequence = engine.space.sequence(TOKENS)
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        store.invalidate(Scope(model="m"))
        result = sequence.save(engine.pool, table).result(WAIT_S)
        assert (result.saved, result.dropped) == (0, {SaveDrop.INVALIDATED: BLOCKS})
        sequence.renew()
        assert sequence.save(engine.pool, table).result(WAIT_S).saved == BLOCKS
        assert found(store) == WHOLE


@pytest.mark.parametrize("where", ["writeback.take", "disk.written", "writeback.publish"])
def test_a_group_being_written_publishes_nothing(home: Path, where: str) -> None:
    with open_store(home, dirty_age_s=0.0, **SIZES) as store:
        wait_no_longer(store)
        engine = engine_of(store)
        with stopped_at(where) as (there, go_on):
            sequence, _ = engine.save(TOKENS)
            assert there.wait(10)
            # The last failpoint is reached under the lock: whoever invalidates waits for it.
            if where == "writeback.publish":
                go_on.set()
            store.invalidate(Scope(prefix=sequence.keys[2].tobytes().hex()))
            go_on.set()
        store.flush()
        assert found(store) == 2 * BLOCK
        assert_at_rest(store)
    with open_store(home, **SIZES) as store:
        assert found(store) == 2 * BLOCK


def test_a_store_without_threads_waits_for_nobody(home: Path) -> None:
    """There a load that was asked for holds its blocks until somebody calls the next step."""
    with Store(load_config(home, **SIZES), threads=False) as store:
        engine = engine_of(store)
        sequence = engine.space.sequence(TOKENS)
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        sequence.save(engine.pool, table)
        store.flush()
        with engine.space.sequence(TOKENS).lookup() as ticket:
            load = ticket.load(engine.pool, table)
        assert store.invalidate(Scope(prefix=sequence.keys[1].tobytes().hex())).durable
        assert store._loader.step()
        assert (load.result().tokens, load.result().reason) == (BLOCK, MissReason.INVALIDATED)
        assert_at_rest(store)


# --- scopes


@pytest.mark.parametrize(
    "scope",
    [
        {},
        {"model": "m", "everything": True},
        {"prefix": "00" * 16, "tenant": "t"},
        {"prefix": "00" * 15},
        {"prefix": "zz" * 16},
        {"namespace": "0123456"},
        {"namespace": "0" * 65},
    ],
)
def test_a_scope_is_one_thing(scope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Scope(**scope)


def test_a_store_of_host_memory_alone() -> None:
    with open_store(host="8MiB") as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        assert store.invalidate(Scope(prefix="00" * 16)).blocks == 0
        done = store.invalidate(Scope(tenant="t"))
        assert (done.blocks, done.durable) == (BLOCKS, True)
        assert found(store) == 0
        assert_at_rest(store)
