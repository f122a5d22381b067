"""The whole engine on a device, with a store behind it: the same tokens from every tier, and every
copy in order with what computes."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.cuda.calibration import Calibration
from kvstore.cuda.device import Device, DeviceError
from kvstore.loading import Load
from kvstore.page_copies import DeviceCopies
from kvstore.planner import Planner
from kvstore.runtime import chunk_attention
from kvstore.runtime.api import Runtime
from kvstore.runtime.compute import Compute
from kvstore.runtime.engine import Engine
from kvstore.runtime.paged_kernels import page_spans
from kvstore.runtime.request import Request, SamplingParams
from kvstore.runtime.step_arrays import StepArrays, StepPlan
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from support import tiny_llama
from support.device_llama import device_llama, host_compute, pool_for, shim_device
from support.race_checker import RaceChecker
from support.random_llama import VOCAB, save_random

pytestmark = pytest.mark.slow

B = 16
NEW = 4
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random(folder, num_hidden_layers=3, **SHAPE)
    return folder


@pytest.fixture(autouse=True)
def _uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.space.calibration_of", lambda device: Calibration(device.name))
    # A load tells of every layer, however small.
    monkeypatch.setattr("kvstore.loading.STEP_BYTES", 1)


def late(seed: int) -> Callable[[str], None]:
    rng = random.Random(seed)

    def delay(_: str) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.random() * 5e-4)

    return delay


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceChecker]:
    """A late device that is told what torch reads of the pages.

    That torch waits for launches here, and on a GPU does not, teaches the host nothing.
    """
    made = RaceChecker(shim_device(late(3)))
    gather = chunk_attention.gather_pages

    def told(part: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
        with made.lock:
            made._note(made.stream("compute"), page_spans(pages.tolist(), part), "torch's gather")
        return gather(part, pages, tokens)

    monkeypatch.setattr(chunk_attention, "gather_pages", told)
    monkeypatch.setattr(Compute, "_meet", lambda self: self.stream.record().event.wait())
    yield made
    made.close()


def engine_on(
    device: Device, path: Path, store: Store | None, pages: int = 48, **options: Any
) -> Engine:
    compute = host_compute(device)
    model = device_llama(path, compute)
    pool = pool_for(model.config, compute, pages, model.dtype)
    space = store.namespace(pool.layout, model="m") if store else None
    return Engine(model, pool, space=space, planner=Planner(eager=True), **options)


def prompts() -> list[Any]:
    """Three that share two blocks, of different lengths; one that is too short for a block."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, VOCAB, 2 * B + 3)
    rest = [rng.integers(0, VOCAB, n) for n in (17, 30, 45)]
    return [*(np.concatenate([shared, part]) for part in rest), rng.integers(0, VOCAB, 5)]


def serve(engine: Engine, **options: Any) -> list[Request]:
    params = SamplingParams(max_tokens=NEW, **options)
    found = engine.generate([prompt.astype(np.int32) for prompt in prompts()], params)
    engine.check_integrity()
    return found


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def fresh_pages(engine: Engine) -> None:
    while engine.pool.copies:
        engine.pool.wait_copies()
    engine.pool.clear()


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """The tokens of an engine without store or reuse, one prompt at a time."""
    device = shim_device()
    engine = engine_on(device, path, None, device_reuse=False)
    params = SamplingParams(max_tokens=NEW)
    found = [engine.generate([p.astype(np.int32)], params)[0].output for p in prompts()]
    device.close()
    return found


def usable(tier: TierName, requests: list[Request]) -> int:
    return sum(request.tier_tokens[tier] for request in requests)


