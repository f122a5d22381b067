"""Capacities move while a store is in use, and everything that it promises goes on holding."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import resizing
from kvstore.home import read_facts
from kvstore.resizing import ResizeStop
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.errors import ClosedError, ConfigError
from kvstore.tiers.failpoints import armed
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine, prompt

BLOCK = 4
BLOCKS = 10
MIB = 1 << 20
SIZES: dict[str, Any] = {"host": "8MiB", "disk_capacity": "32MiB", "dirty_age_s": 0.0}
BLOCK_BYTES = 100_000


def engine_of(store: Store, block_bytes: int = BLOCK_BYTES) -> Engine:
    layout = Layout.opaque(
        layers=2, run_bytes=(block_bytes // 2,), dtype="x", format="engine-1", block_tokens=BLOCK
    )
    return Engine(store.namespace(layout, model="m"), 4 * BLOCKS)


def tokens_of(seed: int) -> np.ndarray:
    return prompt(BLOCKS * BLOCK + 1, seed)


def fill(store: Store, prompts: int) -> Engine:
    engine = engine_of(store)
    for seed in range(prompts):
        engine.save(tokens_of(seed))
        store.flush()
    return engine


def arena_bytes(store: Store) -> int:
    return os.fstat(store._placement.host.arena.fd).st_blocks * 512


def found(engine: Engine, prompts: int) -> list[int]:
    """Blocks of each prompt that are there, every byte checked."""
    return [engine.ask(tokens_of(seed)).tokens // BLOCK for seed in range(prompts)]


def test_a_disk_shrinks_and_grows_and_keeps_the_latest_blocks(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        engine = fill(store, 25)  # 26 MiB
        before = store.stats()["tiers"]["disk"]["blocks"]
        shrunk = store.resize(disk_bytes=12 * MIB)
        assert (shrunk.disk_bytes, shrunk.reason) == (12 * MIB, None)
        assert shrunk.evicted_blocks > 0
        assert disk_usage(path) <= 12 * MIB
        left = store.stats()["tiers"]["disk"]
        assert left["blocks"] == before - shrunk.evicted_blocks
        assert left["capacity_bytes"] == 12 * MIB
        assert left["blocks"] * BLOCK_BYTES > 6 * MIB  # no more went than had to
        assert_at_rest(store)
        store.resize(host_bytes=4 * MIB)  # What is found now comes from disk.
        assert found(engine, 25)[-5:] == [BLOCKS] * 5
        assert store.resize(disk_bytes=64 * MIB).disk_bytes == 64 * MIB
        for seed in range(100, 140):
            engine.save(tokens_of(seed))
            store.flush()
        assert 40 * MIB < disk_usage(path) <= 64 * MIB
        assert_at_rest(store)
    with pytest.raises(ConfigError, match="kvstore resize"):
        open_store(path, **SIZES)
    with open_store(path, host="8MiB") as store:
        assert store.config.disk_capacity_bytes == 64 * MIB
        engine = engine_of(store)
        assert all(engine.ask(tokens_of(seed)).tokens for seed in range(101, 140))
        assert_at_rest(store)


def test_two_disk_paths_give_and_take_their_shares(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with open_store(disk=paths, **SIZES) as store:
        engine = fill(store, 25)
        for capacity in (14 * MIB, 40 * MIB, 10 * MIB):
            assert store.resize(disk_bytes=capacity).reason is None
            assert all(disk_usage(path) <= capacity // 2 + (64 << 10) for path in paths)
            assert sum(map(disk_usage, paths)) <= capacity
            assert_at_rest(store)
            for seed in range(30, 40):
                engine.save(tokens_of(seed))
            store.flush()
    with open_store(paths[0], host="8MiB") as store:
        engine = engine_of(store)
        assert any(engine.ask(tokens_of(seed)).tokens for seed in range(30, 40))
        assert_at_rest(store)


def test_host_memory_is_given_back_and_had_again(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", **SIZES | {"host": "16MiB"}) as store:
        engine = fill(store, 14)
        address = store._placement.host.arena.address
        assert arena_bytes(store) > 12 * MIB
        shrunk = store.resize(host_bytes=5 * MIB)
        assert (shrunk.host_bytes, shrunk.reason) == (5 * MIB, None)
        assert arena_bytes(store) <= 5 * MIB
        assert store.stats()["tiers"]["host"]["capacity_bytes"] == 5 * MIB
        assert found(engine, 14) == [BLOCKS] * 14  # from disk
        assert arena_bytes(store) <= 5 * MIB
        assert_at_rest(store)
        assert store.resize(host_bytes=64 * MIB).host_bytes == 64 * MIB
        for seed in range(40):
            assert engine.save(tokens_of(seed))[1].dropped == {}
        assert store._placement.host.used_bytes > 30 * MIB
        assert store._placement.host.arena.address == address
        assert_at_rest(store)


def test_without_a_disk_the_coldest_segments_of_host_memory_go() -> None:
    with open_store(host="16MiB") as store:
        engine = engine_of(store)
        for seed in range(10):
            engine.save(tokens_of(seed))
        assert store.resize(host_bytes=6 * MIB).reason is None
        assert found(engine, 10)[-3:] == [BLOCKS] * 3
        assert arena_bytes(store) <= 6 * MIB
        with pytest.raises(ConfigError, match="no disk tier"):
            store.resize(disk_bytes=16 * MIB)


def test_what_is_leased_or_held_is_waited_for_and_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "WAIT_S", 0.1)
    with open_store(tmp_path / "store", **SIZES) as store:
        engine = fill(store, 6)
        tickets = [engine.space.sequence(tokens_of(seed)).lookup() for seed in range(6)]
        stopped = store.resize(host_bytes=4 * MIB)
        assert stopped.reason is ResizeStop.IN_USE
        assert 4 * MIB < stopped.host_bytes <= 8 * MIB
        assert stopped.seconds < 5
        assert store.stats()["tiers"]["host"]["capacity_bytes"] == stopped.host_bytes
        with store._placement.lock:
            store.check_integrity()
        for ticket in tickets:
            result = engine.load(ticket)
            assert (result.tokens, result.reason) == (BLOCKS * BLOCK, None)
        done = store.resize(host_bytes=4 * MIB)
        assert (done.host_bytes, done.reason) == (4 * MIB, None)
        # On disk too: what a lookup has leased does not go.
        ticket = engine.space.sequence(tokens_of(0)).lookup()
        fill(store, 25)
        assert store.resize(disk_bytes=8 * MIB).reason is None
        assert engine.load(ticket).tokens == BLOCKS * BLOCK
        assert_at_rest(store)


def test_a_disk_that_is_all_leased_stops_at_what_it_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "WAIT_S", 0.1)
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        engine = fill(store, 20)
        tickets = [engine.space.sequence(tokens_of(seed)).lookup() for seed in range(8, 20)]
        stopped = store.resize(disk_bytes=6 * MIB)
        assert stopped.reason is ResizeStop.IN_USE
        assert 12 * MIB < stopped.disk_bytes < 32 * MIB
        assert disk_usage(path) <= stopped.disk_bytes
        for ticket in reversed(tickets):  # The latest lie in host memory, and bar it.
            assert engine.load(ticket).tokens == BLOCKS * BLOCK
        fill(store, 30)
        assert disk_usage(path) <= stopped.disk_bytes
        assert_at_rest(store)
    with open_store(path, host="8MiB") as store:
        assert store.config.disk_capacity_bytes == stopped.disk_bytes
        assert_at_rest(store)


class Room(FileIo):
    """A filesystem with so much free."""

    free = 1 << 40

    def free_bytes(self, place: int | str | Path) -> int:
        return self.free


def test_refusals_are_one_sentence_and_change_nothing(tmp_path: Path) -> None:
    io, path = Room(), tmp_path / "store"
    with open_store(path, io=io, **SIZES) as store:
        engine = fill(store, 5)
        io.free = 10 * MIB
        for sizes, said in (
            ({"disk_bytes": 64 * MIB}, "needs .* more bytes .* but 10485760 are free"),
            ({"disk_bytes": MIB}, "too few"),
            ({"host_bytes": 3 * MIB}, "too few"),
            ({"host_bytes": 100 * MIB}, "open it anew"),
            ({"disk_bytes": 1 << 50}, "at most"),
            ({"host_bytes": 4 * MIB, "disk_bytes": MIB}, "too few"),
        ):
            with pytest.raises(ConfigError, match=said) as refused:
                store.resize(**sizes)
            assert str(refused.value).count(". ") == 0
        tiers = store.stats()["tiers"]
        assert (tiers["host"]["capacity_bytes"], tiers["disk"]["capacity_bytes"]) == (
            8 * MIB,
            32 * MIB,
        )
        io.free = 0
        assert store.resize(disk_bytes=16 * MIB).reason is None  # To shrink needs no room.
        assert found(engine, 5) == [BLOCKS] * 5
        assert_at_rest(store)
    with pytest.raises(ClosedError):
        store.resize(disk_bytes=32 * MIB)


def test_a_store_that_closes_ends_its_resize(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = open_store(path, **SIZES)
    engine = fill(store, 25)
    tickets = [engine.space.sequence(tokens_of(seed)).lookup() for seed in range(25)]
    results = []
    thread = threading.Thread(target=lambda: results.append(store.resize(disk_bytes=6 * MIB)))
    thread.start()
    store._resizer._closed = True
    thread.join(30)
    assert results[0].reason is ResizeStop.CLOSED
    for ticket in tickets:
        ticket.release()
    store.close()
    with open_store(path, host="8MiB") as store:
        assert_at_rest(store)


class Failing(FileIo):
    """Renames, or writes of volumes' headers, fail."""

    names: tuple[str, ...] = ()

    def rename(self, old: str | Path, new: str | Path, *, directory: int | None = None) -> None:
        if str(new) in self.names:
            raise OSError(5, "Input/output error")
        super().rename(old, new, directory=directory)


