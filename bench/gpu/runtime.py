"""The runtime on the device: the same tokens with the store as without, and times to the first."""

import gc
import time
from typing import Any

import numpy as np
import torch

import kvstore
from bench.gpu.bandwidth import limits
from bench.gpu.place import Place
from bench.gpu.random_models import LLAMA_8B, SMOLLM2, TINY, make_model, make_pool
from bench.gpu.results import Figure, NotMeasured
from kvstore.planner import Planner
from kvstore.runtime.api import Runtime
from kvstore.runtime.engine import Engine
from kvstore.runtime.request import Request, SamplingParams
from kvstore.tiers.base import TierName
from support import tiny_llama
from support.same import groups, serve

BUDGET_TOKENS = 8192
TAIL = 16  # of a prompt that is not shared


def answers(place: Place) -> list[Figure]:
    """`Runtime.load(..., device="cuda")` on a tiny model: the CPU's tokens, from every tier."""
    before, tiny_llama.HEAD_DIM = tiny_llama.HEAD_DIM, 64  # the smallest that has kernels
    try:
        model = tiny_llama.write_model(place.folder / "tiny")
    finally:
        tiny_llama.HEAD_DIM = before
    text, found = "A device answers as the processor does. " * 2, []
    with Runtime.load(model, kv_memory="8MiB", threads=1) as runtime:
        wanted = runtime.generate(text, max_tokens=4).tokens
    store = {"store": place.folder / "answers", "planner": Planner(eager=True)}
    for sources in (("cold", "device", "host"), ("disk",)):
        device: Any = place.compute if place.twin else "cuda"
        with Runtime.load(model, device=device, kv_memory="8MiB", **store) as runtime:
            for source in sources:
                if source == "host":
                    runtime.engine.pool.wait_copies(30.0)
                    runtime.engine.pool.clear()
                got = runtime.generate(text, max_tokens=4)
                assert got.tokens == wanted, f"{source}: {got.tokens}, not {wanted}"
                assert source == "cold" or got.tier_tokens[TierName(source)], f"not from {source}"
                found.append(source)
    return [Figure("tiers from which the runtime gives the CPU's tokens", ", ".join(found))]


def same_tokens(place: Place) -> list[Figure]:
    """SmolLM2's shape: prompts over a store that has them, against the engine alone."""
    figures = []
    for dtype in place.pick((torch.float32, torch.bfloat16), (torch.float32,)):
        model = make_model(place, place.pick(SMOLLM2, TINY), dtype)
        cases = groups(place.pick(60, 5))[place.pick(slice(None), slice(3, 5))]
        plain = _tokens(_engine(place, model, None), cases)
        name = f"same-{dtype}".replace("torch.", "")
        with kvstore.open(place.folder / name, host="1GiB", disk_capacity="2GiB") as store:
            space = _space(store, model)
            first = _tokens(_engine(place, model, space), cases)
            store.flush()
            again = _engine(place, model, space)
            second = _tokens(again, cases)
            hits = again.counters()
        reused = int(sum(v for k, v in hits.items() if k.startswith("tier_tokens")))
        assert reused > 0, "nothing was reused"
        for run, found in (("saving to a store", first), ("loading from it", second)):
            same = sum(a == b for a, b in zip(found, plain, strict=True))
            # One in many may differ where two tokens are as likely and a step has another shape.
            assert same >= 0.9 * len(plain), f"{run}: only {same} of {len(plain)} are the same"
            figures.append(
                Figure(
                    f"prompts with the same tokens {run}, {dtype}",
                    f"{same} of {len(plain)}",
                    f"({reused} tokens reused)" if found is second else "",
                    goal="all",
                )
            )
    return figures


def demo(place: Place) -> list[Figure]:
    """The demo asks SmolLM2 about a document; its weights are not part of the repository."""
    raise NotMeasured("needs SmolLM2's weights: run `kvstore demo` where they can be fetched")


def _engine(place: Place, model: Any, space: Any, tokens: int = 8192) -> Engine:
    pool = make_pool(place, model.config, place.pick(tokens, 4096), model.dtype)
    return Engine(
        model,
        pool,
        space=space,
        planner=Planner(eager=True),
        device_reuse=False,
        token_budget=BUDGET_TOKENS,
    )


def _space(store: kvstore.Store, model: Any) -> Any:
    layout = kvstore.Layout.attention(
        layers=model.config.layers,
        kv_heads=model.config.kv_heads,
        head_dim=model.config.head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=16,
    )
    return store.namespace(layout, model="random", mixed=True)


def _tokens(engine: Engine, cases: Any) -> list[list[int]]:
    found = []
    for group in cases:
        found += [list(request.output) for request in serve(engine, group)]
    return found


