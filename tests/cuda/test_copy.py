"""Gather and scatter move exactly the bytes the table names, and nothing else."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cuda.copy import RunTable, gather, scatter
from kvstore.native import build

Bytes = npt.NDArray[np.uint8]
GUARD = 64  # bytes around each payload that must not change


def int64s(values: Any) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Pool:
    """An engine's pages in one piece of memory, and what the copies of it must give."""

    memory: Bytes
    starts: tuple[int, ...]  # where page 0 of each run lies in memory
    table: RunTable
    pages_per_block: int

    @property
    def payload_bytes(self) -> int:
        return int((self.table.piece_bytes * self.pages_per_block).sum())

    def places(self, run: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where in memory each byte of a block's run lies, in payload order."""
        t = self.table
        page = self.starts[run] + ids * t.page_stride[run]
        rows = np.arange(t.rows[run]) * t.row_stride[run]
        places = page[:, None, None] + rows[:, None] + np.arange(t.row_bytes[run])
        return np.asarray(places.reshape(-1), np.int64)

    def payload(self, ids: npt.NDArray[np.int64]) -> Bytes:
        places = [self.places(run, ids) for run in range(self.table.runs)]
        return self.memory[np.concatenate(places)]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    pages, per_block = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    shapes, at = [], draw(st.integers(0, 7))
    for _ in range(draw(st.integers(1, 7))):
        rows, row_bytes = draw(st.integers(1, 5)), draw(st.integers(1, 700))
        gap, page_gap = draw(st.integers(0, 33)), draw(st.integers(0, 99))
        if draw(st.booleans()):  # page after page, its rows inside it
            row_stride = row_bytes + gap
            page_stride = rows * row_stride + page_gap
        else:  # a row of all pages after the other, as [heads][pages][tokens] lies
            page_stride = row_bytes + gap
            row_stride = pages * page_stride + page_gap
        shapes.append((at, page_stride, rows, row_bytes, row_stride))
        at += (pages - 1) * page_stride + (rows - 1) * row_stride + row_bytes
        at += draw(st.integers(0, 65))
    memory = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, at).astype(np.uint8)
    columns = [int64s(column) for column in zip(*shapes, strict=True)]
    starts, page_strides, rows_, row_sizes, row_strides = columns
    ends = np.cumsum(rows_ * row_sizes * per_block)
    base = (starts + memory.ctypes.data).astype(np.uint64)
    offsets = int64s([0, *ends[:-1]])
    table = RunTable(base, page_strides, rows_, row_sizes, row_strides, offsets, pages)
    return Pool(memory, tuple(starts.tolist()), table, per_block)


def landing(blocks: int, payload_bytes: int) -> tuple[Bytes, npt.NDArray[np.uint64]]:
    """Room for payloads with guards around each: uint8 [blocks, ...] and the addresses."""
    arena = np.full((blocks, payload_bytes + 2 * GUARD), 0xEE, np.uint8)
    rows = np.arange(blocks) * arena.shape[1] + arena.ctypes.data + GUARD
    return arena, rows.astype(np.uint64)


def draw_blocks(data: st.DataObject, pool: Pool) -> npt.NDArray[np.int64]:
    """Page ids of some blocks, no page twice: int64 [n, pages_per_block]."""
    order = data.draw(st.permutations(range(pool.table.pages)))
    count = len(order) // pool.pages_per_block
    return int64s(order[: count * pool.pages_per_block]).reshape(count, pool.pages_per_block)


@settings(max_examples=60, deadline=None)
@given(pool=pools(), data=st.data())
@pytest.mark.parametrize("fallback", [False, True])
def test_gather_gives_the_pages_bytes_and_their_checksums(
    fallback: bool, pool: Pool, data: st.DataObject
) -> None:
    ids, before = draw_blocks(data, pool), pool.memory.copy()
    arena, payloads = landing(len(ids), pool.payload_bytes)
    checksums = np.zeros((len(ids), pool.table.runs), np.uint64)
    call_gather(fallback, pool.table, ids, payloads, checksums)
    offsets = [*pool.table.payload_offset.tolist(), pool.payload_bytes]
    for block in range(len(ids)):
        found = arena[block, GUARD:-GUARD]
        assert np.array_equal(found, pool.payload(ids[block]))
        for run in range(pool.table.runs):
            piece = found[offsets[run] : offsets[run + 1]]
            assert xxhash.xxh3_64_intdigest(piece) == checksums[block, run]
    assert (arena[:, :GUARD] == 0xEE).all() and (arena[:, -GUARD:] == 0xEE).all()
    assert np.array_equal(pool.memory, before)
    again, payloads = landing(len(ids), pool.payload_bytes)
    call_gather(fallback, pool.table, ids, payloads, None)
    assert np.array_equal(again, arena)


@settings(max_examples=60, deadline=None)
@given(pool=pools(), data=st.data())
@pytest.mark.parametrize("fallback", [False, True])
def test_scatter_writes_the_named_runs_of_the_named_pages_only(
    fallback: bool, pool: Pool, data: st.DataObject
) -> None:
    ids = draw_blocks(data, pool)
    first = data.draw(st.integers(0, pool.table.runs))
    last = data.draw(st.integers(first, pool.table.runs))
    arena, payloads = landing(len(ids), pool.payload_bytes)
    gather(pool.table, ids, payloads, None)
    original = pool.memory.copy()
    pool.memory[:] = ~original
    expected = ~original
    for block in ids:
        for run in range(first, last):
            expected[pool.places(run, block)] = original[pool.places(run, block)]
    kept = arena.copy()
    call_scatter(fallback, pool.table, ids, payloads, first, last)
    assert np.array_equal(pool.memory, expected)
    assert np.array_equal(arena, kept)


