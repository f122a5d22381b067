"""An engine's pages, described run by run: where the store gathers from and scatters to.

Nothing is guessed. The engine lists one array for each run of the layout, in payload order (K of
layer 0, V of layer 0, K of layer 1, ...); axis 0 of each array is the page.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.cuda.calibration import Calibration
from kvstore.cuda.copy import RunTable
from kvstore.cuda.device import Device, Event
from kvstore.page_copies import DeviceCopies, HostCopies, PageCopies, Reaches
from kvstore.tiers.errors import LayoutError
from kvstore.tiers.layout import Layout


@dataclass(frozen=True)
class ArrayView:
    """Address, shape, strides (bytes) and item size of a NumPy or torch array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class PagePool:
    """An engine's pages as the store sees them. Keeps the arrays alive; owns no memory.

    layout: what a block is.  page_tokens: tokens in one of the engine's pages; a block is a whole
    number of pages.  table: one row for each run.  device: whose memory the arrays lie in; None for
    host memory.  calibration: what it was measured to do.  reaches: which of the store's memory is
    page-locked for it; none of it unless told.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Sequence[Any],
        page_tokens: int,
        device: Device | None = None,
        calibration: Calibration | None = None,
        reaches: Reaches = lambda payloads: False,
    ) -> None:
        if page_tokens < 1 or layout.block_tokens % page_tokens:
            raise LayoutError(
                f"a block of {layout.block_tokens} tokens is not a whole number of pages of "
                f"{page_tokens}; choose block_tokens as a multiple of the engine's page"
            )
        if len(arrays) != layout.runs:
            raise LayoutError(
                f"the layout has {layout.runs} runs but {len(arrays)} arrays were given; "
                "list one array for each run, in payload order: K, V of layer 0, K, V of layer 1"
            )
        self.layout = layout
        self.page_tokens = page_tokens
        self.pages_per_block = layout.block_tokens // page_tokens
        self.arrays = tuple(arrays)
        for run, array in enumerate(arrays):
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise LayoutError(f"array {run} is read-only; loads write to it, give it writable")
        on_device = device is not None
        self.table = self._describe([view_of(array, on_device) for array in arrays])
        self.copies: PageCopies = HostCopies(self.table, self.pages_per_block)
        if device is not None:
            known = calibration or Calibration(device.name)
            self.copies = DeviceCopies(device, self.table, layout, known, reaches)

    @property
    def pages(self) -> int:
        """How many pages the pool has."""
        return self.table.pages

    def _describe(self, views: list[ArrayView]) -> RunTable:
        pages = views[0].shape[0] if views[0].shape else 0
        if pages < 1:
            raise LayoutError("the pool has no page; axis 0 of each array is the page")
        rows = []
        for run, view in enumerate(views):
            if not view.shape or view.shape[0] != pages:
                raise LayoutError(f"array {run} has another number of pages than array 0")
            piece = int(self.layout.run_lengths[run]) // self.pages_per_block
            if piece * self.pages_per_block != self.layout.run_lengths[run]:
                raise LayoutError(f"run {run} does not divide into {self.pages_per_block} pages")
            count, row_bytes, stride = _rows(view, run)
            if count * row_bytes != piece:
                raise LayoutError(
                    f"array {run} has {count * row_bytes} bytes a page where the layout says "
                    f"{piece}; check dtype, heads and page size"
                )
            if (count > 1 and stride < row_bytes) or (pages > 1 and view.strides[0] < row_bytes):
                raise LayoutError(f"pages of array {run} overlap; give memory of its own to each")
            rows.append((view.address, view.strides[0], count, row_bytes, stride))
        columns = list(zip(*rows, strict=True))
        return RunTable(
            base=np.array(columns[0], np.uint64),
            page_stride=np.array(columns[1], np.int64),
            rows=np.array(columns[2], np.int64),
            row_bytes=np.array(columns[3], np.int64),
            row_stride=np.array(columns[4], np.int64),
            payload_offset=self.layout.run_offsets,
            pages=pages,
        )

    def blocks_of(self, page_ids: Any) -> int:
        """How many whole blocks a block table has room for."""
        try:
            return int(np.asarray(page_ids).size) // self.pages_per_block
        except (ValueError, TypeError):
            raise LayoutError("page ids are no list of integers; give the block table") from None

    def block_pages(self, page_ids: Any, blocks: int) -> npt.NDArray[np.int64]:
        """The pages of the first `blocks` blocks of a block table: int64 [blocks, pages_per_block].

        Raises LayoutError when the table is too short or names a page that does not exist.
        """
        try:
            ids = np.asarray(page_ids).reshape(-1)
        except (ValueError, TypeError) as error:
            raise LayoutError(f"page ids cannot be read as one list of integers: {error}") from None
        need = blocks * self.pages_per_block
        if len(ids) < need:
            raise LayoutError(f"{blocks} blocks need {need} page ids; {len(ids)} were given")
        if ids.dtype.kind not in "iu" and need:
            raise LayoutError(f"page ids are {ids.dtype}; give integers")
        if need and not (int(ids[:need].min()) >= 0 and int(ids[:need].max()) < self.pages):
            raise LayoutError(f"a page id lies outside the pool's 0..{self.pages - 1}")
        # A copy: engines change their block tables in place while a save or a load is under way.
        ids = ids[:need].astype(np.int64)
        return ids.reshape(blocks, self.pages_per_block)

    def fill(
        self,
        pages: npt.NDArray[np.int64],
        payloads: npt.NDArray[np.uint64],
        first_run: int = 0,
        last_run: int | None = None,
        skip_pages: int = 0,
        ready: Event | None = None,
    ) -> Event | None:
        """Copy payloads into pages [n, pages_per_block], for a range of runs.

        skip_pages: pages of the first block that the engine holds already; they are not touched.
        ready: the point after which nobody computes with the pages any more.

        Returns: None, the pages are filled | the event after which they are.
        """
        runs = (first_run, self.table.runs if last_run is None else last_run)
        return self.copies.scatter(pages, payloads, runs, skip_pages, ready)

    def self_test(self, page: int | None = None) -> None:
        """Write a pattern into one page by the store's path, read it by the array, restore it.

        page: which page; the last one unless told. Raises LayoutError when the two paths disagree.
        """
        page = self.pages - 1 if page is None else page
        pages = np.full((1, self.pages_per_block), page, np.int64)
        payload = self.layout.payload_bytes
        with self.copies.buffers(3, payload) as (before, pattern, after):
            random = np.random.default_rng(1)
            for run, length in zip(self.layout.run_offsets, self.layout.run_lengths, strict=True):
                piece = random.integers(0, 256, int(length) // self.pages_per_block, dtype=np.uint8)
                pattern[run : run + length] = np.tile(piece, self.pages_per_block)
            ready = self.copies.ready()
            self.copies.gather(pages, _address(before), None, ready)
            try:
                self._fill_now(pages, pattern)
                seen = [_page_bytes(array, page) for array in self.arrays]
                self.copies.gather(pages, _address(after), None, None)
            finally:
                self._fill_now(pages, before)
            self._refuse_other_bytes(seen, pattern, after)

    def _fill_now(self, pages: npt.NDArray[np.int64], payload: npt.NDArray[np.uint8]) -> None:
        filled = self.fill(pages, _address(payload))
        if filled is not None:
            filled.wait()

    def _refuse_other_bytes(
        self, seen: list[bytes], pattern: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8]
    ) -> None:
        for run, data in enumerate(seen):
            at = int(self.layout.run_offsets[run])
            if data != pattern[at : at + len(data)].tobytes():
                raise LayoutError(f"array {run} does not read back what was written to its page")
        if not np.array_equal(after, pattern):
            raise LayoutError("two arrays of the pool share memory; list each run's own array")


def view_of(array: Any, on_device: bool = False) -> ArrayView:
    """The memory of a NumPy array or a torch tensor, or, on a device, of a CuPy array.

    Raises LayoutError for an array that lies elsewhere.
    """
    if hasattr(array, "data_ptr"):
        if str(array.device) != "cpu" and not on_device:
            raise LayoutError(f"a pool on {array.device} needs device=; this one has none")
        item = int(array.element_size())
        strides = tuple(int(step) * item for step in array.stride())
        return ArrayView(int(array.data_ptr()), tuple(array.shape), strides, item)
    if on_device and hasattr(array, "__cuda_array_interface__"):
        strides = tuple(int(step) for step in array.strides)
        return ArrayView(int(array.data.ptr), tuple(array.shape), strides, int(array.itemsize))
    if isinstance(array, np.ndarray):
        return ArrayView(array.ctypes.data, array.shape, array.strides, array.itemsize)
    raise LayoutError(f"a pool takes NumPy arrays or torch tensors, not {type(array).__name__}")


def _rows(view: ArrayView, run: int) -> tuple[int, int, int]:
    """A page of an array as (rows, bytes in a row, stride of rows): at most one gap level."""
    row_bytes, count, stride = view.item_bytes, 1, 0
    for size, step in zip(reversed(view.shape[1:]), reversed(view.strides[1:]), strict=True):
        if size == 1:
            continue
        if count == 1 and step == row_bytes:
            row_bytes *= size
        elif count == 1:
            count, stride = size, step
        elif step == stride * count:
            count *= size
        else:
            raise LayoutError(
                f"a page of array {run} is scattered over more than one stride; "
                "give the engine's own contiguous view of each run"
            )
    if stride < 0 or view.strides[0] < 0:
        raise LayoutError(f"array {run} has negative strides; give it in memory order")
    return count, row_bytes, stride


def _address(buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([buffer.ctypes.data], np.uint64)


def _page_bytes(array: Any, page: int) -> bytes:
    piece = array[page]
    if hasattr(piece, "data_ptr"):
        whole = piece.contiguous().cpu()  # a torch tensor; read without importing torch
        return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
    if hasattr(piece, "get"):
        piece = piece.get()  # a CuPy array, likewise
    return bytes(np.ascontiguousarray(piece).tobytes())
