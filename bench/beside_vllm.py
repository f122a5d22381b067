"""The runtime beside vLLM's CPU build: same weights, dtype and threads, interleaved. Ours / vLLM.

Cold prefill of 2,000 tokens; 80 tokens over 1,920 that each engine has cached; decode of 32 tokens
at batch 1 and 8 after 128 and 1,000 tokens. Below 1 ours takes less time. Bars: cold at most 1.0
(bfloat16) and 1.15 (float32); 80 over 1,920 at most 0.9 and 1.1; decode speed at batch 1 at
least 1.0, which is a time ratio of at most 1.0.

usage: python -m bench.beside_vllm --vllm-python PYTHON --vllm-model DIR [--json] [--rounds 3]
DIR: the model as a Hugging Face directory; for float32 DIR-fp32 is used where it exists.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.runtime.api import Runtime
from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2
from kvstore.runtime.request import SamplingParams

DECODED = 32


class Vllm:
    """vLLM in a process of its own."""

    def __init__(self, python: str, model: str, dtype: str, threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        script = str(Path(__file__).with_name("vllm_side.py"))
        self._process = subprocess.Popen(
            [python, "-P", script, model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended; run vllm_side.py by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        assert self._process.stdin is not None
        asked = json.dumps({"prompts": prompts, "max_tokens": max_tokens})
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Ours:
    """The runtime in this process, without a store: its own pages and prefix reuse."""

    def __init__(self, dtype: str, threads: int) -> None:
        model = fetch_smollm2(default_cache_dir(), None)
        self._runtime = Runtime.load(model, dtype=dtype, threads=threads, kv_memory="1GiB")

    def seconds(self, prompts: list[list[int]], max_tokens: int) -> float:
        engine = self._runtime.engine
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        started = time.perf_counter()
        engine.generate(prompts, params)
        return float(time.perf_counter() - started)

    def close(self) -> None:
        self._runtime.close()


def prompt(seed: int, tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(100, 40_000, tokens).tolist()
    return ids


def cases(
    sides: dict[str, Any], rounds: int, batches: list[int]
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each case for each side, taken in turn."""
    times: dict[str, dict[str, list[float]]] = {}
    shared = prompt(7, 1920)

    def note(case: str, side: str, seconds: float) -> None:
        times.setdefault(case, {}).setdefault(side, []).append(seconds)

    for turn in range(rounds + 1):
        order = list(sides)[:: 1 if turn % 2 else -1]
        for name in order:
            side, fresh = sides[name], 1000 * (turn + 1)
            cold = side.seconds([prompt(fresh, 2000)], 1)
            side.seconds([shared + prompt(fresh + 1, 80)], 1)
            over = side.seconds([shared + prompt(fresh + 2, 80)], 1)
            decode = {}
            for batch, context in ((b, c) for b in batches for c in (128, 1000)):
                asked = [prompt(10 + n + context, context) for n in range(batch)]
                side.seconds(asked, 1)
                first = side.seconds(asked, 1)
                decode[batch, context] = side.seconds(asked, DECODED + 1) - first
            if turn:  # The first turn warms up.
                note("cold, 2000 tokens", name, cold)
                note("80 over 1920", name, over)
                for (batch, context), seconds in decode.items():
                    note(f"decode, {batch} at {context}", name, seconds / DECODED)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.beside_vllm", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", required=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="of decode")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    report = []
    for dtype in arguments.dtypes:
        wide = Path(arguments.vllm_model + "-fp32")
        model = str(wide) if dtype == "float32" and wide.exists() else arguments.vllm_model
        for threads in arguments.threads:
            sides = {
                "ours": Ours(dtype, threads),
                "vllm": Vllm(arguments.vllm_python, model, dtype, threads),
            }
            for case, seconds in cases(sides, arguments.rounds, arguments.batches).items():
                ratios = [a / b for a, b in zip(seconds["ours"], seconds["vllm"], strict=True)]
                speed = case.startswith("decode")
                row = {
                    "dtype": dtype,
                    "threads": threads,
                    "case": case,
                    "ours_ms": statistics.median(seconds["ours"]) * 1e3,
                    "vllm_ms": statistics.median(seconds["vllm"]) * 1e3,
                    "time_ratio": statistics.median(ratios),
                    "time_ratios": sorted(ratios),
                    "speed_ratio": 1 / statistics.median(ratios) if speed else None,
                }
                report.append(row)
                if not arguments.json:
                    print(
                        f"{dtype:9} {threads} threads  {case:20} ours {row['ours_ms']:8.1f} ms  "
                        f"vllm {row['vllm_ms']:8.1f} ms  time ratio {row['time_ratio']:.2f} "
                        f"({min(ratios):.2f}-{max(ratios):.2f})",
                        flush=True,
                    )
            for side in sides.values():
                side.close()
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
