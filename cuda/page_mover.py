"""Blocks between the pages of a device and payloads in pinned host memory, asynchronously.

Three ways lead from pages to payloads, and back:

    COPIES  the copy engine, one copy for each piece of a page, neighbours merged
    DIRECT  a kernel that reads or writes the host's memory itself
    STAGED  a kernel between pages and a staging buffer, and one copy for each block

Large pieces go by COPIES, small ones by a kernel; which is the faster one depends on the GPU and is
measured (calibration.py). All three move the same bytes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.cuda.copy import RunTable
from kvstore.cuda.device import Buffer, Device, DeviceError, Event, Span, Stream, UInt64s
from kvstore.cuda.kernel_table import COPY_THREADS, UNIT_BYTES

Int64s = npt.NDArray[np.int64]

BLOCKS_MAX = 64  # of one call to a kernel; more go in several
RING = 4  # calls whose arguments, and staging, may be under way at a time
GRID = 16  # blocks of threads of a copy kernel: few, so that the engine keeps its processors
COPIES_FROM_BYTES = (
    32 << 10
)  # Pieces of this size go by COPIES unless a calibration says otherwise.


class Method(StrEnum):
    """How bytes get there."""

    COPIES = "copies"
    DIRECT = "direct"
    STAGED = "staged"


@dataclass
class _Place:
    """Room for one call's arguments, and, when it is staged, for its blocks."""

    pinned: Buffer
    arguments: Buffer
    staging: Buffer | None = None
    ended: Event | None = None


