"""Many requests for one prefix on disk: each block is read once, and everybody gets it."""

import threading
from pathlib import Path

import pytest

from kvstore.loading import Load, LoadResult
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from support.checks import assert_at_rest
from support.engine import WAIT_S, Engine, prompt
from support.faulty import CountingIo
from support.layouts import small_layout

BLOCK = 4
BLOCKS = 100
REQUESTS = 32
TOKENS = prompt(BLOCKS * BLOCK + 1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one prompt on disk."""
    path = tmp_path / "store"
    with open_store(path, host="8MiB", disk_capacity="32MiB") as store:
        engine = Engine(store.namespace(small_layout(BLOCK), model="m"), BLOCKS)
        assert engine.save(TOKENS)[1].saved == BLOCKS
    return path


def reopened(directory: Path, io: CountingIo) -> tuple[Store, list[Engine]]:
    store = open_store(directory, host="8MiB", io=io)
    space = store.namespace(small_layout(BLOCK), model="m")
    io.reads.clear()
    return store, [Engine(space, BLOCKS) for _ in range(REQUESTS)]


def test_requests_in_threads_read_each_block_once(directory: Path) -> None:
    io = CountingIo()
    store, engines = reopened(directory, io)
    results: dict[int, LoadResult] = {}
    start = threading.Barrier(REQUESTS)

    def request(number: int) -> None:
        start.wait()
        with engines[number].space.sequence(TOKENS).lookup() as ticket:
            results[number] = engines[number].load(ticket, seed=number)  # checks every byte

    threads = [threading.Thread(target=request, args=(n,)) for n in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {result.tokens for result in results.values()} == {BLOCKS * BLOCK}
    assert len(results) == REQUESTS
    assert len(io.reads) == BLOCKS
    assert set(io.reads.values()) == {1}
    assert_at_rest(store)
    store.close()


def _start_all(engines: list[Engine]) -> list[Load]:
    loads = []
    for number, engine in enumerate(engines):
        engine.clear()
        ticket = engine.space.sequence(TOKENS).lookup()
        loads.append(ticket.load(engine.pool, engine.table(BLOCKS, number)))
    return loads


def _exact(engines: list[Engine], loads: list[Load], number: int) -> bool:
    result = loads[number].result(WAIT_S)
    engine, sequence = engines[number], loads[number].ticket.sequence
    wrong = engine.wrong(sequence, engine.table(BLOCKS, number), result.tokens)
    return wrong == [] and result.tokens == BLOCKS * BLOCK


def test_the_others_get_a_block_whose_first_request_was_aborted(directory: Path) -> None:
    io = CountingIo()
    store, engines = reopened(directory, io)
    io.gate.clear()  # Reads wait, so all requests are under way when the first is aborted.
    loads = _start_all(engines)
    loads[0].cancel()
    io.gate.set()
    assert all(_exact(engines, loads, number) for number in range(1, REQUESTS))
    loads[0].result(WAIT_S)
    assert set(io.reads.values()) == {1}
    assert_at_rest(store)
    store.close()


def test_loads_that_wait_for_one_read_while_the_store_closes(directory: Path) -> None:
    io = CountingIo()
    store, engines = reopened(directory, io)
    io.gate.clear()
    loads = _start_all(engines)
    closer = threading.Thread(target=store.close)
    closer.start()
    io.gate.set()
    assert all(_exact(engines, loads, number) for number in range(REQUESTS))
    closer.join(WAIT_S)
    assert not closer.is_alive()


def test_a_second_load_reads_nothing(directory: Path) -> None:
    io = CountingIo()
    store, engines = reopened(directory, io)
    assert engines[0].ask(TOKENS).by_tier[TierName.DISK] == BLOCKS * BLOCK
    assert engines[1].ask(TOKENS).by_tier == {"host": BLOCKS * BLOCK, "disk": 0}
    assert sum(io.reads.values()) == BLOCKS
    assert_at_rest(store)
    store.close()
