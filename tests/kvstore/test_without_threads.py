"""A store without threads: nothing happens but in calls and in steps of its parts."""

import threading
from pathlib import Path

import pytest

from kvstore.config import load_config
from kvstore.store import Store
from kvstore.tiers.base import TierName
from support.checks import assert_at_rest
from support.engine import Engine, prompt
from support.layouts import small_layout

BLOCKS = 5
TOKENS = 4 * BLOCKS + 1


def quiet_store(path: Path) -> Store:
    return Store(load_config(path, host="4MiB", disk_capacity="24MiB"), threads=False)


def test_no_thread_is_started_and_only_steps_move_blocks(tmp_path: Path) -> None:
    threads = threading.active_count()
    with quiet_store(tmp_path / "s") as store:
        assert threading.active_count() == threads
        engine = Engine(store.namespace(small_layout(), model="m"), 16)
        sequence = engine.space.sequence(prompt(TOKENS))
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        save = sequence.save(engine.pool, table)
        assert not save.done
        assert store._saver.step() and not store._saver.step()
        assert save.result(0).saved == BLOCKS
        engine.clear()
        load = sequence.lookup().load(engine.pool, table)
        assert not load.done
        assert store._loader.step() and not store._loader.step()
        assert load.result(0).tokens == 4 * BLOCKS
        assert engine.wrong(sequence, table, 4 * BLOCKS) == []
        writer = store._writer
        assert writer is not None and not writer.step(), "nothing is due yet"
        store.flush()
        assert store._placement.index.blocks(TierName.DISK) == BLOCKS
        assert threading.active_count() == threads


def test_closing_finishes_what_was_asked_for(tmp_path: Path) -> None:
    with quiet_store(tmp_path / "s") as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 16)
        sequence = engine.space.sequence(prompt(TOKENS))
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        save = sequence.save(engine.pool, table)
    assert save.result(0).saved == BLOCKS
    with quiet_store(tmp_path / "s") as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 16)
        ticket = engine.space.sequence(prompt(TOKENS)).lookup()
        assert ticket.by_tier[TierName.DISK] == 4 * BLOCKS
        load = ticket.load(engine.pool, table)
    assert load.result(0).tokens == 4 * BLOCKS
    assert engine.wrong(ticket.sequence, table, 4 * BLOCKS) == []


def test_a_group_that_ends_before_the_one_ahead_of_it_is_published_after_it(tmp_path: Path) -> None:
    """The second half of a chain is written while the first is; no child before its parent."""
    with quiet_store(tmp_path / "s") as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 16)
        sequence = engine.space.sequence(prompt(TOKENS))
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        sequence.save(engine.pool, table[:2])
        store._saver.step()
        writer, placement = store._writer, store._placement
        assert writer is not None
        writer._flushing += 1
        with placement.lock:
            ahead = writer._take()
        assert ahead is not None and len(ahead.rows) == 2
        sequence.save(engine.pool, table)
        store._saver.step()
        assert writer.step()
        assert placement.index.blocks(TierName.DISK) == 0
        assert not writer.step(), "two groups are under way: no third"
        writer._write(ahead)
        assert placement.index.blocks(TierName.DISK) == BLOCKS
        writer._flushing -= 1
        assert_at_rest(store)


@pytest.mark.parametrize("persist", [False, True])
def test_a_store_of_memory_alone_needs_no_thread_either(persist: bool) -> None:
    with Store(load_config(host="4MiB", persist=persist), threads=False) as store:
        engine = Engine(store.namespace(small_layout(), model="m"), 16)
        sequence = engine.space.sequence(prompt(TOKENS))
        table = engine.table(BLOCKS)
        engine.compute(sequence, table)
        sequence.save(engine.pool, table)
        store.flush()
        assert sequence.lookup().by_tier[TierName.HOST] == 4 * BLOCKS
