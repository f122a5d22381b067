"""What the store costs when nothing ever hits: cold prefill with the store beside prefill without.

Two runtimes in one process, the same weights and threads; prompts of 2,000 tokens that nobody asked
before, to one and the other in turn. The store looks up, misses, saves every block and writes it to
disk meanwhile. Bar: at most 2 % of the prefill's time (median of the pairs' ratios).

usage: python -m bench.overhead [--json] [--dtype float32] [--threads 2] [--pairs 12]
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

import kvstore
from kvstore.runtime.api import Runtime
from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2

TOKENS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.overhead", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--pairs", type=int, default=12)
    arguments = parser.parse_args()
    model = fetch_smollm2(default_cache_dir(), None)
    Path("build").mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(dir="build"))
    options = {"dtype": arguments.dtype, "threads": arguments.threads, "kv_memory": "256MiB"}
    with kvstore.open(home / "s", host="1GiB", disk_capacity="4GiB") as store:
        runtimes = {
            "without": Runtime.load(model, **options),
            "with": Runtime.load(model, store=store, **options),
        }
        times: dict[str, list[float]] = {name: [] for name in runtimes}
        for pair in range(arguments.pairs + 1):
            for name in list(runtimes)[:: 1 if pair % 2 else -1]:
                seed = 2 * pair + (name == "with")
                prompt = np.random.default_rng(seed).integers(100, 40_000, TOKENS).tolist()
                answer = runtimes[name].generate(prompt, max_tokens=1)
                assert answer.reused_tokens == 0
                if pair:  # The first pair warms up.
                    times[name].append(answer.ttft_s)
    shutil.rmtree(home)
    ratios = np.array(times["with"]) / np.array(times["without"])
    low, middle, high = (float(q) for q in np.percentile(ratios, (25, 50, 75)))
    report = {
        "dtype": arguments.dtype,
        "pairs": arguments.pairs,
        "median_s": {name: float(np.median(seconds)) for name, seconds in times.items()},
        "ratio_quartiles": [low, middle, high],
        "within_bar": middle <= 1.02,
    }
    print(json.dumps(report, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
