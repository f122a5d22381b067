"""`kvstore verify` beside a plain read of the same files: `python -m bench.verify [--json]`.

The plain side reads the same segment files from front to back with O_DIRECT, 4 MiB at a time, by
one thread and by as many as verify has; it checks nothing. The seconds of verify are all that one
waits for but the interpreter's start: opening and walking the catalogue included. Sides are
interleaved; ratios are medians over rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import kvstore
from kvstore.scrub import THREADS, verify_store
from kvstore.slot_check import SPAN_BYTES
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import Layout

ROUNDS = 5
PROMPT_BLOCKS = 64
SIZES = {
    "360 KiB": Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"),
    "16 KiB": Layout.attention(layers=2, kv_heads=2, head_dim=48, dtype="float16"),
}


def make(directory: Path, layout: Layout, size_bytes: int) -> int:
    """A store with about so many bytes of blocks. Returns: how many bytes they have."""
    random = np.random.default_rng(1)
    pages = [random.integers(0, 256, (PROMPT_BLOCKS, int(n)), np.uint8) for n in layout.run_lengths]
    settings = {"host": "256MiB", "disk_capacity": size_bytes + (512 << 20)}
    with kvstore.open(directory, **settings) as store:
        space = store.namespace(layout, model="m")
        pool = space.pool(pages)
        while store.stats()["tiers"]["disk"]["used_bytes"] < size_bytes:
            for _ in range(4):
                tokens = random.integers(0, 50_000, PROMPT_BLOCKS * 16, dtype=np.int32)
                space.sequence(tokens).save(pool, range(PROMPT_BLOCKS)).result()
            store.flush()
        return int(store.stats()["tiers"]["disk"]["used_bytes"])


def read_plain(directory: Path, threads: int) -> float:
    """Bytes a second of reading every segment file from front to back."""
    io = FileIo()
    begin = time.perf_counter()

    def read(path: Path, first: int, step: int) -> int:
        buffer, done = aligned_buffer(SPAN_BYTES), 0
        fd = io.open(path, direct=io.supports_direct(path.parent))
        try:
            for at in range(first * SPAN_BYTES, io.size(fd), step * SPAN_BYTES):
                done += io.pread(fd, buffer, at)
        finally:
            io.close(fd)
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = 0
        for path in sorted((directory / "disk0").glob("*.seg")):
            done += sum(
                pool.map(read, *zip(*((path, n, threads) for n in range(threads)), strict=True))
            )
    return done / (time.perf_counter() - begin)


def measure(directory: Path, layout: Layout, size_bytes: int) -> dict[str, float]:
    """Rates in bytes a second, and ratios."""
    used = make(directory, layout, size_bytes)
    rates: dict[str, list[float]] = {"verify": [], "plain_1": [], "plain": []}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        found = verify_store(directory)
        rates["verify"].append(found.bytes / (time.perf_counter() - begin))
        if found.bad or found.bytes != used:
            raise SystemExit(f"{found.bytes} of {used} bytes were read, {len(found.bad)} bad")
        rates["plain_1"].append(read_plain(directory, 1))
        rates["plain"].append(read_plain(directory, THREADS))
    pairs = zip(rates["verify"], rates["plain_1"], rates["plain"], strict=True)
    ratios = [(verify / one, verify / many) for verify, one, many in pairs]
    return {
        "bytes": used,
        **{f"{name}_bytes_per_s": statistics.median(values) for name, values in rates.items()},
        "ratio_1": statistics.median(ratio for ratio, _ in ratios),
        "ratio": statistics.median(ratio for _, ratio in ratios),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--bytes", type=int, default=2 << 30, help="of blocks in a store (2 GiB)")
    parser.add_argument("--directory", default=".", help="a directory on the device to measure")
    arguments = parser.parse_args()
    results = {}
    for name, layout in SIZES.items():
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-") as folder:
            results[name] = measure(Path(folder) / "store", layout, arguments.bytes)
    if arguments.json:
        print(json.dumps(results))
        return
    for name, found in results.items():
        rates = [found[f"{side}_bytes_per_s"] / 1e9 for side in ("verify", "plain_1", "plain")]
        print(
            f"{name}: verify {rates[0]:.2f} GB/s; plain read, 1 thread {rates[1]:.2f}, "
            f"{THREADS} threads {rates[2]:.2f}; ratios {found['ratio_1']:.2f}, {found['ratio']:.2f}"
        )


if __name__ == "__main__":
    main()
