"""Moving blocks between an engine's pages and contiguous payloads, by a table of runs.

This is the CPU form: pages and payloads are host addresses. Tables hold offsets and strides only,
so a form for a GPU takes the same ones. Native where the compiled helper is there, else NumPy,
with equal bytes and equal checksums.
"""

import ctypes
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.native import build
from kvstore.native.address import address_of

RUNS_MAX = 8192

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class RunTable:
    """Where the runs of a block lie in a pool of pages; one entry a run, in payload order.

    base: uint64 [runs], address of page 0 of each run. page_stride: int64 [runs], bytes from one
    page to the next. rows, row_bytes, row_stride: int64 [runs]; a page's piece of a run is `rows`
    rows of `row_bytes`, `row_stride` bytes apart in the page and adjacent in the payload.
    payload_offset: int64 [runs], where the run starts in a payload; in it the run is its pages'
    pieces one after the other. pages: how many pages the pool has.

    The memory behind the addresses is the caller's and must outlive the table. Raises ValueError
    for arrays of other types or lengths, and for pieces that are empty or would overlap.
    """

    base: UInt64s
    page_stride: Int64s
    rows: Int64s
    row_bytes: Int64s
    row_stride: Int64s
    payload_offset: Int64s
    pages: int

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            array: npt.NDArray[Any] = getattr(self, field.name)
            kind = np.dtype(np.uint64 if field.name == "base" else np.int64)
            if array.dtype != kind or array.shape != self.base.shape or array.ndim != 1:
                raise ValueError(f"{field.name} must be {kind} with one entry a run")
            if not array.flags.c_contiguous:
                raise ValueError(f"{field.name} must be C-contiguous; copy it first")
        if not 1 <= self.runs <= RUNS_MAX or self.pages < 1:
            raise ValueError(f"a run table has 1 to {RUNS_MAX} runs and at least one page")
        if (self.rows < 1).any() or (self.row_bytes < 1).any() or (self.payload_offset < 0).any():
            raise ValueError("every run needs rows, row_bytes >= 1 and payload_offset >= 0")
        if ((self.rows > 1) & (self.row_stride < self.row_bytes)).any():
            raise ValueError("row_stride is below row_bytes: the rows of a page would overlap")
        if self.pages > 1 and (self.page_stride < self.row_bytes).any():
            raise ValueError("page_stride is below row_bytes: the pages would overlap")

    @property
    def runs(self) -> int:
        """How many runs a block has."""
        return len(self.base)

    @property
    def piece_bytes(self) -> Int64s:
        """Bytes of one page's piece of each run: int64 [runs]."""
        return self.rows * self.row_bytes

    @cached_property
    def _addresses(self) -> tuple[ctypes.c_void_p, ...]:
        return tuple(_address(getattr(self, field.name)) for field in fields(self)[:-1])


def gather(table: RunTable, pages: Int64s, payloads: UInt64s, checksums: UInt64s | None) -> None:
    """Copy n blocks from pages into payloads, and take XXH3-64 of each run while it is in cache.

    pages: int64 [n, pages_per_block], page ids. payloads: uint64 [n], addresses with room for a
    whole payload each. checksums: uint64 [n, runs], written; None takes none. The native form
    releases the GIL for the whole call. Never allocates memory that grows with a payload. Raises
    ValueError, before a byte moves, for a page id outside 0..pages-1 or arrays of another form.
    """
    count, pages_per_block = _check(table, pages, payloads)
    if checksums is not None and (
        checksums.dtype != np.uint64
        or checksums.shape != (count, table.runs)
        or not checksums.flags.c_contiguous
    ):
        raise ValueError(f"checksums must be C-contiguous uint64 [{count}, {table.runs}]")
    library = build.load()
    if library is None:
        _gather_plain(table, pages, payloads, checksums)
        return
    library.kv_gather(
        *table._addresses,
        ctypes.c_int64(table.runs),
        _address(pages),
        ctypes.c_int64(count),
        ctypes.c_int64(pages_per_block),
        _address(payloads),
        None if checksums is None else _address(checksums),
    )


