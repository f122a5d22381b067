"""Copies by every method, byte for byte; and a store whose pages lie on the device, under load."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kvstore
from bench.gpu.pages import Pages
from bench.gpu.place import Place, download, upload
from bench.gpu.results import Figure
from kvstore.cuda.calibration import Calibration, calibration_of
from kvstore.cuda.page_mover import Method, PageMover
from kvstore.tiers.layout import Layout
from support.device_engine import DeviceEngine
from support.engine import prompt

SHAPES = {
    "one row": ((1, 4096, 0),) * 4,
    "heads": ((8, 256, 64),) * 6,
    "odd": ((1, 5001, 3), (3, 777, 0), (1, 16, 0)),
    "large": ((1, 1 << 18, 0),) * 2,
}
LAYOUT = Layout.opaque(
    layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4
)
PAGES = 64


def copies_are_exact(place: Place) -> list[Figure]:
    """Gather and scatter of every shape by every method, whole blocks and ranges of runs."""
    checked = 0
    for runs in SHAPES.values():
        for method in Method:
            _check(place, runs, method)
            checked += 1
    return [Figure("shapes and methods that copy exactly", f"{checked} of {checked}", goal="all")]


def _check(place: Place, runs: Any, method: Method) -> None:
    device, rng, per_block, blocks = place.device, np.random.default_rng(3), 2, 70
    blocks = place.pick(blocks, 3)
    pool = Pages.make(device, runs, 2 * blocks + 3, per_block)
    content = rng.integers(0, 256, pool.memory.size_bytes, np.uint8)
    upload(device, pool.memory.address, content)
    pages = rng.permutation(pool.pages)[: blocks * per_block].reshape(blocks, per_block)
    pinned = device.allocate_pinned(blocks * pool.payload_bytes)
    pinned.view()[:] = 0
    payloads = pinned.address + pool.payload_bytes * np.arange(blocks, dtype=np.uint64)
    mover = PageMover(device, pool.table, per_block, method=method)
    save, load = device.stream("save"), device.stream("load")
    mover.gather(save, pages, payloads)
    save.record().wait()
    seen = pinned.view().reshape(blocks, -1)
    for block in range(blocks):
        assert seen[block].tobytes() == pool.payload(content, pages[block].tolist()), method
    target = Pages.make(device, runs, pool.pages, per_block)
    back = PageMover(device, target.table, per_block, method=method)
    half = max(1, pool.table.runs // 2)
    for first, last in ((0, half), (half, pool.table.runs)):
        back.scatter(load, pages, payloads, (first, last))
    load.record().wait()
    filled = download(device, target.memory.address, target.memory.size_bytes)
    for block in range(blocks):
        page_ids = pages[block].tolist()
        assert target.payload(filled, page_ids) == pool.payload(content, page_ids), method
    for made in (mover, back):
        made.refuse_bad_page()
        made.close()
    for buffer in (pinned, pool.memory, target.memory):
        buffer.free()


class TorchPages(DeviceEngine):
    """The tests' engine, with its pages in torch tensors on the device."""

    def __init__(self, space: Any, pages: int, place: Place) -> None:
        self.space, self.layout, self.pages = space, space.layout, pages
        self.device = place.device  # type: ignore[assignment]
        lengths = self.layout.run_lengths.tolist()
        self.tensors = [
            torch.zeros(pages, n, dtype=torch.uint8, device=place.compute.tensors) for n in lengths
        ]
        self.memory = [SimpleNamespace(address=t.data_ptr()) for t in self.tensors]  # type: ignore[misc]
        if not place.twin:
            torch.cuda.synchronize()
        self.pool = space.pool(self.tensors, device=place.device)
        self.stream = place.device.stream("compute")  # type: ignore[assignment]


def store_is_exact(place: Place) -> list[Figure]:
    """Random loads, saves, evictions and aborts of three threads over one store: 0 wrong bytes."""
    wrong: list[Any] = []
    failed: list[BaseException] = []
    hits = [0]
    rounds = place.pick(200, 4)
    began = time.perf_counter()
    # Once and before the threads, so that they do not disturb it; the twin's would mean nothing.
    known = Calibration(place.device.name) if place.twin else calibration_of(place.device)
    calibrated_s = time.perf_counter() - began
    with kvstore.open(place.folder / "exact", host="6MiB", disk_capacity="24MiB") as store:

        def run(worker: int) -> None:
            try:
                _requests(TorchPages(store.namespace(LAYOUT, model="m"), PAGES, place), worker)
            except BaseException as error:
                failed.append(error)

        def _requests(engine: TorchPages, worker: int) -> None:
            rng = np.random.default_rng(worker)
            for number in range(rounds):
                tokens = prompt(int(rng.integers(8, 70)), int(rng.integers(0, 12)))
                pages = rng.permutation(PAGES)[:24]
                sequence = engine.space.sequence(tokens)
                if rng.random() < 0.3:
                    ticket = sequence.lookup()
                    load = ticket.load(engine.pool, pages[: max(1, ticket.blocks)])
                    load.cancel()
                    load.result(60)
                    continue
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
        if failed:
            raise failed[0]
        store.check_integrity()
        locked = store.stats()["page_locked"]
        assert store.leaks() == {"leases": 0, "holds": 0}
    assert wrong == [], wrong[:5]
    assert hits[0] > place.pick(500, -1), f"only {hits[0]} hits"
    return [
        Figure("wrong blocks under load, evict and abort", 0, goal="0"),
        Figure("blocks that were loaded and compared", hits[0]),
        Figure("calibration", round(calibrated_s, 2), f"s, {len(known.measured)} measurements"),
        Figure("arena page-locked", locked["bytes"] >> 20, "MiB"),
        Figure("page-locking", round(locked["seconds_per_gib"], 3), "s/GiB"),
        Figure("registrations that the driver refused", int(locked["failures"]), goal="0"),
    ]
