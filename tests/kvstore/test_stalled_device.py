"""A device that stalls holds up what it holds and nothing else: no lock is held over a call."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.loading import LOADER_THREADS
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest
from support.engine import Engine, prompt
from support.failing_device import WRITES, FailingDevice
from support.manual_clock import ManualClock

BLOCK, BLOCKS = 4, 8
LAYOUT = Layout.opaque(layers=2, run_bytes=(30_000,), dtype="x", format="e-1", block_tokens=BLOCK)
ON_DISK = range(100, 100 + LOADER_THREADS + 2)


def tokens_of(seed: int) -> object:
    return prompt(BLOCKS * BLOCK + 1, seed)


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="m"), BLOCKS)


@pytest.fixture
def device() -> FailingDevice:
    return FailingDevice()


@contextmanager
def make_store(
    path: Path, device: FailingDevice, clock: ManualClock | None = None
) -> Iterator[Store]:
    """A store whose prompts ON_DISK lie on disk alone; prompt 1 is in host memory too."""
    with open_store(path, host="8MiB", disk_capacity="32MiB") as before:
        for seed in ON_DISK:
            engine_of(before).save(tokens_of(seed))
    with open_store(path, host="8MiB", io=device, clock=clock, dirty_age_s=0.0) as store:
        engine_of(store).save(tokens_of(1))
        store.flush()
        try:
            yield store
        finally:
            device.stall()


def test_reads_that_stall_stop_no_lookup_save_or_load_from_memory(
    tmp_path: Path, device: FailingDevice
) -> None:
    with make_store(tmp_path / "store", device) as store:
        engines = [engine_of(store) for _ in ON_DISK]
        device.stall("preadv")
        tickets = [
            engine.space.sequence(tokens_of(seed)).lookup()
            for engine, seed in zip(engines, ON_DISK, strict=True)
        ]
        assert all(ticket.blocks == BLOCKS for ticket in tickets)
        table = engines[0].table(BLOCKS)
        loads = [
            ticket.load(engine.pool, table) for ticket, engine in zip(tickets, engines, strict=True)
        ]
        while not device.waiting:
            time.sleep(0.001)
        other = engine_of(store)
        began = time.monotonic()
        for seed in range(2, 6):
            assert other.save(tokens_of(seed))[1].saved == BLOCKS
            assert other.ask(tokens_of(seed)).tokens == BLOCKS * BLOCK
            assert other.ask(tokens_of(1)).tokens == BLOCKS * BLOCK
            assert store.stats() and store.leaks()
        passed_s = time.monotonic() - began
        assert device.waiting and not any(load.done for load in loads)
        assert passed_s < 5.0  # 8 loads and 4 saves: a tenth of a second when nothing else runs
        device.stall()
        assert all(load.result(30).tokens == BLOCKS * BLOCK for load in loads)
        for ticket in tickets:
            ticket.release()
        assert_at_rest(store)


def test_writes_that_stall_stop_no_save_even_when_host_memory_is_full(
    tmp_path: Path, device: FailingDevice
) -> None:
    clock = ManualClock()
    with make_store(tmp_path / "store", device, clock) as store:
        engine = engine_of(store)
        device.stall(*WRITES)
        assert engine.save(tokens_of(2))[1].saved == BLOCKS
        while not device.waiting:
            time.sleep(0.001)
        clock.advance(2.5)  # From now on the write counts as one that fails.
        began = time.monotonic()
        for seed in range(3, 60):  # 3 times what host memory holds
            saved = engine.save(tokens_of(seed))[1]
            assert saved.saved == BLOCKS, seed
            assert engine.ask(tokens_of(seed)).tokens == BLOCKS * BLOCK
        assert device.waiting and time.monotonic() - began < 10.0
        flushed = threading.Thread(target=store.flush)
        flushed.start()
        device.stall()
        flushed.join(30)
        assert engine.ask(tokens_of(100)).tokens == BLOCKS * BLOCK  # from disk, as before
        assert_at_rest(store)


def test_a_new_segment_that_stalls_stops_no_lookup(tmp_path: Path, device: FailingDevice) -> None:
    """Segments are made when there is no free slot, by the thread that asks for one."""
    with open_store(tmp_path / "s", host="8MiB", disk_capacity="32MiB", io=device) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        device.stall("allocate")
        flushed = threading.Thread(target=store.flush)
        flushed.start()
        while not device.waiting:
            time.sleep(0.001)
        began = time.monotonic()
        for seed in range(2, 6):
            assert engine.save(tokens_of(seed))[1].saved == BLOCKS
            assert engine.ask(tokens_of(seed)).tokens == BLOCKS * BLOCK
            assert store.stats()["tiers"]["disk"]["blocks"] == 0
        assert device.waiting and time.monotonic() - began < 5.0
        device.stall()
        flushed.join(30)
        assert_at_rest(store)