class PageMover:
    """Moves blocks of one pool. Thread-safe; a call waits only when RING calls are under way.

    table: addresses in the device's memory. method: None chooses by the size of the pieces.
    """

    def __init__(
        self,
        device: Device,
        table: RunTable,
        pages_per_block: int,
        *,
        method: Method | None = None,
        grid: int = GRID,
    ) -> None:
        self.device = device
        self.table = table
        self.pages_per_block = pages_per_block
        self.payload_bytes = int((table.payload_offset + table.piece_bytes * pages_per_block).max())
        self.error = device.allocate_pinned(4)
        self.error.view()[:] = 0
        self._method = method or choose(int(table.row_bytes.min()))
        self._grid = grid
        self._pieces = _expand(table)
        units = pages_per_block * table.rows * -(-table.row_bytes // UNIT_BYTES)
        self._first_unit = np.concatenate([[0], np.cumsum(units)]).astype(np.int32)
        runs = [table.base.view(np.int64), table.page_stride, table.rows, table.row_bytes]
        shape = np.stack([*runs, table.row_stride, table.payload_offset], 1)
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._next = 0
        self._fixed = self._upload(np.ascontiguousarray(shape), self._first_unit)

    def gather(self, stream: Stream, pages: Int64s, payloads: UInt64s) -> None:
        """Queue copies of n blocks from pages [n, pages_per_block] to payloads uint64 [n]."""
        self._move(stream, pages, payloads, (0, self.table.runs), 0, gathers=True)

    def scatter(
        self,
        stream: Stream,
        pages: Int64s,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int = 0,
    ) -> None:
        """Queue copies of runs first..last-1 of n blocks from payloads to pages.

        skip_pages: pages of the first block that are not touched.
        """
        self._move(stream, pages, payloads, runs, skip_pages, gathers=False)

    def refuse_bad_page(self) -> None:
        """Raise DeviceError if a kernel met a page that is not in the pool: misuse, found late."""
        bad = int(self.error.view().view(np.int32)[0])
        if bad:
            raise DeviceError(f"a copy was given a page beyond the pool, at place {bad - 1}")

    def close(self) -> None:
        """Free what it holds. Nothing of it may be under way."""
        for place in self._places:
            for buffer in (place.pinned, place.arguments, place.staging):
                if buffer is not None:
                    buffer.free()
        self._fixed.free()
        self.error.free()

    # --- inside

    def _move(
        self,
        stream: Stream,
        pages: Int64s,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int,
        *,
        gathers: bool,
    ) -> None:
        self._refuse_bad(pages, payloads)
        for first in range(0, len(pages), BLOCKS_MAX):
            part = slice(first, first + BLOCKS_MAX)
            skip = skip_pages if first == 0 else 0
            if self._method is Method.COPIES:
                self._copy(stream, pages[part], payloads[part], runs, skip, gathers)
            else:
                with self._lock:
                    self._launch(stream, pages[part], payloads[part], runs, skip, gathers)

    def _refuse_bad(self, pages: Int64s, payloads: UInt64s) -> None:
        if pages.dtype != np.int64 or pages.shape != (len(payloads), self.pages_per_block):
            raise ValueError(f"pages must be int64 [blocks, {self.pages_per_block}]")
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.table.pages:
            raise ValueError(f"page ids must lie in 0..{self.table.pages - 1}")

    def _addresses(
        self,
        pages: Int64s,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int,
    ) -> tuple[UInt64s, UInt64s, UInt64s]:
        """(in pages, in payloads, sizes) of every piece, neighbours in both merged."""
        run, base, stride, offset, step, size = self._pieces
        chosen = (run >= runs[0]) & (run < runs[1])
        base, stride, offset, step, size = (
            column[chosen][None, :, None] for column in (base, stride, offset, step, size)
        )
        nth = np.arange(self.pages_per_block)[None, None, :]
        in_pages = base + pages[:, None, :] * stride
        in_payloads = payloads.view(np.int64)[:, None, None] + offset + nth * step
        sizes = np.broadcast_to(size, in_pages.shape).copy()
        if skip_pages:
            sizes[0, :, :skip_pages] = 0
        some = sizes.reshape(-1) > 0
        return _merged(in_pages.reshape(-1)[some], in_payloads.reshape(-1)[some], sizes[sizes > 0])

    def _copy(
        self,
        stream: Stream,
        pages: Int64s,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip: int,
        gathers: bool,
    ) -> None:
        there, here, sizes = self._addresses(pages, payloads, runs, skip)
        if len(sizes):
            targets, sources = (here, there) if gathers else (there, here)
            self.device.copy(stream, targets, sources, sizes)

    def _launch(
        self,
        stream: Stream,
        pages: Int64s,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip: int,
        gathers: bool,
    ) -> None:
        place, count = self._place(), len(pages)
        staged = self._method is Method.STAGED and runs == (0, self.table.runs) and not skip
        at = payloads
        if staged:
            assert place.staging is not None
            at = place.staging.address + self.payload_bytes * np.arange(count, dtype=np.uint64)
            sizes = np.full(count, self.payload_bytes, np.uint64)
            if not gathers:
                self.device.copy(stream, at, payloads, sizes)
        arguments = np.concatenate([at.view(np.uint8), _bytes(pages.astype(np.int32))])
        place.pinned.view()[: len(arguments)] = arguments
        self.device.copy(
            stream,
            _one(place.arguments.address),
            _one(place.pinned.address),
            _one(len(arguments)),
        )

        def spans() -> Sequence[Span]:
            there, here, sizes = self._addresses(pages, at, runs, skip)
            touched = [Span(place.arguments.address, len(arguments), False)]
            touched.append(Span(self._fixed.address, self._fixed.size_bytes, False))
            for page, payload, size in zip(
                there.tolist(), here.tolist(), sizes.tolist(), strict=True
            ):
                touched += [Span(page, size, not gathers), Span(payload, size, gathers)]
            return touched

        fixed, given = self._fixed.address, place.arguments.address
        self.device.launch(
            stream,
            "gather_pages" if gathers else "scatter_pages",
            (self._grid,),
            COPY_THREADS,
            [
                *(fixed, fixed + self.table.runs * 48, given + count * 8, given),
                *(self.error.address, count, self.pages_per_block, *runs, self.table.pages, skip),
            ],
            spans,
        )
        if staged and gathers:
            self.device.copy(stream, payloads, at, sizes)
        place.ended = stream.record()

    def _place(self) -> _Place:
        """Room for a call; waits for the call that had it RING calls ago. Under the lock."""
        if len(self._places) < RING:
            size = BLOCKS_MAX * (8 + 4 * self.pages_per_block)
            staging = None
            if self._method is Method.STAGED:
                staging = self.device.allocate(BLOCKS_MAX * self.payload_bytes)
            self._places.append(
                _Place(self.device.allocate_pinned(size), self.device.allocate(size), staging)
            )
            return self._places[-1]
        place = self._places[self._next]
        self._next = (self._next + 1) % RING
        if place.ended is not None:
            place.ended.wait()
        return place

    def _upload(self, *arrays: npt.NDArray[Any]) -> Buffer:
        """Arrays, one after the other, in the device's memory."""
        data = np.concatenate([_bytes(array) for array in arrays])
        pinned, target = self.device.allocate_pinned(len(data)), self.device.allocate(len(data))
        pinned.view()[:] = data
        stream = self.device.stream("setup")
        self.device.copy(stream, _one(target.address), _one(pinned.address), _one(len(data)))
        stream.record().wait()
        pinned.free()
        return target


def choose(piece_bytes: int) -> Method:
    """The method for pieces of a size, where nothing was measured."""
    return Method.COPIES if piece_bytes >= COPIES_FROM_BYTES else Method.STAGED


def _expand(table: RunTable) -> tuple[Int64s, ...]:
    """One entry for each row of each run: run, base, page stride, offset, step from page to page
    in the payload, bytes."""
    run = np.repeat(np.arange(table.runs), table.rows)
    row = np.arange(len(run)) - np.repeat(np.cumsum(table.rows) - table.rows, table.rows)
    return (
        run,
        table.base.view(np.int64)[run] + row * table.row_stride[run],
        table.page_stride[run],
        table.payload_offset[run] + row * table.row_bytes[run],
        table.piece_bytes[run],
        table.row_bytes[run],
    )


def _merged(first: Int64s, second: Int64s, sizes: Int64s) -> tuple[UInt64s, UInt64s, UInt64s]:
    """Copies that continue the one before in both places become one with it."""
    if not len(sizes):
        none = np.zeros(0, np.uint64)
        return none, none, none
    begins = np.ones(len(sizes), np.bool_)
    begins[1:] = first[1:] != first[:-1] + sizes[:-1]
    begins[1:] |= second[1:] != second[:-1] + sizes[:-1]
    at = np.flatnonzero(begins)
    summed = np.add.reduceat(sizes, at)
    return first[at].astype(np.uint64), second[at].astype(np.uint64), summed.astype(np.uint64)


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _one(value: int) -> UInt64s:
    return np.array([value], np.uint64)
