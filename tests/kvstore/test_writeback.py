"""Write-back: what is saved gets to disk, and a disk that takes nothing costs nothing else."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import load_config
from kvstore.disk_slots import GROUP_BLOCKS
from kvstore.saving import SaveResult
from kvstore.sequence import Sequence
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.failpoints import armed
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine, prompt
from support.faulty import FullIo
from support.layouts import small_layout

BLOCK = 4
BLOCKS = 10
SIZES: dict[str, Any] = {"host": "4MiB", "disk_capacity": "16MiB"}


def engine_of(store: Store, block_bytes: int = 100_000) -> Engine:
    layout = Layout.opaque(
        layers=2, run_bytes=(block_bytes // 2,), dtype="x", format="engine-1", block_tokens=BLOCK
    )
    return Engine(store.namespace(layout, model="m"), 4 * BLOCKS)


def tokens_of(seed: int) -> np.ndarray:
    return prompt(BLOCKS * BLOCK + 1, seed)


def test_a_flush_makes_everything_durable_root_first(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", **SIZES) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        store.flush()
        assert store.stats()["tiers"]["disk"]["blocks"] == BLOCKS
        assert store.counters()["written_blocks"] == BLOCKS
        store.flush()  # nothing to do
        assert store.counters()["written_blocks"] == BLOCKS
        assert_at_rest(store)


def test_a_flush_ends_where_a_long_chain_finds_no_room(tmp_path: Path) -> None:
    """Its first group is put aside; the blocks below must not ask for it again and again."""
    io = FullIo()
    with Store(load_config(tmp_path / "s", **SIZES), io=io, threads=False) as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 200)
        _, saved = _save_now(store, engine, prompt(4 * 180 + 1))
        io.full = True
        assert saved.saved == 180 > 2 * GROUP_BLOCKS
        store.flush()
        assert store.counters()["written_blocks"] == 0
        io.full = False
        store.flush()
        assert store.counters()["written_blocks"] == 180
        assert_at_rest(store)


def test_a_flush_leaves_nothing_in_the_queue(tmp_path: Path) -> None:
    with Store(load_config(tmp_path / "s", **SIZES), threads=False) as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 200)
        _save_now(store, engine, prompt(4 * 100 + 1))
        store.flush()
        assert not store._placement.dirty


def _save_now(store: Store, engine: Engine, tokens: np.ndarray) -> tuple[Sequence, SaveResult]:
    sequence = engine.space.sequence(tokens)
    table = engine.table(sequence.blocks)
    engine.compute(sequence, table)
    save = sequence.save(engine.pool, table)
    while store._saver.step():
        pass
    return sequence, save.result(0)


def test_old_blocks_are_written_without_being_asked_for(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", dirty_age_s=0.0, **SIZES) as store:
        engine_of(store).save(tokens_of(1))
        placement = store._placement
        with placement.lock:
            placement.dirty_changed.wait_for(
                lambda: store.counters()["written_blocks"] == BLOCKS, 30
            )
        assert store.counters()["written_blocks"] == BLOCKS
        assert_at_rest(store)


@pytest.mark.slow
def test_far_more_than_both_tiers_hold(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        engine = engine_of(store)
        for seed in range(60):
            if seed % 4 == 0:
                store.flush()  # All of host memory is clean now, so the next save finds room.
                assert disk_usage(path) <= 16 << 20
            _, saved = engine.save(tokens_of(seed))
            assert saved.saved == BLOCKS or seed % 4
            assert engine.ask(tokens_of(seed)).tokens == saved.saved * BLOCK
        store.flush()
        assert engine.save(tokens_of(60))[1].saved == BLOCKS
        assert store.counters()["evicted_blocks.disk"] > 0
        assert_at_rest(store)
    with open_store(path, host="4MiB") as store:
        assert engine_of(store).ask(tokens_of(60)).tokens == BLOCKS * BLOCK
        assert_at_rest(store)


@pytest.mark.slow
def test_sizes_take_segments_from_each_other(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        engines = [engine_of(store, size) for size in (20_000, 60_000, 100_000)]
        for turn in range(12):
            engine = engines[turn % 3]
            for seed in range(4):
                engine.save(tokens_of(100 * turn + seed))
                store.flush()
            last = engine.space.sequence(tokens_of(100 * turn + 3)).lookup()
            assert last.blocks == BLOCKS
            engine.load(last)
        assert_at_rest(store)
        assert disk_usage(path) <= 16 << 20


def test_a_disk_that_takes_nothing_does_not_freeze_host_memory(tmp_path: Path) -> None:
    io = FullIo()
    path = tmp_path / "store"
    with open_store(path, io=io, dirty_age_s=0.0, **SIZES) as store:
        engine = engine_of(store)
        engine.save(tokens_of(0))
        store.flush()
        io.full = True
        for seed in range(1, 30):
            engine.save(tokens_of(seed))
            store.flush()  # ends, although nothing can be written
        # The latest prompt is there: host memory went on without the disk.
        _, saved = engine.save(tokens_of(99))
        assert saved.saved == BLOCKS
        assert engine.ask(tokens_of(99)).tokens == BLOCKS * BLOCK
        assert store.counters()["write_failures"] > 0
        io.full = False
        store.flush()
        assert_at_rest(store)
    with open_store(path, host="4MiB") as store:
        assert engine_of(store).ask(tokens_of(99)).tokens == BLOCKS * BLOCK
        assert_at_rest(store)


def test_a_store_closes_on_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    io = FullIo()
    path = tmp_path / "store"
    store = open_store(path, io=io, **SIZES)
    engine_of(store).save(tokens_of(0))
    store.flush()
    io.full = True
    for seed in range(1, 4):
        engine_of(store).save(tokens_of(seed))
    store.close()
    with open_store(path, host="4MiB") as store:
        assert engine_of(store).ask(tokens_of(0)).tokens > 0
        assert_at_rest(store)


def test_a_load_that_finds_no_room_has_room_made_for_it(tmp_path: Path) -> None:
    """Host memory holds what others lease, and young blocks that are not on disk yet."""
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        for seed in range(3):
            engine_of(store).save(tokens_of(seed))
            store.flush()
    # An hour: only the want of room can make write-back begin.
    with open_store(path, host="4MiB", dirty_age_s=3600) as store:
        engine = engine_of(store)
        tickets = []
        for seed in (1, 2):
            assert engine.ask(tokens_of(seed)).tokens == BLOCKS * BLOCK
            tickets.append(engine.space.sequence(tokens_of(seed)).lookup())
        while engine.save(tokens_of(len(tickets) + 100))[1].saved == BLOCKS:
            tickets.append(engine.space.sequence(tokens_of(1)).lookup())
        for ticket in tickets[2:]:
            ticket.release()
        assert store.counters()["written_blocks"] == 3 * BLOCKS  # by the first owner
        result = engine.ask(tokens_of(0))
        assert (result.tokens, result.reason) == (BLOCKS * BLOCK, None)
        for ticket in tickets:
            ticket.release()
        assert_at_rest(store)


def test_an_idle_store_takes_no_processor(tmp_path: Path) -> None:
    """Two idle writers once woke each other for ever, and the engine's threads waited for them."""
    with open_store(tmp_path / "s", host="8MiB", disk_capacity="32MiB"):
        began = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - began < 0.25


