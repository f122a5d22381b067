"""The arena is page-locked as it grows, unlocked before its memory goes; nobody waits for it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.cuda.cpu_device import CpuDevice
from kvstore.cuda.device import DeviceError
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.host import HostTier
from kvstore.tiers.layout import Layout
from support.device_engine import DeviceEngine, late_device
from support.engine import prompt

SEGMENT = 2 << 20
SLOT = 64 << 10
LAYOUT = Layout.opaque(
    layers=2, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4
)


class RecordingDevice(CpuDevice):
    """Holds the calls against what a driver allows. fails: so many registrations are refused."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.now: dict[int, int] = {}
        self.calls: list[str] = []
        self.fails = fails
        self.gate = threading.Event()
        self.gate.set()

    def register(self, address: int, size_bytes: int) -> None:
        self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise DeviceError("no more page-locked memory")
        assert address % 4096 == 0 and size_bytes % 4096 == 0
        for start, size in self.now.items():
            assert address + size_bytes <= start or start + size <= address, "locked twice"
        self.now[address] = size_bytes
        self.calls.append("register")

    def unregister(self, address: int) -> None:
        del self.now[address]  # KeyError: it was not.
        self.calls.append("unregister")


@pytest.fixture
def tier() -> Iterator[HostTier]:
    made = HostTier(8 * SEGMENT, SEGMENT, store_id=bytes(16))
    yield made
    made.close(keep=False)


def addresses(tier: HostTier) -> set[int]:
    return {
        tier.arena.address + tier.arena.segments_at + segment * SEGMENT
        for segment in tier.slab.assigned().tolist()
    }


def test_what_is_used_and_what_comes_later_is_locked(tier: HostTier) -> None:
    device = RecordingDevice()
    first = tier.reserve(SLOT, 10)
    pinning = tier.pin(device, time.monotonic)
    assert tier.pin(RecordingDevice(), time.monotonic) is pinning
    more = tier.reserve(SLOT, 100)
    assert pinning.wait(10)
    assert addresses(tier) <= device.now.keys()
    assert pinning.covers(tier.record_addresses(np.concatenate([first, more])))
    outside = np.array([tier.arena.address, tier.arena.address - 1], np.uint64)
    assert not pinning.covers(outside[:1]) and not pinning.covers(outside[1:])
    memory = tier.pinned()
    assert memory.bytes == len(device.now) * SEGMENT == memory.summed_bytes
    assert memory.seconds > 0 and memory.failures == 0


def test_memory_is_unlocked_before_it_goes(tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice()
    slots = tier.reserve(SLOT, 100)
    pinning = tier.pin(device, time.monotonic)
    assert pinning.wait(10)
    release = tier.arena.release

    def watched(segment: int) -> bool:
        start = tier.arena.address + tier.arena.segments_at + segment * SEGMENT
        assert start not in device.now, "the device holds memory that is given back"
        return release(segment)

    monkeypatch.setattr(tier.arena, "release", watched)
    tier.release(slots)
    last = int(tier.slab.assigned()[-1])
    tier.limit_segments(tier.arena.segments_at + 2 * SEGMENT)
    assert tier.give_back(last) and tier.fit_memory()
    assert "unregister" in device.calls
    tier.close(keep=False)
    assert device.now == {}


def test_a_driver_that_refuses_is_counted_and_asked_a_few_times_only(tier: HostTier) -> None:
    device = RecordingDevice(fails=1000)
    pinning = tier.pin(device, time.monotonic)
    slots = tier.reserve(SLOT, 200)
    assert pinning.wait(10)
    assert device.now == {} and not pinning.covers(tier.record_addresses(slots))
    assert tier.pinned().failures == 1000 - device.fails == 3
    tier.close(keep=False)


def test_after_one_failure_the_others_are_locked(tier: HostTier) -> None:
    device = RecordingDevice(fails=1)
    tier.reserve(SLOT, 100)
    assert tier.pin(device, time.monotonic).wait(10)
    assert device.now and tier.pinned().failures == 1


def test_nobody_waits_for_the_driver(tmp_path: Path) -> None:
    """Saves and loads go on while a registration takes its time; stats say what is locked."""
    device = RecordingDevice()
    device.gate.clear()
    with open_store(tmp_path / "s", host="8MiB", disk_capacity="32MiB") as store:
        assert run(store, device) == (20, [])
        assert store.stats()["page_locked"]["bytes"] == 0
        device.gate.set()
        store._placement.host.pin(device, time.monotonic).wait(10)
        assert run(store, device) == (20, [])
        locked = store.stats()["page_locked"]
        assert locked["bytes"] > 0 and locked["failures"] == 0
    assert device.now == {}


def run(store: Store, device: RecordingDevice) -> tuple[int, list[int]]:
    checked = late_device(1)
    checked.register, checked.unregister = device.register, device.unregister  # type: ignore[method-assign]
    engine = DeviceEngine(store.namespace(LAYOUT, model="m"), 64, checked)
    tokens = prompt(4 * 20 + 1, 5)
    sequence, pages = engine.space.sequence(tokens), np.arange(20)
    engine.compute(sequence, pages)
    sequence.save(engine.pool, pages).result(60)
    found = engine.ask(tokens, np.arange(20, 40))
    checked.assert_ordered()
    checked.close()
    return found
