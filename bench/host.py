"""CPU time of saving into and loading from host memory through the whole store, beside memcpy.

Bar: 1.5 x memcpy + 20 us a block + 0.7 us a run, in CPU time of the whole process: sequences,
index, eviction, checksums, headers and thread hand-over included. Host memory alone and full, so
every save evicts; prompts of PROMPT_BLOCKS blocks; memcpy, save and load interleaved; medians.

usage: python -m bench.host [--json] [--prompts N]
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvstore
from kvstore.tiers.layout import Layout

HOST_BYTES = 512 << 20
POOL_BYTES = 256 << 20
PROMPT_BLOCKS = (4, 64)
PROMPTS = 60
BAR_MEMCPY, BAR_BLOCK_US, BAR_RUN_US = 1.5, 20.0, 0.7
SHAPES = {
    "SmolLM2-135M, 360 KiB": Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"),
    "Llama-3.1-8B, 2 MiB": Layout.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),
}


def cpu_us(call: Callable[[], Any]) -> float:
    start = time.process_time_ns()
    call()
    return (time.process_time_ns() - start) / 1000


def measure(name: str, layout: Layout, blocks: int, prompts: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    pages = POOL_BYTES // layout.payload_bytes
    arrays = [np.full((pages, size), 1, np.uint8) for size in layout.run_lengths.tolist()]
    plain_from, plain_to = (np.full(POOL_BYTES, fill, np.uint8) for fill in (2, 3))
    store = kvstore.open(host=HOST_BYTES)
    space = store.namespace(layout, model=name)
    pool = space.pool(arrays)
    times: dict[str, list[float]] = {"memcpy": [], "save": [], "load": []}
    warm = HOST_BYTES // (layout.payload_bytes * blocks) + 2
    for prompt in range(warm + prompts):
        tokens = random.integers(0, 50_000, blocks * layout.block_tokens + 1, dtype=np.int32)
        table = random.permutation(pages)[:blocks]
        other = random.permutation(pages)[:blocks]

        def memcpy(table: Any = table, other: Any = other) -> None:
            for source, target in zip(table.tolist(), other.tolist(), strict=True):
                size = layout.payload_bytes
                ctypes.memmove(
                    plain_to.ctypes.data + target * size,
                    plain_from.ctypes.data + source * size,
                    size,
                )

        def save(tokens: Any = tokens, table: Any = table) -> None:
            result = space.sequence(tokens).save(pool, table).result()
            assert result.saved == blocks, result

        def load(tokens: Any = tokens, other: Any = other) -> None:
            ticket = space.sequence(tokens).lookup()
            assert ticket.load(pool, other).result().tokens == blocks * layout.block_tokens

        kinds = [("memcpy", memcpy), ("save", save), ("load", load)]
        for kind, call in kinds:
            spent = cpu_us(call) / blocks
            if prompt >= warm:
                times[kind].append(spent)
    store.close()
    medians = {kind: float(np.median(spent)) for kind, spent in times.items()}
    bar = BAR_MEMCPY * medians["memcpy"] + BAR_BLOCK_US + BAR_RUN_US * layout.runs
    return {
        "shape": name,
        "blocks_in_prompt": blocks,
        **{f"{kind}_us": spent for kind, spent in medians.items()},
        "bar_us": bar,
        "within_bar": max(medians["save"], medians["load"]) <= bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.host", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    arguments = parser.parse_args()
    rows = [
        measure(name, layout, blocks, arguments.prompts)
        for name, layout in SHAPES.items()
        for blocks in PROMPT_BLOCKS
    ]
    if arguments.json:
        print(json.dumps({"cpu_us_a_block": rows}, indent=1))
        return
    print("CPU us a block         blocks a prompt   memcpy     save     load      bar")
    for row in rows:
        spent = "".join(f"{row[k]:9.1f}" for k in ("memcpy_us", "save_us", "load_us", "bar_us"))
        verdict = "within" if row["within_bar"] else "ABOVE THE BAR"
        print(f"{row['shape']:22} {row['blocks_in_prompt']:15} {spent}  {verdict}")


if __name__ == "__main__":
    main()
