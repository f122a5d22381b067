"""Varied prompts with the places where their prefill is cut, and a process that saves them.

Run as a program it serves the prompts over a store and says so, group by group, until it has
finished or is killed:

    python -m support.same MODEL STORE COUNT CHUNKS
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.planner import Planner
from kvstore.runtime.engine import Engine
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import Request, SamplingParams
from kvstore.store import Store
from kvstore.store import open as open_store
from support.tiny_llama import VOCAB, load_model

B = 16
NEW_TOKENS = 6
POOL_PAGES = 8 * 32
BUDGET = 8192
BATCH = 8


@dataclass(frozen=True)
class Case:
    """A prompt and the positions at which every run of it ends a prefill chunk."""

    tokens: npt.NDArray[np.int32]
    cuts: tuple[int, ...]

    @property
    def usable(self) -> int:
        """Tokens that a later run can reuse: whole blocks, one token left to compute."""
        return (len(self.tokens) - 1) // B * B

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=NEW_TOKENS, keep_logits=True, cuts=self.cuts)


def make_tokens(length: int, *seed: int) -> npt.NDArray[np.int32]:
    """Random token ids, int32 [length], that depend on length and seed alone."""
    return np.random.default_rng([*seed, length]).integers(2, VOCAB, length).astype(np.int32)


def _cuts(length: int, chunks: int) -> tuple[int, ...]:
    """`chunks` pieces of whole blocks up to the last usable one, where the last cut is."""
    blocks = (length - 1) // B
    pieces = min(chunks, blocks)
    return tuple(sorted({blocks * (i + 1) // pieces * B for i in range(pieces)})) if blocks else ()


def groups(count: int, chunks: int | None = None) -> list[list[Case]]:
    """At least `count` cases in groups that are served together: alone, or eight at once.

    Lengths 1, B-1, B, B+1, k*B and long; prefill in 1, 3 and 10 chunks (or, with `chunks`, always
    in that many); prompts that share a prefix and diverge in the middle of a block; repeated ones.
    In a batch of eight all have equally many chunks, so that each step of one run has its like in
    the other.
    """
    made: list[list[Case]] = []
    number = 0
    while sum(map(len, made)) < count:
        kind, number = number % 6, number + 1
        pieces = chunks or (1, 3, 10)[number % 3]
        if kind == 0:
            made += [[_case(make_tokens(n, number), pieces)] for n in (1, B - 1, B, B + 1)]
        elif kind == 1:
            made.append([_case(make_tokens(number % 7 * B + 2 * B, number), pieces)])
        elif kind == 2:
            made += _diverging(number, pieces)
        elif kind == 3:
            made += [[_case(make_tokens(300 + number, number), pieces)]] * 2  # asked twice
        elif kind == 4 and count >= BATCH * 2:
            made.append(
                [_case(make_tokens(10 * B + 3 * i, number, i), pieces) for i in range(BATCH)]
            )
        elif kind == 5 and count >= 100:  # short ones together: nothing to reuse, nothing broken
            made.append([_case(make_tokens(1 + 2 * i, number, i), pieces) for i in range(BATCH)])
    return made


def _case(tokens: npt.NDArray[np.int32], pieces: int) -> Case:
    return Case(tokens, _cuts(len(tokens), pieces))


def _diverging(number: int, pieces: int) -> list[list[Case]]:
    """Two prompts that part in the middle of a block; both are cut at the last block they share."""
    one = make_tokens(12 * B + 5, number)
    two = np.concatenate([one[: 7 * B + 9], make_tokens(60, number, 1)])
    cuts = tuple(cut for cut in _cuts(7 * B + 1, pieces))
    cases = [_case(tokens, pieces) for tokens in (one, two)]
    return [
        [replace(case, cuts=(*cuts, *(cut for cut in case.cuts if cut > 7 * B)))] for case in cases
    ]


def engine(model: LlamaModel, store: Store | None, **options: Any) -> Engine:
    """An engine with empty pages, over a store or alone; it loads whatever is found."""
    config = model.config
    pool = PagePool(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        pages=POOL_PAGES,
        dtype=model.dtype,
    )
    space = store.namespace(pool.layout, model="tiny") if store else None
    planner = Planner(eager=True)
    return Engine(model, pool, space=space, planner=planner, token_budget=BUDGET, **options)


def capacities(model: Path) -> tuple[str, str]:
    """Host and disk capacity that hold all the prompts: the small random model is a directory."""
    return ("128MiB", "256MiB") if model.is_dir() else ("3GiB", "4GiB")


def serve(owner: Engine, cases: Sequence[Case]) -> list[Request]:
    """Serve a group; its loads have all come before its first step."""
    requests = [owner.submit(case.tokens, case.params) for case in cases]
    owner.settle()
    owner.run()
    return requests


def serve_all(owner: Engine, made: Sequence[Sequence[Case]]) -> Iterator[list[Request]]:
    for cases in made:
        yield serve(owner, cases)


def main(model: str, store: str, count: str, chunks: str) -> None:
    host, disk = capacities(Path(model))
    with open_store(store, host=host, disk_capacity=disk, dirty_age_s=0.01) as opened:
        owner = engine(load_model(Path(model)), opened, device_reuse=False)
        print("ready", flush=True)
        for number, _ in enumerate(serve_all(owner, groups(int(count), int(chunks) or None))):
            print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
