"""Cases for every kernel: inputs, the launch, and what a plain form in float64 says it must give.

The same cases run on the CPU through the shim and on a GPU. Inputs are rounded to the kernel's type
first, and the reference starts from the rounded ones. Each case is a name and a function of
(device, scheduling seed); it raises AssertionError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.cuda.kernel_table import COPY_THREADS, UNIT_BYTES

Array = npt.NDArray[Any]
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}  # of the largest value of the reference


class Device(Protocol):
    """Where a case runs: host arrays in, host arrays out."""

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end. Arrays are changed in place."""

    def place(self, array: Array) -> int:
        """The address at which the next launch finds an array that it is given no argument for."""


@dataclass(frozen=True)
class Case:
    """One case: a kernel, its inputs, and what must come out."""

    name: str
    run: Callable[[Device, int], None]


# ---- numbers of 16 bits, which NumPy has not all ------------------------------------------------


def rounded(values: Array, dtype: str) -> Array:
    """fp32 values as the kernel's type; bf16 as uint16."""
    if dtype == "fp32":
        return values.astype(np.float32)
    if dtype == "fp16":
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def exact(values: Array, dtype: str) -> npt.NDArray[np.float64]:
    """What such numbers are."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def assert_near(got: Array, wanted: Array, dtype: str) -> None:
    """max |error| / max |reference| is within the tolerance of the type."""
    error = np.abs(exact(got, dtype) - wanted).max(initial=0.0)
    most = np.abs(wanted).max(initial=0.0)
    assert np.isfinite(exact(got, dtype)).all(), "not a number"
    assert error <= TOLERANCE[dtype] * max(most, 1e-30), f"error {error:.3g} of {most:.3g}"


# ---- gather and scatter -------------------------------------------------------------------------


@dataclass(frozen=True)
class CopyShape:
    """A pool and payloads. runs: (rows, row_bytes, bytes between rows, between pages)."""

    runs: tuple[tuple[int, int, int, int], ...]
    pages_per_block: int = 1
    blocks: int = 3
    first_run: int = 0
    last_run: int | None = None
    skip_pages: int = 0
    bad_place: int | None = None
    grid: int = 2


def run_copy(shape: CopyShape, gathers: bool, device: Device, seed: int) -> None:
    rng = np.random.default_rng(len(shape.runs) * 1000 + shape.blocks)
    pool_pages, last = 11, shape.last_run or len(shape.runs)
    pools = [
        rng.integers(0, 256, pool_pages * (rows * (row_bytes + gap) + apart), np.uint8)
        for rows, row_bytes, gap, apart in shape.runs
    ]
    pieces = [rows * row_bytes for rows, row_bytes, _, _ in shape.runs]
    offsets = np.cumsum([0, *(piece * shape.pages_per_block for piece in pieces)])
    table = np.array(
        [
            (device.place(pool), rows * (size + gap) + apart, rows, size, size + gap, offset)
            for pool, (rows, size, gap, apart), offset in zip(
                pools, shape.runs, offsets[:-1].tolist(), strict=True
            )
        ],
        np.int64,
    )
    units = [
        shape.pages_per_block * rows * -(-size // UNIT_BYTES) for rows, size, _, _ in shape.runs
    ]
    first_unit = np.cumsum([0, *units]).astype(np.int32)
    payloads = [rng.integers(0, 256, int(offsets[-1]), np.uint8) for _ in range(shape.blocks)]
    pages = rng.permutation(pool_pages)[: shape.blocks * shape.pages_per_block].astype(np.int32)
    if shape.bad_place is not None:
        pages[shape.bad_place] = (-1, pool_pages, 1 << 30)[shape.bad_place % 3]
    wanted_pools, wanted_payloads = [p.copy() for p in pools], [p.copy() for p in payloads]
    for place, page in enumerate(pages.tolist()):
        block, nth = divmod(place, shape.pages_per_block)
        if not 0 <= page < pool_pages or (block == 0 and nth < shape.skip_pages):
            continue
        for run in range(shape.first_run, last):
            rows, size, gap, apart = shape.runs[run]
            for row in range(rows):
                at = page * (rows * (size + gap) + apart) + row * (size + gap)
                to = int(offsets[run]) + nth * pieces[run] + row * size
                if gathers:
                    wanted_payloads[block][to : to + size] = pools[run][at : at + size]
                else:
                    wanted_pools[run][at : at + size] = payloads[block][to : to + size]
    error = np.zeros(1, np.int32)
    addresses = np.array([device.place(p) for p in payloads], np.uint64)
    device.launch(
        "gather_pages" if gathers else "scatter_pages",
        (shape.grid,),
        COPY_THREADS,
        [
            *(table, first_unit, pages, addresses, error, shape.blocks, shape.pages_per_block),
            *(shape.first_run, last, pool_pages, shape.skip_pages),
        ],
        seed=seed,
    )
    assert int(error[0]) == (0 if shape.bad_place is None else 1 + shape.bad_place)
    for got, wanted in zip([*pools, *payloads], [*wanted_pools, *wanted_payloads], strict=True):
        np.testing.assert_array_equal(got, wanted)


def copy_cases() -> list[Case]:
    shapes: dict[str, CopyShape] = {}
    for size in (1, 3, 16, 20, 48, 496, 512, 528, 2048, 4096, 4112, 9000):
        shapes[f"row{size}"] = CopyShape(((1, size, 0, 0),) * 3)
        shapes[f"rows3x{size}"] = CopyShape(((3, size, 16, 32), (2, size, 0, 0)), 2, 2)
    shapes["heads"] = CopyShape(((8, 256, 0, 0),) * 4, 3, 2)
    shapes["range"] = CopyShape(((1, 700, 0, 4),) * 6, 1, 4, first_run=2, last_run=5)
    shapes["mixed"] = CopyShape(((1, 9216, 0, 0), (4, 132, 0, 0), (1, 7, 0, 1)), 2, 3)
    shapes["skip"] = CopyShape(((1, 1024, 0, 0),) * 2, 4, 2, skip_pages=3)
    shapes["many_runs"] = CopyShape(((1, 64, 0, 0),) * 61, 1, 3)
    shapes["one_warp_each"] = CopyShape(((1, 5000, 0, 0),) * 5, 2, 3, grid=7)
    for place in range(4):
        shapes[f"bad_page{place}"] = CopyShape(((1, 528, 0, 0),) * 2, 2, 3, bad_place=place)
    made = []
    for name, shape in shapes.items():
        for which, gathers in (("gather", True), ("scatter", False)):

            def run(device: Device, seed: int, shape: Any = shape, gathers: Any = gathers) -> None:
                run_copy(shape, gathers, device, seed)

            made.append(Case(f"{which}-{name}", run))
    return made


# ---- rotary embedding and the write into pages ---------------------------------------------------


@dataclass(frozen=True)
class RopeShape:
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    page_tokens: int = 4
    heads_first: bool = False
    bad: bool = False


def run_rope(shape: RopeShape, device: Device, seed: int) -> None:
    rng = np.random.default_rng(shape.head_dim + shape.heads)
    tokens, pool_pages, d, kv = 5, 6, shape.head_dim, shape.kv_heads
    mixed = rounded(rng.standard_normal((tokens, shape.heads + 2 * kv, d)), shape.dtype)
    angles = rng.uniform(0, 6, (32, shape.rotary_dim // 2))
    rotary = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    positions = rng.integers(0, 32, tokens).astype(np.int32)
    slots = rng.permutation(pool_pages * shape.page_tokens)[:tokens].astype(np.int64)
    slots[1] = -1  # padding
    if shape.bad:
        slots[3] = pool_pages * shape.page_tokens
    order = (pool_pages, kv, shape.page_tokens, d)
    order = order if shape.heads_first else (pool_pages, shape.page_tokens, kv, d)
    pools = [rounded(rng.standard_normal(order), shape.dtype) for _ in range(2)]
    seen = [p.transpose(0, 2, 1, 3) if shape.heads_first else p for p in pools]
    wanted_pools = [exact(p, shape.dtype) for p in seen]
    wanted = exact(mixed, shape.dtype)
    half = shape.rotary_dim // 2
    pairs = np.arange(half)
    first = 2 * pairs if shape.interleaved else pairs
    second = first + 1 if shape.interleaved else pairs + half
    cosines = exact(rotary[positions], "fp32")[:, None, :half]
    sines = exact(rotary[positions], "fp32")[:, None, half:]
    turned = wanted.copy()
    part = wanted[:, : shape.heads + kv]
    turned[:, : shape.heads + kv, first] = part[..., first] * cosines - part[..., second] * sines
    turned[:, : shape.heads + kv, second] = part[..., second] * cosines + part[..., first] * sines
    wanted[:, : shape.heads] = turned[:, : shape.heads]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < pool_pages * shape.page_tokens:
            page, place = divmod(slot, shape.page_tokens)
            wanted_pools[0][page, place] = turned[token, shape.heads : shape.heads + kv]
            wanted_pools[1][page, place] = turned[token, shape.heads + kv :]
    error = np.zeros(1, np.int32)
    strides = [seen[0].strides[axis] // seen[0].itemsize for axis in (0, 1, 2)]
    device.launch(
        f"rope_write_{shape.dtype}",
        (tokens,),
        64,
        [
            *(mixed, rotary, positions, slots, *pools, error, *strides, *strides),
            *(shape.heads, kv, d, shape.rotary_dim, int(shape.interleaved)),
            *(shape.page_tokens, pool_pages),
        ],
        seed=seed,
    )
    assert int(error[0]) == (4 if shape.bad else 0)
    assert_near(mixed, wanted, shape.dtype)
    for got, pool in zip(seen, wanted_pools, strict=True):
        assert_near(got, pool, shape.dtype)


def rope_cases() -> list[Case]:
    shapes = [
        RopeShape(dtype, heads, kv, d, rotary, interleaved, page, heads_first)
        for dtype in ("bf16", "fp16", "fp32")
        for heads, kv, d, rotary, interleaved, page, heads_first in (
            (3, 1, 64, 64, False, 4, False),
            (4, 4, 80, 80, False, 16, True),
            (4, 2, 96, 48, False, 3, False),
            (2, 1, 128, 128, True, 4, True),
            (6, 2, 128, 64, True, 1, False),
            (2, 2, 256, 256, False, 2, False),
        )
    ]
    shapes += [RopeShape("bf16", 2, 1, 64, 64, bad=True), RopeShape("fp32", 1, 1, 64, 32, bad=True)]
    made = []
    for number, shape in enumerate(shapes):

        def run(device: Device, seed: int, shape: RopeShape = shape) -> None:
            run_rope(shape, device, seed)

        made.append(Case(f"rope-{shape.dtype}-{shape.head_dim}-{number}", run))
    return made
