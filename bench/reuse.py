"""Time to first token of the runtime over the store: cold, from the device, from host, from disk.

Prompts of 2,000 tokens of which 1,920 are shared, on SmolLM2-135M. One process computes and saves
--documents documents; a fresh one asks for each of them, interleaved: from disk (its first touch
after the restart), from host memory (device pages dropped), from the device, and beside them the
same 80 tokens through the model alone, a memcpy, and a plain O_DIRECT read of as many bytes of a
file beside the store, which nobody read before either.

Bars: TTFT(device) at most 1.10 x the model alone; TTFT(host) - TTFT(device) at most 1.5 x memcpy +
5 ms; TTFT(disk) - TTFT(device) at most 1.3 x the read + 8 ms; cold over hit at least 13 / 12 / 10
(device / host / disk) in bfloat16 and 12 / 11 / 8 in float32. Medians, with quartiles.

usage: python -m bench.reuse [--json] [--dtypes float32 bfloat16] [--threads 2] [--documents 20]
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore
from kvstore.planner import Planner
from kvstore.runtime.api import Generation, Runtime
from kvstore.runtime.attention import Batch
from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2
from kvstore.runtime.pages import PagePool
from kvstore.tiers.io import FileIo, aligned_buffer

SHARED, OWN = 1920, 80
READ_THREADS = 8
BARS = {"bfloat16": (13, 12, 10), "float32": (12, 11, 8)}
SIZES: dict[str, Any] = {"host": "2GiB", "disk_capacity": "4GiB"}


def document(number: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(number).integers(100, 40_000, SHARED).tolist()
    return tokens


def ask(runtime: Runtime, shared: list[int], seed: int) -> Generation:
    own = np.random.default_rng(seed).integers(100, 40_000, OWN).tolist()
    return runtime.generate(shared + own, max_tokens=1)


def open_runtime(directory: Path, dtype: str, threads: int) -> tuple[kvstore.Store, Runtime]:
    store = kvstore.open(directory, **SIZES)
    model = fetch_smollm2(default_cache_dir(), None)
    runtime = Runtime.load(
        model, store=store, dtype=dtype, threads=threads, kv_memory="512MiB", planner=Planner()
    )
    ask(runtime, [5] * SHARED, 0)  # Warm up on tokens that no document has.
    runtime.engine.pool.clear()
    return store, runtime


def fill(directory: Path, dtype: str, threads: int, documents: int) -> dict[str, list[float]]:
    """Compute and save every document; each is cold."""
    store, runtime = open_runtime(directory, dtype, threads)
    cold = [ask(runtime, document(n), n).ttft_s for n in range(documents)]
    size = SHARED * runtime.engine.pool.layout.payload_bytes // 16
    runtime.close()
    store.close()
    write_plain(directory.with_name("plain"), size, documents + 1)
    return {"cold": cold}


def measure(directory: Path, dtype: str, threads: int, documents: int) -> dict[str, list[float]]:
    store, runtime = open_runtime(directory, dtype, threads)
    times: dict[str, list[float]] = {}
    alone = model_alone(runtime)
    size = SHARED * runtime.engine.pool.layout.payload_bytes // 16
    copy = memcpy(size)
    plain = directory.with_name("plain")
    read = plain_read(plain, size, runtime.engine.pool.layout.payload_bytes)
    read(documents)

    def note(kind: str, seconds: float) -> None:
        times.setdefault(kind, []).append(seconds)

    for number in range(documents):
        for order, kind in enumerate(("disk", "host", "device"), 1):
            if kind == "host":
                runtime.engine.pool.clear()
            answer = ask(runtime, document(number), 1000 * order + number)
            served = {str(tier): tokens for tier, tokens in answer.tier_tokens.items()}
            note(kind if served[kind] == SHARED else f"{kind}, not whole", answer.ttft_s)
        for kind, call in (
            ("model alone", alone),
            ("memcpy", copy),
            ("read", lambda number=number: read(number)),
        ):
            began = time.perf_counter()
            call()
            note(kind, time.perf_counter() - began)
    runtime.close()
    store.close()
    return times


def model_alone(runtime: Runtime) -> Callable[[], None]:
    """The model's own step: 80 tokens over 1,920 whose KV is there, no engine around it."""
    model, pool = runtime.engine.model, runtime.engine.pool
    layout = pool.keys[0]
    pages = PagePool(
        layers=len(pool.keys),
        kv_heads=layout.shape[2],
        head_dim=layout.shape[3],
        pages=(SHARED + OWN) // 16,
        dtype=layout.dtype,
    )
    batch = Batch(
        tokens=torch.arange(200, 200 + OWN),
        starts=[SHARED],
        lengths=[OWN],
        tables=torch.arange((SHARED + OWN) // 16)[None],
        wants_logits=[True],
    )

    def call() -> None:
        model.forward(batch, pages)

    return call


def memcpy(size: int) -> Callable[[], None]:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def call() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, size)

    return call