def test_every_tier_gives_the_same_tokens(
    path: Path, tmp_path: Path, alone: list[list[int]], checker: RaceChecker
) -> None:
    settings: dict[str, Any] = {"host": "32MiB", "disk_capacity": "64MiB", "dirty_age_s": 0.01}
    with open_store(tmp_path / "s", **settings) as store:
        engine = engine_on(checker, path, store, token_budget=40, sequences_max=8)
        assert outputs(serve(engine)) == alone
        again = serve(engine)
        assert outputs(again) == alone and usable(TierName.DEVICE, again) >= 9 * B
        fresh_pages(engine)
        again = serve(engine)
        assert outputs(again) == alone and usable(TierName.HOST, again) >= 7 * B
        fresh_pages(engine)
    with open_store(tmp_path / "s", **settings) as store:
        engine = engine_on(checker, path, store)
        again = serve(engine)
        assert outputs(again) == alone and usable(TierName.DISK, again) >= 7 * B
        fresh_pages(engine)
        assert store.leaks() == {"leases": 0, "holds": 0}
    checker.assert_ordered()


def test_a_load_that_nobody_waits_for_is_seen(
    path: Path, tmp_path: Path, checker: RaceChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is gone: the compute stream does not wait for a layer's event."""
    wait_layer = Load.wait_layer

    def careless(self: Load, layer: int, timeout_s: float | None = None, stream: Any = None) -> int:
        return self.tokens() if stream is not None else wait_layer(self, layer, timeout_s)

    def slow_loads(purpose: str) -> None:
        time.sleep(0.15 if purpose == "load" else 0)

    with open_store(tmp_path / "s", host="32MiB", disk_capacity="64MiB") as store:
        engine = engine_on(checker, path, store)
        serve(engine)
        fresh_pages(engine)
        monkeypatch.setattr(Load, "wait_layer", careless)
        checker.inner.delay = slow_loads
        engine.generate([prompts()[2].astype(np.int32)], SamplingParams(max_tokens=1))
        fresh_pages(engine)
    with pytest.raises(AssertionError, match="in no order"):
        checker.assert_ordered()


def test_a_save_that_does_not_wait_is_seen(
    path: Path, tmp_path: Path, checker: RaceChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A01 through the engine, with its guard gone."""
    monkeypatch.setattr(DeviceCopies, "ready", lambda self: None)
    with open_store(tmp_path / "s", host="32MiB", disk_capacity="64MiB") as store:
        engine = engine_on(checker, path, store)
        serve(engine)
        fresh_pages(engine)
    assert any("of save reads what rope_write" in race for race in checker.races)


def test_preemption_and_chunks_change_no_token(path: Path, alone: list[list[int]]) -> None:
    device = shim_device()
    engine = engine_on(device, path, None, pages=12, token_budget=16, sequences_max=4)
    assert outputs(serve(engine)) == alone
    device.close()


def test_a_page_beyond_the_pool_is_found_with_the_tokens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host refuses such a table; the kernels find one that went bad on its way."""
    device = shim_device()
    engine = engine_on(device, path, None)
    fill = StepArrays.fill

    def spoiled(self: StepArrays, plan: StepPlan) -> None:
        fill(self, replace(plan, slots=plan.slots + (plan.positions == 9) * 48 * B))

    monkeypatch.setattr(StepArrays, "fill", spoiled)
    with pytest.raises(DeviceError, match="beyond the pool"):
        serve(engine)
    device.close()


def test_logits_are_kept_on_the_host(path: Path) -> None:
    device = shim_device()
    found = serve(engine_on(device, path, None), keep_logits=True)
    for request in found:
        assert len(request.logits) == NEW
        assert [int(row.argmax()) for row in request.logits] == request.output
    device.close()


def test_the_runtime_answers_from_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llama, "HEAD_DIM", 64)
    model = tiny_llama.write_model(tmp_path / "model")
    text = "A device answers as the processor does. " * 2
    with Runtime.load(model, kv_memory="8MiB", threads=1) as runtime:
        wanted = runtime.generate(text, max_tokens=4).tokens
    device = shim_device()
    options: dict[str, Any] = {"kv_memory": "8MiB", "store": tmp_path / "store"}
    with Runtime.load(model, device=host_compute(device), **options) as runtime:
        assert runtime.generate(text, max_tokens=4).tokens == wanted
        again = runtime.generate(text, max_tokens=4)
        assert again.tokens == wanted and again.tier_tokens[TierName.DEVICE] == 64
    device.close()
