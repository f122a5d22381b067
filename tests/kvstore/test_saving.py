"""Saves: every full block once, in order, never waiting, and every block accounted for."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.saving import CHUNK_BLOCKS
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import SaveDrop
from kvstore.tiers.errors import ClosedError
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest
from support.engine import WAIT_S, Engine, prompt
from support.layouts import small_layout

BLOCK = 4
PAGES = 300


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host="16MiB") as opened:
        yield opened
        assert_at_rest(opened)


@pytest.fixture
def engine(store: Store) -> Engine:
    return Engine(store.namespace(small_layout(BLOCK), model="m"), PAGES)


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 7 * BLOCK + 3])
def test_only_full_blocks_are_saved(engine: Engine, length: int) -> None:
    sequence, result = engine.save(prompt(length))
    blocks = length // BLOCK
    assert (result.saved, result.present, result.dropped) == (blocks, 0, {})
    again = sequence.save(engine.pool, engine.table(blocks)).result(WAIT_S)
    assert (again.saved, again.dropped) == (0, {})
    assert engine.space.store.counters()["saved_blocks"] == blocks


def test_another_request_with_the_same_tokens_finds_them_present(engine: Engine) -> None:
    engine.save(prompt(6 * BLOCK))
    _, result = engine.save(np.concatenate([prompt(6 * BLOCK), prompt(2 * BLOCK, 2)]))
    assert (result.saved, result.present) == (2, 6)
    counters = engine.space.store.counters()
    assert counters["saved_blocks"] == 8
    assert counters["saved_bytes"] == 8 * engine.layout.payload_bytes
    assert counters["save_drops.present"] == 6


@pytest.mark.parametrize("chunks", [1, 3, 10])
def test_chunked_prefill_and_decoding_save_all_there_is(engine: Engine, chunks: int) -> None:
    """What is stored does not depend on how many steps the prefill took."""
    tokens = prompt(80 * BLOCK + 2)
    whole = engine.space.sequence(tokens)
    table = engine.table(whole.blocks)
    engine.compute(whole, table)
    sequence = engine.space.sequence()
    saves = []
    for part in np.array_split(tokens[: 70 * BLOCK], chunks):
        sequence.extend(part)
        # The table grows as pages are taken; the last one may be partly filled.
        saves.append(sequence.save(engine.pool, table[: -(-sequence.length // BLOCK)]))
    for token in tokens[70 * BLOCK :]:
        sequence.extend([token])
        saves.append(sequence.save(engine.pool, table))
    results = [save.result(WAIT_S) for save in saves]
    assert sum(result.saved for result in results) == 80
    assert engine.ask(tokens).tokens == 80 * BLOCK


def test_saves_queued_behind_each_other_write_each_block_once(engine: Engine) -> None:
    sequence = engine.space.sequence(prompt(4 * CHUNK_BLOCKS * BLOCK))
    table = engine.table(sequence.blocks)
    engine.compute(sequence, table)
    results = [s.result(WAIT_S) for s in [sequence.save(engine.pool, table) for _ in range(5)]]
    assert sum(result.saved for result in results) == sequence.blocks
    # One that was asked for while a chunk was being saved asks for the chunks after it.
    chunks = range(0, sequence.blocks + 1, CHUNK_BLOCKS)
    assert all(r.saved + r.present in chunks for r in results)
    assert engine.space.store.counters()["saved_blocks"] == sequence.blocks


def test_an_engine_may_reuse_its_block_table_at_once(engine: Engine) -> None:
    sequence = engine.space.sequence(prompt(200 * BLOCK + 1))
    table = engine.table(sequence.blocks)
    engine.compute(sequence, table)
    buffer = table.copy()
    save = sequence.save(engine.pool, buffer)
    buffer[:] = 0
    assert save.result(WAIT_S).saved == 200
    assert engine.ask(sequence.tokens).tokens == 200 * BLOCK


def test_a_sequence_may_grow_while_it_is_saved(engine: Engine) -> None:
    tokens = prompt(250 * BLOCK + 1)
    whole = engine.space.sequence(tokens)
    table = engine.table(250)
    engine.compute(whole, table)
    sequence = engine.space.sequence()
    saves = []
    for at in range(0, len(tokens), 3):
        sequence.extend(tokens[at : at + 3])
        saves.append(sequence.save(engine.pool, table))
    assert sum(save.result(WAIT_S).saved for save in saves) == 250
    assert engine.ask(tokens).tokens == 250 * BLOCK


def test_pages_may_be_overwritten_when_the_save_is_done(engine: Engine) -> None:
    for seed in range(20):
        sequence = engine.space.sequence(prompt(50 * BLOCK + 1, seed))
        engine.compute(sequence, engine.table(50))
        save = sequence.save(engine.pool, engine.table(50))
        save.result(WAIT_S)
        assert save.done
        engine.clear()
    for seed in range(20):
        assert engine.ask(prompt(50 * BLOCK + 1, seed)).tokens == 50 * BLOCK


def test_threads_that_save_and_load_at_once_get_exact_bytes(store: Store) -> None:
    space = store.namespace(small_layout(BLOCK), model="m")
    shared = prompt(20 * BLOCK)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            engine = Engine(space, 64)
            for turn in range(15):
                tokens = np.concatenate([shared[: (turn % 20) * BLOCK], prompt(90, turn % 5)])
                engine.save(tokens)
                engine.ask(tokens)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert failures == []


def test_a_full_queue_drops_and_counts() -> None:
    with open_store(host="16MiB", save_queue_blocks=10) as store:
        engine = Engine(store.namespace(small_layout(BLOCK), model="m"), PAGES)
        _, result = engine.save(prompt(11 * BLOCK))
        assert (result.saved, result.dropped) == (0, {SaveDrop.QUEUE_FULL: 11})
        assert engine.save(prompt(10 * BLOCK))[1].saved == 10
        assert store.counters()["save_drops.queue_full"] == 11
        assert_at_rest(store)


def big_layout() -> Layout:
    return Layout.opaque(
        layers=2, run_bytes=(100_000,), dtype="x", format="engine-1", block_tokens=BLOCK
    )


def test_a_chain_longer_than_the_tier_keeps_what_fits_and_counts_the_rest() -> None:
    with open_store(host="4MiB") as store:
        engine = Engine(store.namespace(big_layout(), model="m"), 40)
        _, result = engine.save(prompt(40 * BLOCK + 1))
        assert result.saved + sum(result.dropped.values()) == 40
        assert 10 <= result.saved < 40
        assert set(result.dropped) == {SaveDrop.HOST_FULL}
        assert engine.ask(prompt(40 * BLOCK + 1)).tokens == result.saved * BLOCK
        assert_at_rest(store)


def test_an_evicted_ancestor_is_saved_again_with_the_whole_table() -> None:
    with open_store(host="4MiB") as store:
        engine = Engine(store.namespace(big_layout(), model="m"), 16)
        sequence, result = engine.save(prompt(4 * BLOCK))
        assert result.saved == 4
        for seed in range(2, 8):  # others push all of it out
            engine.save(prompt(10 * BLOCK, seed))
        sequence.extend(prompt(2 * BLOCK + 1, 99))
        table = engine.table(6)
        engine.compute(sequence, table)
        assert sequence.save(engine.pool, table).result(WAIT_S).saved == 6
        assert engine.ask(sequence.tokens).tokens == 6 * BLOCK
        assert_at_rest(store)


def test_a_save_that_fails_in_the_middle_ends_and_the_next_one_works(engine: Engine) -> None:
    sequence = engine.space.sequence(prompt(3 * BLOCK))
    saver = engine.space.store._saver
    job_pages = np.full((3, 1), PAGES + 5, np.int64)  # no such pages: the copy refuses
    result = saver.submit(sequence, engine.pool, job_pages).result(WAIT_S)
    assert result.saved == 0
    assert sum(result.dropped.values()) == 3
    assert engine.save(prompt(3 * BLOCK, 2))[1].saved == 3


def test_a_closed_store_says_so() -> None:
    store: Any = open_store(host="4MiB")
    engine = Engine(store.namespace(small_layout(BLOCK), model="m"), 4)
    sequence = engine.space.sequence(prompt(9))
    store.close()
    for call in (
        lambda: sequence.save(engine.pool, range(2)),
        sequence.lookup,
        store.flush,
        store.stats,
        store.counters,
        store.leaks,
        store.check_integrity,
        lambda: store.namespace(small_layout(), model="m"),
    ):
        with pytest.raises(ClosedError, match="open it again"):
            call()
    store.close()
