"""How fast the model runs on this machine: prefill, prefill over cached tokens, decode.

Every case is measured in turn, round after round, so that a busy moment hits all of them; best and
median wall time of the rounds, and CPU time, which a busy machine disturbs less. The pages are
scattered and hold random keys and values, as long as they must.

usage: python -m bench.model [--json] [--model PATH] [--threads 1 2] [--dtypes float32 bfloat16]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvstore.runtime.attention import Batch
from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.weights import open_checkpoint

PAGE_TOKENS = 16
PAGES = 700
PROMPT, CACHED = 2000, 1920
ROUNDS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class RandomPages:
    """Pages of random keys and values."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    page_tokens: int = PAGE_TOKENS


@dataclass
class Case:
    """One case's times, in seconds."""

    dtype: str
    threads: int
    name: str
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        figures = asdict(self)
        del figures["wall_s"], figures["cpu_s"]
        figures["best_ms"] = min(self.wall_s) * 1e3
        figures["median_ms"] = statistics.median(self.wall_s) * 1e3
        figures["cpu_ms"] = min(self.cpu_s) * 1e3
        return figures


def pages_for(model: LlamaModel) -> RandomPages:
    shape = (PAGES, PAGE_TOKENS, model.config.kv_heads, model.config.head_dim)
    parts = [torch.randn(shape).to(model.dtype) for _ in range(2 * model.config.layers)]
    return RandomPages(parts[::2], parts[1::2])


def batches(vocab_size: int) -> dict[str, tuple[Batch, int]]:
    """The cases by name, and how often each is repeated in a round."""
    tokens = torch.randint(0, vocab_size, (PROMPT,))
    table = torch.randperm(PAGES)[: PROMPT // PAGE_TOKENS + 1][None]
    tables = torch.randperm(PAGES)[: 8 * 64].view(8, 64)
    found = {
        f"cold, {PROMPT} tokens": (Batch(tokens, [0], [PROMPT], table, [True]), 1),
        f"{PROMPT - CACHED} tokens over {CACHED}": (
            Batch(tokens[CACHED:], [CACHED], [PROMPT - CACHED], table, [True]),
            3,
        ),
    }
    for size in (1, 8):
        for context in (128, 1000):
            batch = Batch(tokens[:size], [context] * size, [1] * size, tables[:size], [True] * size)
            found[f"decode, {size} at {context}"] = (batch, 5)
    return found


def measure(run: Callable[[], object], repeats: int, into: Case) -> None:
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        into.wall_s.append(time.perf_counter() - wall)
        into.cpu_s.append(time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model or fetch_smollm2(default_cache_dir(), print))
    cases: dict[tuple[str, int, str], Case] = {}
    loaded = []
    for dtype in options.dtypes:
        model = LlamaModel(checkpoint, DTYPES[dtype])
        loaded.append((dtype, model, pages_for(model)))
    work = batches(checkpoint.config.vocab_size)
    for _ in range(options.rounds):
        for dtype, model, pages in loaded:
            for threads in options.threads:
                torch.set_num_threads(threads)
                for name, (batch, repeats) in work.items():
                    case = cases.setdefault((dtype, threads, name), Case(dtype, threads, name))
                    measure(lambda m=model, b=batch, p=pages: m.forward(b, p), repeats, case)  # type: ignore[misc]
    summaries = [case.summary() for case in cases.values()]
    if options.json:
        print(json.dumps({"native": loaded[0][1].native, "cases": summaries}, indent=1))
        return
    for row in summaries:
        print(
            f"{row['dtype']:9} {row['threads']} threads  {row['name']:24}"
            f" best {row['best_ms']:9.1f} ms  median {row['median_ms']:9.1f} ms"
            f"  CPU {row['cpu_ms']:9.1f} ms"
        )


if __name__ == "__main__":
    main()
