"""Pins outlive their store, however it ended, and a damaged list of them is no list."""

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstore.pin_outcomes import PinRefusal, PinRefused
from kvstore.pins_file import FILE_MIN_BYTES, encoded_bytes, file_bytes_max
from kvstore.store import open as open_store
from kvstore.tiers.layout import Layout
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine, prompt
from support.faulty import FullIo
from support.manual_clock import ManualClock
from support.pinning import (
    BLOCKS,
    DISK,
    engine_of,
    fill,
    pin,
    stored,
    tokens_of,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_pins_outlive_a_restart_and_end_when_they_would_have(
    tmp_path: Path, clock: ManualClock
) -> None:
    path = tmp_path / "store"
    with open_store(path, clock=clock, **DISK) as store:
        engine = engine_of(store)
        for seed, ttl_s in ((1, 1000), (2, 50), (3, 1000)):
            engine.save(tokens_of(seed))
            pin(engine, tokens_of(seed), ttl_s)
        clock.advance(30)
        assert stored(engine, tokens_of(1)) == BLOCKS
        before = store.pins()
        assert store.unpin(3)
    clock.advance(30)
    with open_store(path, clock=clock, **DISK) as store:
        assert store.pins() == before[:1]
        engine = engine_of(store)
        fill(engine)
        assert stored(engine, tokens_of(1)) == BLOCKS
        assert stored(engine, tokens_of(2)) == 0
        engine.save(tokens_of(4))
        assert pin(engine, tokens_of(4)).pin_id == 4
        assert_at_rest(store)
    clock.advance(1001)
    with open_store(path, clock=clock, **DISK) as store:
        assert [one.pin_id for one in store.pins()] == [4]


def test_a_clock_that_was_set_back_makes_no_pin_longer(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "store"
    with open_store(path, clock=clock, **DISK) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        pin(engine, tokens_of(1), 100)
        clock.wall_ahead_s = -86_400.0
        assert store.pins()[0].expires_at == clock.time() + 100
    clock.wall_ahead_s = -2 * 86_400.0
    with open_store(path, clock=clock, **DISK) as store:
        assert store.pins()[0].expires_at == clock.time() + 100


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "other version", "other file"])
def test_a_damaged_list_of_pins_means_no_pins_and_one_warning(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    with open_store(path, **DISK) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        pin(engine, tokens_of(1))
    data = bytearray((path / "pins").read_bytes())
    assert len(data) == encoded_bytes(1, BLOCKS)
    if harm == "flip":
        data[-20] ^= 4
    elif harm == "other version":
        data[8] = 9
    elif harm == "other file":
        data[:8] = b"KVCOUNT1"
    else:
        data = data[: len(data) // 2 if harm == "cut" else 0]
    (path / "pins").write_bytes(data)
    with caplog.at_level(logging.WARNING), open_store(path, **DISK) as store:
        assert store.pins() == []
        assert len(caplog.records) == 1
        engine = engine_of(store)
        assert stored(engine, tokens_of(1)) == BLOCKS
        pin(engine, tokens_of(1))
    with open_store(path, **DISK) as store:
        assert len(store.pins()) == 1


def test_a_list_that_cannot_be_written_is_no_pin(tmp_path: Path) -> None:
    io = FullIo()
    with open_store(tmp_path / "store", io=io, **DISK) as store:
        engine = engine_of(store)
        engine.save(tokens_of(1))
        store.flush()
        io.full = True
        answer = store.pin(engine.space.sequence(tokens_of(1)), ttl_s=60)
        assert answer == PinRefused(PinRefusal.NOT_WRITTEN)
        assert store.pins() == []
        io.full = False
        pin(engine, tokens_of(1))
        assert_at_rest(store)


def test_the_list_of_pins_is_part_of_the_capacity(tmp_path: Path) -> None:
    """As many pins as the file has room for, in the smallest store."""
    path = tmp_path / "store"
    sizes: dict[str, Any] = {"host": "4MiB", "disk_capacity": "4MiB"}
    with open_store(path, pin_fraction=1.0, **sizes) as store:
        layout = Layout.opaque(layers=1, run_bytes=(16,), dtype="x", format="e", block_tokens=1)
        engine = Engine(store.namespace(layout, model="m"), 256)
        answers = []
        for seed in range(3):
            sequence, _ = engine.save(prompt(100, seed))
            answers += [store.pin(key.tobytes(), ttl_s=60) for key in sequence.keys]
        store.flush()
        assert file_bytes_max(4 << 20) == FILE_MIN_BYTES
        assert (path / "pins").stat().st_size <= FILE_MIN_BYTES
        assert answers[-1] == PinRefused(PinRefusal.TOO_MANY)
        assert disk_usage(path) <= 4 << 20
        kept = len(store.pins())
    with open_store(path, pin_fraction=1.0, **sizes) as store:
        assert len(store.pins()) == kept > 100
