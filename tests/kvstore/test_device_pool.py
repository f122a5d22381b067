"""Pages in a device's memory: the right bytes however late the device is, and every copy in order.

Scenarios A01-A04 and A21 of the field's reports; each is shown to be seen when its guard is gone.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.loading import Load
from kvstore.page_copies import DeviceCopies
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.layout import Layout
from kvstore.tiers.pinning import Pinning
from support.device_engine import DeviceEngine, late_device
from support.engine import prompt
from support.race_checker import RaceChecker

LAYOUT = Layout.opaque(
    layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4
)
PAGES = 64


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "s", host="8MiB", disk_capacity="32MiB") as made:
        yield made
        assert made.leaks() == {"leases": 0, "holds": 0}
        made.check_integrity()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[RaceChecker]:
    made = late_device(getattr(request, "param", 1))
    yield made
    made.close()


def table(seed: int, blocks: int) -> Any:
    return np.random.default_rng(seed).permutation(PAGES)[:blocks]


def save_and_ask(store: Store, device: RaceChecker, seed: int) -> tuple[int, list[int]]:
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
    tokens = prompt(4 * 20 + 1, seed)
    sequence, pages = engine.space.sequence(tokens), table(seed, 20)
    engine.compute(sequence, pages)
    sequence.save(engine.pool, pages).result(60)
    return engine.ask(tokens, table(seed + 1, 20))


@pytest.mark.parametrize("device", range(4), indirect=True)
def test_what_was_computed_late_is_what_is_saved(store: Store, device: RaceChecker) -> None:
    """A01: the offload waits for the compute stream, not for a step of the scheduler."""
    blocks, wrong = save_and_ask(store, device, 7)
    assert blocks == 20 and wrong == []
    device.assert_ordered()


def test_a01_without_the_wait_is_seen(
    store: Store, device: RaceChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCopies, "ready", lambda self: None)
    save_and_ask(store, device, 7)
    with pytest.raises(AssertionError, match="in no order"):
        device.assert_ordered()


def test_a02_pages_are_given_away_only_when_a_save_is_done(
    store: Store, device: RaceChecker
) -> None:
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
    for round_number in range(6):
        first, second = (prompt(4 * 10 + 1, 100 + round_number + n) for n in (0, 50))
        sequence, pages = engine.space.sequence(first), table(round_number, 10)
        engine.compute(sequence, pages)
        save = sequence.save(engine.pool, pages)
        save.result(60)  # The guard: the engine waits for this before it gives the pages away.
        engine.compute(engine.space.sequence(second), pages)
        assert engine.ask(first, table(round_number + 9, 10)) == (10, [])
    device.assert_ordered()


def test_a02_pages_that_are_given_away_too_early_are_seen(
    store: Store, device: RaceChecker
) -> None:
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
    sequence, pages = engine.space.sequence(prompt(41, 1)), table(1, 10)
    engine.compute(sequence, pages)
    with store._placement.lock:  # So that the copy cannot be over before the pages are given away.
        save = sequence.save(engine.pool, pages)
        engine.compute(engine.space.sequence(prompt(41, 2)), pages)
    save.result(60)
    with pytest.raises(AssertionError, match="in no order"):
        device.assert_ordered()


class HostSlots:
    """Tells the checker when the store gives host slots back: nobody may read them then."""

    def __init__(self, store: Store, device: RaceChecker, monkeypatch: pytest.MonkeyPatch) -> None:
        host = store._placement.host
        release = host.release

        def watched(slots: Any) -> None:
            for slot in np.asarray(slots).tolist():
                size = host.slab.class_of(host.slab.segment_of(slot))
                address = int(host.record_addresses(np.array([slot]))[0])
                device.host(address, size, writes=True, what="the slot's next owner")
            release(slots)

        monkeypatch.setattr(host, "release", watched)


def evict_while_loading(store: Store, device: RaceChecker) -> None:
    """Loads of one prompt while other prompts push it out of a small host tier."""
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
    tokens = prompt(4 * 30 + 1, 3)
    sequence, pages = engine.space.sequence(tokens), table(3, 30)
    engine.compute(sequence, pages)
    sequence.save(engine.pool, pages).result(60)
    store.flush()
    for number in range(30):
        ticket = engine.space.sequence(tokens).lookup()
        load = ticket.load(engine.pool, table(number, 30)[: max(1, ticket.blocks)])
        other = engine.space.sequence(prompt(4 * 30 + 1, 1000 + number))
        pages = np.setdiff1d(np.arange(PAGES), table(number, 30))[:30]
        engine.compute(other, pages)
        other.save(engine.pool, pages).result(60)
        load.result(60)
        engine.stream.wait(load._filled[-1][1]) if load._filled else None


def test_a03_a_slot_is_reused_only_after_the_device_has_read_it(
    tmp_path: Path, device: RaceChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "s", host="4MiB", disk_capacity="16MiB") as store:
        HostSlots(store, device, monkeypatch)
        evict_while_loading(store, device)
    device.assert_ordered()


def test_a03_without_the_wait_is_seen(
    tmp_path: Path, device: RaceChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "wait_filled", lambda self: None)
    with open_store(tmp_path / "s", host="4MiB", disk_capacity="16MiB") as store:
        HostSlots(store, device, monkeypatch)
        evict_while_loading(store, device)
    with pytest.raises(AssertionError, match="in no order"):
        device.assert_ordered()


def copy_a_page_that_is_loading(store: Store, device: RaceChecker, *, waits: bool) -> list[int]:
    """A second sequence takes over a page of a prefix that is still on its way, and is saved."""
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
    tokens = prompt(4 * 10 + 1, 5)
    sequence, pages = engine.space.sequence(tokens), table(5, 10)
    engine.compute(sequence, pages)
    sequence.save(engine.pool, pages).result(60)
    store.flush()
    ticket = engine.space.sequence(tokens).lookup()
    there, other = table(6, 20)[:10], table(6, 20)[10:]
    load = ticket.load(engine.pool, there)
    load.wait_layer(LAYOUT.layers - 1, 60, stream=engine.stream if waits else None)
    if not waits:
        # As an engine that takes the host's bookkeeping for the device's: nothing was waited for.
        device._host.clear()
    sizes = LAYOUT.run_lengths.astype(np.uint64)
    for source, target in zip(there.tolist(), other.tolist(), strict=True):
        device.copy(engine.stream, engine._addresses(target), engine._addresses(source), sizes)
    seen = engine.attend(other, 10)
    load.result(60)
    return engine.wrong(sequence, seen)


def test_a04_a_page_is_copied_after_it_was_loaded(store: Store, device: RaceChecker) -> None:
    assert copy_a_page_that_is_loading(store, device, waits=True) == []
    device.assert_ordered()


def test_a04_without_the_wait_is_seen(store: Store, device: RaceChecker) -> None:
    copy_a_page_that_is_loading(store, device, waits=False)
    with pytest.raises(AssertionError, match="in no order"):
        device.assert_ordered()


@pytest.mark.slow
def test_a_thousand_interleavings(tmp_path: Path) -> None:
    """Load, save, evict, abort from three threads, with everything late: 0 wrong bytes."""
    device, wrong, hits = late_device(11, 5e-5), [], [0]
    with open_store(tmp_path / "s", host="6MiB", disk_capacity="24MiB") as store:

        def run(worker: int) -> None:
            engine = DeviceEngine(store.namespace(LAYOUT, model="m"), PAGES, device)
            rng = np.random.default_rng(worker)
            for number in range(340):
                tokens = prompt(int(rng.integers(8, 70)), int(rng.integers(0, 12)))
                pages = rng.permutation(PAGES)[:24]
                if rng.random() < 0.3:
                    ticket = engine.space.sequence(tokens).lookup()
                    load = ticket.load(engine.pool, pages[: max(1, ticket.blocks)])
                    load.cancel()
                    load.result(60)
                    continue
                sequence = engine.space.sequence(tokens)
                blocks, bad = engine.ask(tokens, pages)
                hits[0] += blocks
                wrong.extend((worker, number, block) for block in bad)
                engine.compute(sequence, pages, blocks)
                sequence.save(engine.pool, pages).result(60)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.check_integrity()
        assert store.leaks() == {"leases": 0, "holds": 0}
    assert wrong == [] and hits[0] > 1000
    device.assert_ordered()
    device.close()


def test_kernels_reach_into_host_memory_only_where_it_is_page_locked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that reads other memory ends the device for good."""
    locked, launches = [False], [0]
    device = late_device(3)
    launch = device.launch

    def watched(stream: Any, kernel: str, *rest: Any, **options: Any) -> None:
        launches[0] += 1
        assert locked[0], "a kernel was given memory that is not page-locked"
        launch(stream, kernel, *rest, **options)

    monkeypatch.setattr(device, "launch", watched)
    monkeypatch.setattr(Pinning, "covers", lambda self, addresses: locked[0])
    space = store.namespace(LAYOUT, model="m")
    locked[0] = True  # The self-test of the pool has pinned buffers of its own.
    engine = DeviceEngine(space, PAGES, device)
    for reached, before in ((False, launches[0]), (True, launches[0])):
        locked[0] = reached
        tokens = prompt(4 * 20 + 1, int(reached))
        sequence, pages = engine.space.sequence(tokens), table(5, 20)
        engine.compute(sequence, pages)
        sequence.save(engine.pool, pages).result(60)
        assert engine.ask(tokens, table(6, 20)) == (20, [])
        assert (launches[0] > before) == reached
    device.assert_ordered()
    device.close()
