"""Blocks to and from a device: the right bytes by every method, late or not, always in order."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore.cuda.copy import RunTable
from kvstore.cuda.cpu_device import CpuDevice
from kvstore.cuda.device import DeviceError
from kvstore.cuda.page_mover import BLOCKS_MAX, Method, PageMover, choose
from support import cuda_shim
from support.cuda_shim import Kernels
from support.race_checker import RaceChecker

PAGES, PER_BLOCK = 24, 2
SHAPES = {
    "rows": ((1, 640), (1, 640), (1, 96)),
    "heads": ((4, 64), (4, 64)),
    "large": ((1, 40_960), (1, 40_960)),
}


class Pool:
    """A pool in "device" memory, and payloads in pinned memory."""

    def __init__(self, shape: tuple[tuple[int, int], ...], device: Any, blocks: int) -> None:
        rng = np.random.default_rng(blocks)
        self.arrays = [
            rng.integers(0, 256, (PAGES, rows, size + 32), np.uint8) for rows, size in shape
        ]
        self.shape = shape
        pieces = np.array([rows * size for rows, size in shape])
        self.offsets = np.concatenate([[0], np.cumsum(pieces * PER_BLOCK)])
        self.table = RunTable(
            base=np.array([a.ctypes.data for a in self.arrays], np.uint64),
            page_stride=np.array([a.strides[0] for a in self.arrays]),
            rows=np.array([rows for rows, _ in shape]),
            row_bytes=np.array([size for _, size in shape]),
            row_stride=np.array([a.strides[1] for a in self.arrays]),
            payload_offset=self.offsets[:-1].copy(),
            pages=PAGES,
        )
        self.size = int(self.offsets[-1])
        self.pinned = device.allocate_pinned(self.size * blocks)
        self.payloads = self.pinned.address + self.size * np.arange(blocks, dtype=np.uint64)
        self.pages = rng.permutation(PAGES)[: blocks * PER_BLOCK].reshape(blocks, PER_BLOCK)

    def payload(self, block: int) -> bytes:
        """What the block's pages hold."""
        return b"".join(
            array[page, :, :size].tobytes()
            for array, (_, size) in zip(self.arrays, self.shape, strict=True)
            for page in self.pages[block]
        )

    def saved(self, block: int) -> bytes:
        return bytes(self.pinned.view()[block * self.size : (block + 1) * self.size])


@contextmanager
def device(seed: int | None = None, **options: Any) -> Iterator[RaceChecker]:
    rng = random.Random(seed)

    def late(_: str) -> None:
        time.sleep(rng.random() * 1e-4)

    made = RaceChecker(CpuDevice(delay=None if seed is None else late, **options))
    yield made
    made.close()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("method", Method)
def test_gather_and_scatter_are_exact(name: str, method: Method) -> None:
    with device(seed=1) as checked:
        pool = Pool(SHAPES[name], checked, 5)
        mover = PageMover(checked, pool.table, PER_BLOCK, method=method)
        save, load = checked.stream("save"), checked.stream("load")
        mover.gather(save, pool.pages, pool.payloads)
        saved = save.record()
        saved.wait()
        wanted = [pool.payload(block) for block in range(5)]
        assert [pool.saved(block) for block in range(5)] == wanted
        pool.pages = (pool.pages + 3) % PAGES
        before = [array.copy() for array in pool.arrays]
        mover.scatter(load, pool.pages, pool.payloads, (0, pool.table.runs), skip_pages=1)
        load.record().wait()
        first = int(pool.pages[0, 0])
        for array, old in zip(pool.arrays, before, strict=True):
            assert (array[first] == old[first]).all(), "a page that the engine holds was touched"
            array[first] = 0
        assert [pool.payload(block) for block in range(1, 5)] == wanted[1:]
        checked.assert_ordered()
        mover.refuse_bad_page()
        mover.close()


