"""Paged attention of one new token a sequence, against the memory bandwidth of the same run."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu.bandwidth import limits
from bench.gpu.place import Place
from bench.gpu.results import Figure
from kvstore.cuda.kernel_table import DECODE_THREADS, TILE_ROWS, decode_shared_bytes
from kvstore.runtime.paged_kernels import split_context

PAGE_TOKENS = 16
LAUNCHES = 10


@dataclass(frozen=True)
class Shape:
    """goal: the least fraction of the bandwidth, in words."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    goal: str = ""

    @property
    def kv_bytes(self) -> int:
        """Keys and values that one launch reads."""
        item = 4 if self.dtype == "fp32" else 2
        return 2 * item * self.batch * self.context * self.kv_heads * self.head_dim


SHAPES = (
    Shape(64, 8192, 64, 8, 128, goal="0.80"),
    Shape(64, 8192, 32, 8, 128),
    Shape(64, 8192, 32, 32, 128, "fp16"),
    Shape(1, 131072, 32, 8, 128),
    Shape(256, 1024, 32, 8, 128),
    Shape(64, 8192, 9, 3, 64),
)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def decode(place: Place) -> list[Figure]:
    """The best of a few ways to split a context, and the runtime's own choice."""
    figures = []
    limit = 2 * limits(place).device  # A copy reads and writes each byte.
    for shape in place.pick(SHAPES, (Shape(2, 64, 4, 1, 64),)):
        across = shape.kv_heads * -(-(shape.heads // shape.kv_heads) // TILE_ROWS[shape.dtype])
        own = split_context(shape.context, across * shape.batch, place.compute.processors)
        tried = {own[1]}
        tried |= {tokens for tokens in (512, 1024, 2048) if tokens < shape.context}
        speeds = {tokens: _fraction(place, shape, tokens, limit) for tokens in sorted(tried)}
        words = ", ".join(f"{speed:.3f} by {tokens}" for tokens, speed in speeds.items())
        name = (
            f"decode batch {shape.batch}, {shape.context} tokens, {shape.heads}:{shape.kv_heads} "
            f"heads of {shape.head_dim}, {shape.dtype}, of the memory bandwidth"
        )
        figures.append(Figure(name, round(speeds[own[1]], 3), words, shape.goal))
    return figures


def _fraction(place: Place, shape: Shape, split_tokens: int, limit: float) -> float:
    arguments, launch = _prepare(place, shape, split_tokens)
    stream = place.device.stream("compute")
    count = place.pick(LAUNCHES, 1)

    def queue() -> None:
        for _ in range(count):
            launch()

    seconds = place.seconds(stream, queue, 3) / count
    del arguments
    return shape.kv_bytes / seconds / limit


def _prepare(place: Place, shape: Shape, split_tokens: int) -> tuple[list[Any], Any]:
    """Tensors on the device, and what queues one step: the parts, and their sum."""
    where, kind = place.compute.tensors, TYPES[shape.dtype]
    per_sequence = -(-shape.context // PAGE_TOKENS)
    pages, d, splits = shape.batch * per_sequence, shape.head_dim, -(-shape.context // split_tokens)
    with place.compute.active():
        generator = torch.Generator(where).manual_seed(5)
        pools = [
            torch.empty(pages, PAGE_TOKENS, shape.kv_heads, d, dtype=kind, device=where)
            for _ in range(2)
        ]
        q = torch.empty(shape.batch, shape.heads, d, dtype=kind, device=where)
        for tensor in (*pools, q):
            tensor.normal_(generator=generator)
        order = torch.from_numpy(np.random.default_rng(2).permutation(pages).astype(np.int32))
        table = order.reshape(shape.batch, per_sequence).to(where)
        lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=where)
        rows = shape.batch * shape.heads
        partial = torch.empty(rows, splits, d, device=where)
        sums = torch.empty(rows, splits, 2, device=where)
        output = torch.empty_like(q)
        error = torch.zeros(1, dtype=torch.int32, device=where)
    strides = [*pools[0].stride()[:3], *pools[1].stride()[:3]]
    across = shape.kv_heads * -(-(shape.heads // shape.kv_heads) // TILE_ROWS[shape.dtype])
    arguments = [
        *(q, *pools, table, lengths, partial, sums, output, error, shape.heads * d, *strides),
        *(shape.heads, shape.kv_heads, 1, PAGE_TOKENS, per_sequence, pages),
        *(split_tokens, 0, d**-0.5),
    ]

    def launch() -> None:
        place.compute.launch(
            f"decode_{shape.dtype}_{d}",
            (splits, across, shape.batch),
            DECODE_THREADS,
            arguments,
            shared_bytes=decode_shared_bytes(shape.dtype, d),
        )
        if splits > 1:
            last = [partial, sums, output, splits, d]
            place.compute.launch(f"combine_{shape.dtype}", (rows,), 128, last)

    return arguments, launch