def write_plain(path: Path, size: int, documents: int) -> None:
    """As many bytes as the documents have, beside the store: for reads that nobody did before."""
    io, random = FileIo(), np.random.default_rng(3)
    fd, buffer = io.open(path, create=True, write=True, direct=True), aligned_buffer(1 << 22)
    np.frombuffer(buffer, np.uint8)[:] = random.integers(0, 256, len(buffer), dtype=np.uint8)
    for at in range(0, size * documents, len(buffer)):
        np.frombuffer(buffer, np.int64)[:1] = at
        io.pwrite(fd, buffer, at)
    io.fdatasync(fd)
    io.close(fd)


def plain_read(path: Path, size: int, block_bytes: int) -> Callable[[int], None]:
    """O_DIRECT reads of one document's bytes by READ_THREADS threads, in blocks."""
    io = FileIo()
    block, fd = -(-block_bytes // 4096) * 4096, io.open(path, direct=True)
    pool, count = ThreadPoolExecutor(READ_THREADS), size // block_bytes
    buffers = [aligned_buffer(block) for _ in range(count)]

    def call(document: int) -> None:
        start = document * (size // 4096) * 4096
        list(pool.map(lambda n: io.pread(fd, buffers[n], start + n * block), range(count)))

    return call


def summary(times: dict[str, list[float]], dtype: str) -> dict[str, Any]:
    quartiles = {
        kind: [float(q) for q in np.percentile(seconds, (25, 50, 75))]
        for kind, seconds in times.items()
    }
    middle = {kind: quartiles[kind][1] for kind in quartiles}
    ratios = {k: middle["cold"] / middle[k] for k in ("device", "host", "disk") if k in middle}
    added = {k: middle[k] - middle["device"] for k in ("host", "disk") if k in middle}
    bars = {
        "device": middle["device"] <= 1.10 * middle["model alone"],
        "host": added.get("host", 9e9) <= 1.5 * middle["memcpy"] + 0.005,
        "disk": added.get("disk", 9e9) <= 1.3 * middle["read"] + 0.008,
        "cold over hit": all(
            ratios.get(kind, 0) >= bar
            for kind, bar in zip(("device", "host", "disk"), BARS[dtype], strict=True)
        ),
    }
    counts = {kind: len(seconds) for kind, seconds in times.items()}
    return {
        "quartiles_s": quartiles,
        "samples": counts,
        "cold_over_hit": ratios,
        "added_s": added,
        "device_over_model_alone": middle["device"] / middle["model alone"],
        "within_bar": bars,
    }


def child(kind: str, directory: Path, dtype: str, arguments: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "bench.reuse", "--part", kind, "--directory", str(directory)]
    command += ["--dtypes", dtype, "--threads", str(arguments.threads)]
    command += ["--documents", str(arguments.documents)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reuse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=BARS)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--part", choices=("fill", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part = fill if arguments.part == "fill" else measure
        directory, dtype = arguments.directory, arguments.dtypes[0]
        print(json.dumps(part(directory, dtype, arguments.threads, arguments.documents)))
        return
    report = {}
    for dtype in arguments.dtypes:
        Path("build").mkdir(exist_ok=True)
        home = Path(tempfile.mkdtemp(dir="build"))
        try:
            times = child("fill", home / "s", dtype, arguments)
            times |= child("measure", home / "s", dtype, arguments)
        finally:
            shutil.rmtree(home)
        report[dtype] = summary(times, dtype)
    print(json.dumps(report, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
