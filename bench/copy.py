"""CPU time of moving blocks between pages and host memory, beside memcpy of the same bytes.

Bar: saving (gather with checksums) and loading (scatter) take at most
1.5 x memcpy + 20 us a block + 0.7 us a run. Both and memcpy are interleaved, each over memory
that is larger than the caches, every time another block; medians.

usage: python -m bench.copy [--json] [--blocks N]
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvstore.cuda.copy import RunTable, gather, scatter
from kvstore.hashing.checksum import run_checksums
from kvstore.native import build
from kvstore.tiers.layout import Layout

POOL_BYTES = 128 << 20  # of each of four regions: far above the last cache of one core
BLOCKS_MEASURED = 400
PER_CALL = (1, 16)  # blocks in one call: one as it fills, or a prompt's worth
BAR_MEMCPY, BAR_BLOCK_US, BAR_RUN_US = 1.5, 20.0, 0.7
SHAPES = {
    "SmolLM2-135M, 360 KiB": Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"),
    "Llama-3.1-8B, 2 MiB": Layout.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
}


@dataclass(frozen=True)
class Figures:
    """Medians of CPU microseconds a block."""

    shape: str
    block_bytes: int
    runs: int
    blocks_per_call: int
    memcpy_us: float
    gather_us: float
    scatter_us: float
    bar_us: float
    within_bar: bool


class Regions:
    """Pages, payloads, and two plain regions for memcpy, all written once; places rotate."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.blocks = POOL_BYTES // layout.payload_bytes
        size = self.blocks * layout.payload_bytes
        self.pool, self.arena, self.plain_from, self.plain_to = (
            np.full(size, fill, np.uint8) for fill in range(1, 5)
        )
        self.table = page_table(layout, self.pool, self.blocks)
        self.order = np.random.default_rng(0).permutation(self.blocks)

    def blocks_at(self, at: int, count: int) -> npt.NDArray[np.int64]:
        """Another `count` blocks for each `at`, far from those used last."""
        return np.take(self.order, np.arange(at, at + count), mode="wrap").astype(np.int64)

    def payloads(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return (blocks * self.layout.payload_bytes + self.arena.ctypes.data).astype(np.uint64)


def page_table(layout: Layout, pool: npt.NDArray[np.uint8], pages: int) -> RunTable:
    """Every run with pages of its own, one after the other: [pages][tokens][kv_heads][head_dim]."""
    lengths = layout.run_lengths
    return RunTable(
        base=(layout.run_offsets * pages + pool.ctypes.data).astype(np.uint64),
        page_stride=lengths,
        rows=np.ones_like(lengths),
        row_bytes=lengths,
        row_stride=lengths,
        payload_offset=layout.run_offsets,
        pages=pages,
    )


def cpu_us(call: Callable[[], None]) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1000


def measure(name: str, layout: Layout, per_call: int, trials: int) -> Figures:
    regions, size = Regions(layout), layout.payload_bytes
    checksums = np.zeros((per_call, layout.runs), np.uint64)
    from_at, to_at = regions.plain_from.ctypes.data, regions.plain_to.ctypes.data

    def plain(sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            ctypes.memmove(target, source, size)

    times: dict[str, list[float]] = {"memcpy": [], "gather": [], "scatter": []}
    for trial in range(trials):
        at = trial * per_call * 2
        pages = regions.blocks_at(at, per_call)
        other = regions.blocks_at(at + regions.blocks // 2, per_call)
        sources, targets = (pages * size + from_at).tolist(), (other * size + to_at).tolist()
        into, out_of = regions.payloads(other), regions.payloads(pages)
        calls: list[tuple[str, Callable[[], None]]] = [
            ("memcpy", lambda s=sources, t=targets: plain(s, t)),
            ("gather", lambda p=pages, a=into: gather(regions.table, p[:, None], a, checksums)),
            ("scatter", lambda p=other, a=out_of: scatter(regions.table, p[:, None], a)),
        ]
        for step in range(3):  # Each stands first, second and third equally often.
            kind, call = calls[(trial + step) % 3]
            times[kind].append(cpu_us(call) / per_call)
    memcpy, gathered, scattered = (
        float(np.median(times[kind])) for kind in ("memcpy", "gather", "scatter")
    )
    bar = BAR_MEMCPY * memcpy + BAR_BLOCK_US + BAR_RUN_US * layout.runs
    within = max(gathered, scattered) <= bar
    return Figures(name, size, layout.runs, per_call, memcpy, gathered, scattered, bar, within)


def checksum_gb_per_s() -> float:
    """XXH3-64 of runs of 32 KiB that are in cache: the best of many, in GB/s of CPU time."""
    payload = np.arange(1 << 17, dtype=np.uint64).view(np.uint8)
    lengths = np.full(32, 32 << 10, np.int64)
    offsets = np.cumsum(lengths) - lengths
    best = min(cpu_us(lambda: touch(payload, offsets, lengths)) for _ in range(200))
    return len(payload) / best / 1000


def touch(
    payload: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> None:
    run_checksums(payload, offsets, lengths)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.copy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=BLOCKS_MEASURED, help="blocks a figure")
    arguments = parser.parse_args()
    figures = [
        measure(name, layout, per_call, max(3, arguments.blocks // per_call))
        for name, layout in SHAPES.items()
        for per_call in PER_CALL
    ]
    report = {
        "form": "native" if build.load() is not None else "fallback",
        "checksum_gb_per_s": checksum_gb_per_s(),
        "copies": [asdict(figure) for figure in figures],
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{report['form']} form; XXH3-64 in cache {report['checksum_gb_per_s']:.1f} GB/s")
    print("CPU us a block           blocks a call   memcpy   gather  scatter      bar")
    for f in figures:
        times = f"{f.memcpy_us:8.1f} {f.gather_us:8.1f} {f.scatter_us:8.1f} {f.bar_us:8.1f}"
        verdict = "within" if f.within_bar else "ABOVE THE BAR"
        print(f"{f.shape:24} {f.blocks_per_call:13}  {times}  {verdict}")


if __name__ == "__main__":
    main()