@pytest.mark.parametrize("method", Method)
def test_a_range_of_runs_touches_no_other(method: Method) -> None:
    with device() as checked:
        pool = Pool(SHAPES["rows"], checked, 3)
        mover = PageMover(checked, pool.table, PER_BLOCK, method=method)
        before = [array.copy() for array in pool.arrays]
        pool.pinned.view()[:] = 7
        mover.scatter(checked.stream("load"), pool.pages, pool.payloads, (1, 2))
        checked.stream("load").record().wait()
        assert (pool.arrays[0] == before[0]).all() and (pool.arrays[2] == before[2]).all()
        assert (pool.arrays[1][pool.pages, :, :640] == 7).all()
        checked.assert_ordered()


@pytest.mark.slow
def test_the_kernel_itself_does_the_same() -> None:
    kernels = Kernels(cuda_shim.build())

    def launcher(name: str, grid: Any, threads: int, arguments: Any, shared_bytes: int) -> None:
        kernels.launch(name, grid, threads, arguments, shared_bytes=shared_bytes, seed=3)

    with device(launcher=launcher) as checked:
        for method in (Method.DIRECT, Method.STAGED):
            pool = Pool(SHAPES["heads"], checked, 4)
            mover = PageMover(checked, pool.table, PER_BLOCK, method=method)
            mover.gather(checked.stream("save"), pool.pages, pool.payloads)
            checked.stream("save").record().wait()
            assert [pool.saved(b) for b in range(4)] == [pool.payload(b) for b in range(4)]


def test_many_calls_wait_for_room_and_stay_exact() -> None:
    with device(seed=5) as checked:
        pool = Pool(SHAPES["heads"], checked, 4)
        mover = PageMover(checked, pool.table, PER_BLOCK, method=Method.STAGED)
        for _ in range(3 * BLOCKS_MAX // 16):
            mover.gather(checked.stream("save"), pool.pages, pool.payloads)
        checked.stream("save").record().wait()
        assert [pool.saved(b) for b in range(4)] == [pool.payload(b) for b in range(4)]
        checked.assert_ordered()


def test_neighbours_are_one_copy() -> None:
    with device() as checked:
        array = np.zeros((PAGES, 1, 64), np.uint8)
        table = RunTable(
            base=np.array([array.ctypes.data], np.uint64),
            page_stride=np.array([64]),
            rows=np.array([1]),
            row_bytes=np.array([64]),
            row_stride=np.array([64]),
            payload_offset=np.array([0]),
            pages=PAGES,
        )
        mover = PageMover(checked, table, 4, method=Method.COPIES)
        pages = np.array([[3, 4, 5, 9]])
        _, _, sizes = mover._addresses(pages, np.array([4096], np.uint64), (0, 1), 0)
        assert sizes.tolist() == [192, 64]


def test_misuse_is_refused_before_a_byte_moves() -> None:
    with device() as checked:
        pool = Pool(SHAPES["rows"], checked, 2)
        mover = PageMover(checked, pool.table, PER_BLOCK)
        stream = checked.stream("save")
        with pytest.raises(ValueError, match="page ids"):
            mover.gather(stream, pool.pages + PAGES, pool.payloads)
        with pytest.raises(ValueError, match="int64"):
            mover.gather(stream, pool.pages.astype(np.int32), pool.payloads)
        with pytest.raises(DeviceError, match="no kernel"):
            checked.launch(stream, "combine_fp32", (1,), 64, [0, 0, 0, 1, 64])
    assert choose(1024) is Method.STAGED and choose(64 << 10) is Method.COPIES


def test_the_checker_sees_a_missing_wait() -> None:
    """What the tests above rely on."""
    with device() as checked:
        pool = Pool(SHAPES["rows"], checked, 2)
        mover = PageMover(checked, pool.table, PER_BLOCK, method=Method.COPIES)
        mover.gather(checked.stream("save"), pool.pages, pool.payloads)
        event = checked.stream("save").record()
        checked.stream("load").wait(event)
        mover.scatter(checked.stream("load"), pool.pages, pool.payloads, (0, 3))
        checked.assert_ordered()
        mover.gather(checked.stream("save"), pool.pages, pool.payloads)
        assert checked.races and "in no order" in checked.races[0]
        checked.races.clear()
        checked.host(int(pool.payloads[0]), 8, writes=False, what="a checksum")
        assert checked.races