def test_a_block_dropped_while_its_group_is_written_costs_nobody_else(tmp_path: Path) -> None:
    """As when a reader finds a block of a taken-over arena bad before it gets to disk."""
    with open_store(tmp_path / "store", **SIZES) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        placement = store._placement
        taken: list[int] = []

        def drop_the_fourth() -> None:
            if not taken:
                with placement.lock:
                    rows = placement.index.rows_of(tier=TierName.HOST)
                    taken.append(int(rows[placement.index.rows.depth[rows] == 3][0]))
                    placement.drop_bad(taken[0], TierName.HOST)

        with armed("writeback.take", drop_the_fourth):
            store.flush()
        assert placement.index.blocks(TierName.DISK) == 3
        assert store.counters()["write_failures"] == 0
        assert engine.ask(tokens_of(1)).tokens == 3 * BLOCK
        assert_at_rest(store)


def test_blocks_that_need_more_than_a_group_of_colder_ones_do_not_circle(tmp_path: Path) -> None:
    """Where the disk has no room for them: a flush once asked for the same ancestors for ever."""
    with open_store(tmp_path / "store", host="16MiB", disk_capacity="5MiB") as store:
        layout = Layout.opaque(
            layers=2, run_bytes=(10_000,), dtype="x", format="engine-1", block_tokens=BLOCK
        )
        engine = Engine(store.namespace(layout, model="m"), 400)
        long, others = prompt(200 * BLOCK + 1, 1), [prompt(100 * BLOCK + 1, n) for n in (2, 3)]
        sequence, _ = engine.save(long)
        for other in others:
            engine.save(other)
        store.flush()
        placement = store._placement
        with placement.lock:
            rows = placement.index.find(
                sequence.space.number, sequence.keys, sequence.block_tokens(0, 200)
            ).rows
            placement.drop_disk_slots(placement.index.slots(TierName.DISK, rows[:1]))
            placement.dirty.clear()
        for other in others:
            engine.ask(other)  # Warmer than all of the long prompt: nothing gives way to that.
            engine.save(other)
        store.flush()
        with placement.lock:
            tail = rows[-100:][::-1]  # Deepest first: each asks for all before it.
            tail = tail[placement.index.slots(TierName.HOST, tail) >= 0]
            assert len(placement.index.missing_ancestors(tail, TierName.DISK)) > 150
            placement.mark_dirty(tail)
            flushed = threading.Thread(target=store.flush)
        flushed.start()
        flushed.join(20)
        assert not flushed.is_alive(), "a flush goes round in circles"
        assert_at_rest(store)