def scatter(
    table: RunTable,
    pages: Int64s,
    payloads: UInt64s,
    first_run: int = 0,
    last_run: int | None = None,
) -> None:
    """Copy runs first_run up to, not including, last_run (None: all) of n blocks into pages.

    pages, payloads: as for gather. Verifies nothing: check the payload first. No page may occur
    twice. The native form releases the GIL for the whole call. Raises ValueError, before a byte
    moves, for a page id outside 0..pages-1, a range outside the table, or arrays of another form.
    """
    count, pages_per_block = _check(table, pages, payloads)
    last_run = table.runs if last_run is None else last_run
    if not 0 <= first_run <= last_run <= table.runs:
        raise ValueError(f"runs {first_run}..{last_run} do not lie in 0..{table.runs}")
    library = build.load()
    if library is None:
        _scatter_plain(table, pages, payloads, range(first_run, last_run))
        return
    library.kv_scatter(
        *table._addresses,
        ctypes.c_int64(first_run),
        ctypes.c_int64(last_run),
        _address(pages),
        ctypes.c_int64(count),
        ctypes.c_int64(pages_per_block),
        _address(payloads),
    )


def _check(table: RunTable, pages: Int64s, payloads: UInt64s) -> tuple[int, int]:
    """Returns: (blocks, pages_per_block)."""
    if pages.dtype != np.int64 or pages.ndim != 2 or not pages.flags.c_contiguous:
        raise ValueError("pages must be a C-contiguous int64 array [blocks, pages_per_block]")
    count, pages_per_block = pages.shape
    if payloads.dtype != np.uint64 or payloads.shape != (count,):
        raise ValueError(f"payloads must be uint64 [{count}], one address a block")
    if not payloads.flags.c_contiguous:
        raise ValueError("payloads must be C-contiguous; copy it first")
    if pages_per_block == 0:
        raise ValueError("pages_per_block is zero; a block has at least one page")
    # As uint64 a negative id is a huge one, so a single pass finds both kinds.
    if count and int(pages.view(np.uint64).max()) >= table.pages:
        raise ValueError(f"page ids must lie in 0..{table.pages - 1}")
    return count, pages_per_block


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(array))


def _view(address: int, rows: int, row_bytes: int, row_stride: int) -> npt.NDArray[np.uint8]:
    """Host memory as uint8 [rows, row_bytes], without a copy."""
    span = (rows - 1) * row_stride + row_bytes
    memory = (ctypes.c_uint8 * span).from_address(address)
    strides = (row_stride if rows > 1 else row_bytes, 1)
    return np.ndarray((rows, row_bytes), np.uint8, memoryview(memory), strides=strides)


def _pieces(
    table: RunTable, run: int, ids: list[int], payload: int
) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """(in the page, in the payload) of each page's piece of a run, as views."""
    rows, row_bytes = int(table.rows[run]), int(table.row_bytes[run])
    row_stride, page_stride = int(table.row_stride[run]), int(table.page_stride[run])
    base, start = int(table.base[run]), payload + int(table.payload_offset[run])
    return [
        (
            _view(base + page * page_stride, rows, row_bytes, row_stride),
            _view(start + i * rows * row_bytes, rows, row_bytes, row_bytes),
        )
        for i, page in enumerate(ids)
    ]


def _gather_plain(
    table: RunTable, pages: Int64s, payloads: UInt64s, checksums: UInt64s | None
) -> None:
    for block, (ids, payload) in enumerate(zip(pages.tolist(), payloads.tolist(), strict=True)):
        for run in range(table.runs):
            digest = xxhash.xxh3_64()
            for in_page, in_payload in _pieces(table, run, ids, payload):
                in_payload[:] = in_page
                if checksums is not None:
                    digest.update(in_payload.data)
            if checksums is not None:
                checksums[block, run] = digest.intdigest()


def _scatter_plain(table: RunTable, pages: Int64s, payloads: UInt64s, runs: range) -> None:
    for ids, payload in zip(pages.tolist(), payloads.tolist(), strict=True):
        for run in runs:
            for in_page, in_payload in _pieces(table, run, ids, payload):
                in_page[:] = in_payload
