"""Cases for paged attention: every type and head_dim, groups, windows, splits, layouts of pages."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from kvstore.cuda.kernel_table import (
    DECODE_THREADS,
    DTYPES,
    HEAD_DIMS,
    TILE_ROWS,
    decode_shared_bytes,
)
from support.kernel_cases import Array, Case, Device, assert_near, exact, rounded

# ---- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeShape:
    """layout: order of the axes after the page: "token head", "head token", or "both" (K and V of
    a token beside each other in one array)."""

    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    page_tokens: int = 16
    split_tokens: int = 64
    extra_splits: int = 0
    window: int = 0
    n_q: int = 1
    layout: str = "token head"
    bad: bool = False


def _pools(shape: DecodeShape, rng: np.random.Generator, pages: int) -> tuple[Array, Array]:
    """Keys and values as [page, token, head, d] views of whatever lies in memory."""
    page, kv, d = shape.page_tokens, shape.kv_heads, shape.head_dim
    if shape.layout == "both":
        both = rounded(rng.standard_normal((pages, page, 2, kv, d)), shape.dtype)
        return both[:, :, 0], both[:, :, 1]
    order = (pages, kv, page, d) if shape.layout == "head token" else (pages, page, kv, d)
    made = [rounded(rng.standard_normal(order), shape.dtype) for _ in range(2)]
    if shape.layout == "head token":
        made = [pool.transpose(0, 2, 1, 3) for pool in made]
    return made[0], made[1]


def reference(
    shape: DecodeShape, q: Array, keys: Array, values: Array, table: Array
) -> npt.NDArray[np.float64]:
    """Attention in float64: [sequences, n_q, heads, d]."""
    group, scale = shape.heads // shape.kv_heads, np.float32(shape.head_dim**-0.5)
    wanted = np.zeros((len(shape.lengths), shape.n_q, shape.heads, shape.head_dim))
    for sequence, length in enumerate(shape.lengths):
        where = np.arange(length)
        pages = table[sequence, where // shape.page_tokens]
        k = exact(keys[pages, where % shape.page_tokens], shape.dtype)
        v = exact(values[pages, where % shape.page_tokens], shape.dtype)
        for new in range(shape.n_q):
            stop = length - shape.n_q + new + 1
            start = max(0, stop - shape.window) if shape.window else 0
            if stop <= start:
                continue
            for head in range(shape.heads):
                asked = exact(q[sequence, new, head], shape.dtype)
                scores = k[start:stop, head // group] @ asked * float(scale)
                weights = np.exp(scores - scores.max())
                content = v[start:stop, head // group]
                wanted[sequence, new, head] = weights @ content / weights.sum()
    return wanted


def run_decode(shape: DecodeShape, device: Device, seed: int) -> None:
    rng = np.random.default_rng(sum(shape.lengths) + shape.head_dim)
    count, longest = len(shape.lengths), max(shape.lengths)
    need = [-(-length // shape.page_tokens) for length in shape.lengths]
    pool_pages, stride = sum(need) + 3, max(1, *need)
    keys, values = _pools(shape, rng, pool_pages)
    q = rounded(rng.standard_normal((count, shape.n_q, shape.heads, shape.head_dim)), shape.dtype)
    order, table, at = rng.permutation(pool_pages), np.full((count, stride), -1, np.int32), 0
    for sequence, pages in enumerate(need):
        table[sequence, :pages] = order[at : at + pages]
        at += pages
    wanted = reference(shape, q, keys, values, table)
    if shape.bad:
        table[0, 0] = pool_pages
    span = min(longest, shape.window + shape.n_q - 1) if shape.window else longest
    splits = max(1, -(-span // shape.split_tokens)) + shape.extra_splits
    rows = count * shape.n_q * shape.heads
    partial = np.full((rows, splits, shape.head_dim), np.nan, np.float32)
    sums = np.full((rows, splits, 2), np.nan, np.float32)
    output = rounded(np.full(wanted.shape, np.nan, np.float32), shape.dtype)
    error, tile = np.zeros(1, np.int32), TILE_ROWS[shape.dtype]
    tiles = -(-shape.n_q * (shape.heads // shape.kv_heads) // tile)

    def strides(pool: Array) -> list[int]:
        return [pool.strides[axis] // pool.itemsize for axis in (0, 1, 2)]

    device.launch(
        f"decode_{shape.dtype}_{shape.head_dim}",
        (splits, shape.kv_heads * tiles, count),
        DECODE_THREADS,
        [
            *(q, keys, values, table, np.array(shape.lengths, np.int32), partial, sums, output),
            *(error, shape.heads * shape.head_dim, *strides(keys), *strides(values)),
            *(shape.heads, shape.kv_heads, shape.n_q, shape.page_tokens, stride, pool_pages),
            *(shape.split_tokens, shape.window, shape.head_dim**-0.5),
        ],
        shared_bytes=decode_shared_bytes(shape.dtype, shape.head_dim),
        seed=seed,
    )
    if splits > 1:
        arguments = [partial, sums, output, splits, shape.head_dim]
        device.launch(f"combine_{shape.dtype}", (rows,), 64, arguments, seed=seed)
    assert int(error[0]) == (1 if shape.bad else 0)
    first = 1 if shape.bad else 0
    assert_near(output[first:], wanted[first:], shape.dtype)


def decode_cases() -> list[Case]:
    """About 230 of them."""
    shapes: list[DecodeShape] = []
    lengths = (1, 15, 16, 17, 65, 97)
    for dtype, d in product(DTYPES, HEAD_DIMS):
        plain = DecodeShape(dtype, d, 4, 2, lengths)
        shapes += [
            plain,
            replace(plain, split_tokens=1024),  # one split: this kernel writes the output
            replace(plain, heads=3, kv_heads=3, page_tokens=7, split_tokens=48),  # MHA
            replace(plain, heads=8, kv_heads=1, lengths=(33, 0, 64)),  # MQA, and nothing to see
            replace(plain, heads=9, kv_heads=3, window=20, page_tokens=5),
            replace(plain, layout="head token", extra_splits=2),
            replace(plain, layout="both", page_tokens=1, lengths=(5, 40)),
            replace(plain, n_q=3, lengths=(3, 18, 50)),
            replace(plain, n_q=2, window=9, heads=6, lengths=(2, 31, 40), split_tokens=16),
            replace(plain, heads=8, kv_heads=8, lengths=(70,), page_tokens=64),
            replace(plain, heads=7, kv_heads=1, lengths=(130,), split_tokens=32),
            replace(plain, lengths=(50, 3), bad=True),
        ]
    for dtype in DTYPES:
        plain = DecodeShape(dtype, 64, 20, 1, (40, 7))  # more rows than a tile
        shapes += [plain, replace(plain, n_q=2), replace(plain, heads=33)]
        for page, split in product((1, 3, 16, 64), (16, 80)):
            shapes.append(DecodeShape(dtype, 64, 2, 1, (81, 16), page, split))
        for window in (1, 15, 16, 17, 200):
            shapes.append(DecodeShape(dtype, 80, 2, 2, (60, 17, 4), window=window, split_tokens=32))
    made = []
    for number, shape in enumerate(shapes):

        def run(device: Device, seed: int, shape: DecodeShape = shape) -> None:
            run_decode(shape, device, seed)

        made.append(Case(f"decode-{shape.dtype}-{shape.head_dim}-{number}", run))
    return made