def call_gather(fallback: bool, table: RunTable, *arguments: Any) -> None:
    if fallback:
        with build.forced_fallback():
            gather(table, *arguments)
    else:
        gather(table, *arguments)


def call_scatter(fallback: bool, table: RunTable, *arguments: Any) -> None:
    if fallback:
        with build.forced_fallback():
            scatter(table, *arguments)
    else:
        scatter(table, *arguments)


def simple_pool(runs: int = 4, piece: int = 3000, pages: int = 8) -> Pool:
    memory = np.random.default_rng(5).integers(0, 256, runs * piece * pages).astype(np.uint8)
    starts = np.arange(runs) * piece * pages
    same = np.ones(runs, np.int64)
    base = (starts + memory.ctypes.data).astype(np.uint64)
    table = RunTable(
        base, same * piece, same, same * piece, same * piece, int64s(range(runs)) * piece, pages
    )
    return Pool(memory, tuple(starts.tolist()), table, 1)


def test_layer_by_layer_is_the_same_as_all_at_once(form: str) -> None:
    pool, ids = simple_pool(), int64s([[6], [1], [3]])
    _, payloads = landing(3, pool.payload_bytes)
    gather(pool.table, ids, payloads, None)
    original = pool.memory.copy()
    pool.memory[:] = 0
    scatter(pool.table, ids, payloads)
    at_once = pool.memory.copy()
    pool.memory[:] = 0
    for run in range(0, 4, 2):
        scatter(pool.table, ids, payloads, run, run + 2)
    assert np.array_equal(pool.memory, at_once)
    for page in (6, 1, 3):
        assert np.array_equal(pool.payload(int64s([page])), original[pool_places(pool, page)])
    assert not pool.payload(int64s([0])).any()


def pool_places(pool: Pool, page: int) -> npt.NDArray[np.int64]:
    return np.concatenate([pool.places(run, int64s([page])) for run in range(pool.table.runs)])


def test_a_run_larger_than_any_cache_has_the_standard_checksum(form: str) -> None:
    pool = simple_pool(runs=1, piece=(3 << 20) + 1, pages=3)
    arena, payloads = landing(1, 3 * pool.payload_bytes)
    checksums = np.zeros((1, 1), np.uint64)
    gather(pool.table, int64s([[2, 0, 1]]), payloads, checksums)
    assert xxhash.xxh3_64_intdigest(arena[0, GUARD:-GUARD]) == checksums[0, 0]


@pytest.mark.parametrize("bad", [-1, 8, 2**62, -(2**63)])
def test_a_page_outside_the_pool_is_refused_before_any_byte_moves(form: str, bad: int) -> None:
    pool, ids = simple_pool(), int64s([[1], [2], [bad]])
    arena, payloads = landing(3, pool.payload_bytes)
    before = pool.memory.copy()
    with pytest.raises(ValueError, match=r"0\.\.7"):
        gather(pool.table, ids, payloads, None)
    assert (arena == 0xEE).all()
    with pytest.raises(ValueError, match=r"0\.\.7"):
        scatter(pool.table, ids, payloads)
    assert np.array_equal(pool.memory, before)


def test_arrays_of_another_form_are_refused(form: str) -> None:
    pool, ids = simple_pool(), int64s([[1], [2]])
    arena, payloads = landing(2, pool.payload_bytes)
    sums = np.zeros((2, 4), np.uint64)
    wrong: list[tuple[Any, Any, Any]] = [
        (ids.astype(np.int32), payloads, sums),
        (ids[:, 0], payloads, sums),
        (ids[:, :0], payloads, sums),
        (np.repeat(ids, 2, axis=1)[:, ::2], payloads, sums),
        (ids, payloads[:1], sums),
        (ids, payloads.astype(np.int64), sums),
        (ids, np.repeat(payloads, 2)[::2], sums),
        (ids, payloads, sums[:, :3]),
        (ids, payloads, sums.astype(np.int64)),
        (ids, payloads, np.zeros((4, 2), np.uint64).T),
    ]
    for pages, addresses, checksums in wrong:
        with pytest.raises(ValueError):
            gather(pool.table, pages, addresses, checksums)
    for first, last in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="runs"):
            scatter(pool.table, ids, payloads, first, last)
    assert (arena == 0xEE).all()


def test_no_blocks_and_no_runs_are_nothing_to_do(form: str) -> None:
    pool = simple_pool()
    before = pool.memory.copy()
    none = np.zeros((0, 1), np.int64)
    gather(pool.table, none, np.zeros(0, np.uint64), np.zeros((0, 4), np.uint64))
    scatter(pool.table, none, np.zeros(0, np.uint64))
    _, payloads = landing(1, pool.payload_bytes)
    scatter(pool.table, int64s([[0]]), payloads, 2, 2)
    assert np.array_equal(pool.memory, before)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": int64s([0] * 4)},
        {"row_bytes": int64s([0] * 4)},
        {"rows": int64s([2] * 4), "row_stride": int64s([2999] * 4)},
        {"page_stride": int64s([2999] * 4)},
        {"page_stride": int64s([-3000] * 4)},
        {"payload_offset": int64s([-1] * 4)},
        {"rows": int64s([1] * 3)},
        {"rows": np.ones(4, np.int32)},
        {"base": np.ones(4, np.int64)},
        {"rows": np.ones(8, np.int64)[::2]},
        {"pages": 0},
    ],
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(simple_pool().table, **change)