def big_model(place: Place) -> Any:
    """The 8B shape, made once for a process."""
    if "8b" not in place.kept:
        place.kept["8b"] = make_model(place, place.pick(LLAMA_8B, TINY), torch.bfloat16)
    return place.kept["8b"]


def first_token(place: Place, sizes: tuple[int, ...]) -> list[Figure]:
    """Cold, then from the device, from host memory, and from disk after a restart."""
    drop_unused(place)
    model, figures = big_model(place), []
    longest = max(place.pick(sizes, (96,)))
    token_bytes = model.config.token_bytes(model.dtype)
    room = place.pick(max(8 << 30, int(1.5 * longest * token_bytes)), 64 << 20)
    folder = place.folder / f"ttft-{longest}"
    prompts = {size: _prompt(model, size) for size in place.pick(sizes, (96,))}
    times: dict[tuple[int, str], Request] = {}
    with kvstore.open(folder, host=room, disk_capacity=room) as store:
        engine = _first_token_engine(place, model, store, longest)
        _ask(engine, _prompt(model, 300, seed=9))  # Code is loaded, workspaces are made.
        for size, tokens in prompts.items():
            times[size, "cold"] = _ask(engine, tokens)
            times[size, "device"] = _ask(engine, tokens)
        store.flush()
        store._placement.host.pin(place.device, time.monotonic).wait(30)
        for size, tokens in prompts.items():
            for _ in range(2):
                engine.pool.clear()
                times[size, "host"] = _ask(engine, tokens)
        locked = store.stats()["page_locked"]
    del engine
    drop_unused(place)
    with kvstore.open(folder, host=room, disk_capacity=room) as store:
        engine = _first_token_engine(place, model, store, longest)
        _ask(engine, _prompt(model, 300, seed=9))
        for size, tokens in prompts.items():
            times[size, "disk"] = _ask(engine, tokens)
    for (size, source), request in times.items():
        figures.append(_figure(place, size, source, request, times, token_bytes))
    figures.append(Figure("page-locking", round(locked["seconds_per_gib"], 3), "s/GiB"))
    return figures


def drop_unused(place: Place) -> None:
    """Give the memory of engines that are gone back to the device: pages take gigabytes."""
    gc.collect()
    if not place.twin:
        torch.cuda.empty_cache()


def _first_token_engine(place: Place, model: Any, store: kvstore.Store, longest: int) -> Engine:
    pool = make_pool(place, model.config, longest + longest // 4 + 8192, model.dtype)
    return Engine(
        model,
        pool,
        space=_space(store, model),
        planner=Planner(eager=True),
        token_budget=BUDGET_TOKENS,
    )


def _figure(
    place: Place, size: int, source: str, request: Request, times: Any, token_bytes: int
) -> Figure:
    reused = request.tier_tokens.get(TierName(source), 0) if source != "cold" else 0
    goal = ""
    if source == "host":
        transfer = reused * token_bytes / limits(place).load
        least = max(transfer, times[size, "device"].ttft_s)
        goal = f"{1.15 * least * 1e3:.1f} ms: 1.15 x max(transfer, one step)"
    name = f"time to first token, 8B shape, {size} tokens, {source}"
    return Figure(name, round(request.ttft_s * 1e3, 2), f"ms ({reused} tokens from there)", goal)


def _prompt(model: Any, size: int, seed: int = 0) -> Any:
    rng = np.random.default_rng([size, seed])
    return rng.integers(2, model.config.vocab_size, size).astype(np.int32)


def _ask(engine: Engine, tokens: Any) -> Request:
    request = engine.submit(tokens, SamplingParams(max_tokens=1))
    engine.run()
    engine.pool.wait_copies(30.0)
    return request


def overhead(place: Place) -> list[Figure]:
    """Prefill of prompts that nobody asked for before, with a store and without, in turns."""
    model = big_model(place)
    size, rounds = place.pick(4096, 48), place.pick(6, 1)
    ratios = []
    with kvstore.open(
        place.folder / "overhead", host=place.pick(8 << 30, 64 << 20), disk_capacity="1GiB"
    ) as store:
        having = _first_token_engine(place, model, store, size)
        without = _engine(place, model, None, 2 * size)
        for number in range(rounds + 1):
            tokens = _prompt(model, size, 100 + number)
            plain, ours = _timed(without, tokens), _timed(having, tokens)
            if number:
                ratios.append(ours / plain - 1)
            having.pool.clear()
    return [
        Figure(
            f"prefill of {size} tokens with a store and no hit, beyond without one",
            round(100 * float(np.median(ratios)), 2),
            "%",
            goal="1 %",
        )
    ]


def _timed(engine: Engine, tokens: Any) -> float:
    began = time.perf_counter()
    engine.submit(tokens, SamplingParams(max_tokens=1))
    engine.run()
    return time.perf_counter() - began