@pytest.mark.parametrize("capacity", [12 * MIB, 64 * MIB])
def test_a_capacity_that_cannot_be_written_down_does_not_hold(
    tmp_path: Path, capacity: int
) -> None:
    io, path = Failing(), tmp_path / "store"
    with open_store(path, io=io, **SIZES) as store:
        engine = fill(store, 25)
        io.names = ("store.toml",)
        failed = store.resize(disk_bytes=capacity)
        assert (failed.disk_bytes, failed.reason) == (32 * MIB, ResizeStop.DEVICE)
        for seed in range(25, 50):
            engine.save(tokens_of(seed))
            store.flush()
        assert 16 * MIB < disk_usage(path) <= 32 * MIB
        assert_at_rest(store)
    with open_store(path, host="8MiB") as store:
        assert store.config.disk_capacity_bytes == 32 * MIB
        assert engine_of(store).ask(tokens_of(49)).tokens == BLOCKS * BLOCK


class Load:
    """Four threads that save, look up and load, of three sizes, until told to end."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.seed = store, seed
        self.ended = threading.Event()
        self.failures: list[BaseException] = []
        self.blocks = 0
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(4)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        random = np.random.default_rng((self.seed, number))
        try:
            engine = engine_of(self.store, (20_000, 60_000, 100_000)[number % 3])
            while not self.ended.is_set():
                seed = int(random.integers(0, 60))
                if random.random() < 0.5:
                    engine.save(tokens_of(seed))
                result = engine.ask(tokens_of(seed))  # asserts every byte
                self.blocks += result.tokens // BLOCK
        except BaseException as failure:
            self.failures.append(failure)

    def go_on(self, blocks: int) -> None:
        """Wait until so many more blocks were loaded."""
        wanted, until = self.blocks + blocks, time.monotonic() + 10
        while self.blocks < wanted and not self.failures and time.monotonic() < until:
            time.sleep(0.002)

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def resize_under_load(path: Path, seed: int, resizes: int) -> None:
    random = np.random.default_rng(seed)
    disk, host, evicted = 32 * MIB, 8 * MIB, 0
    paths = [path] if seed % 2 else [path / "a", path / "b"]
    for place in paths:
        place.mkdir(exist_ok=True, parents=True)
        place.chmod(0o700)
    with open_store(disk=paths, **SIZES) as store:
        load = Load(store, seed)
        tops: list[tuple[int, int]] = []
        watching = threading.Event()

        def watch() -> None:
            while not watching.wait(0.005):
                limit = tops[-1] if tops else (disk, host)
                used = sum(disk_usage(place) for place in paths), arena_bytes(store)
                after = tops[-1] if tops else (disk, host)
                # The capacity may move between the two: what holds is the larger.
                assert used[0] <= max(limit[0], after[0]), f"disk {used} of {limit}, seed {seed}"
                assert used[1] <= max(limit[1], after[1]), f"host {used} of {limit}, seed {seed}"

        failures: list[BaseException] = []

        def watcher() -> None:
            try:
                watch()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=watcher)
        thread.start()
        try:
            for _ in range(resizes):
                load.go_on(100)
                new_disk = int(random.integers(8 * MIB, 48 * MIB))
                new_host = int(random.integers(5 * MIB, 24 * MIB))
                tops.append((max(disk, new_disk), max(host, new_host)))
                resized = store.resize(host_bytes=new_host, disk_bytes=new_disk)
                assert (resized.host_bytes, resized.disk_bytes) == (new_host, new_disk), seed
                disk, host, evicted = new_disk, new_host, evicted + resized.evicted_blocks
                tops.append((disk, host))
                store.check_integrity()
        finally:
            load.end()
            watching.set()
            thread.join()
        assert not failures + load.failures and evicted > 0, (failures, load.failures, evicted)
        assert_at_rest(store)
    facts = read_facts(paths[0], FileIo())
    assert facts is not None and facts.disk_capacity_bytes == disk
    assert sum(disk_usage(place) for place in paths) <= disk


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_resizes_under_load(tmp_path: Path, seed: int) -> None:
    resize_under_load(tmp_path / "store", seed, 6)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_resizes_under_load(tmp_path: Path, seed: int) -> None:
    """Replay one: pytest tests/kvstore/test_resizing.py -m long -k 'many and [SEED]'."""
    resize_under_load(tmp_path / "store", seed, 100)


def test_a_write_that_was_under_way_is_waited_for(tmp_path: Path) -> None:
    """A group has slots in the segment that goes: it ends, and its blocks leave again."""
    with open_store(tmp_path / "store", **SIZES) as store:
        engine = fill(store, 25)
        written = threading.Event()
        resizing_now = threading.Event()

        def hold() -> None:
            written.set()
            resizing_now.wait(10)

        with armed("disk.written", hold):
            engine.save(tokens_of(70))
            assert written.wait(10)
            thread = threading.Thread(target=lambda: store.resize(disk_bytes=5 * MIB))
            thread.start()
            thread.join(0.2)
            resizing_now.set()
            thread.join(30)
        assert store.stats()["tiers"]["disk"]["capacity_bytes"] == 5 * MIB
        assert_at_rest(store)
