"""The model on a device, run on this CPU by the kernels' own source, against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvstore.cuda.cpu_device import CpuDevice
from kvstore.runtime.attention import Batch
from kvstore.runtime.chunk_attention import attend_chunk
from kvstore.runtime.compute import Compute
from kvstore.runtime.device_sampler import sample_on_device
from kvstore.runtime.models.device_llama import DeviceLlama
from kvstore.runtime.sampler import Sampling, sample
from kvstore.runtime.step_arrays import plan_device_step
from kvstore.tiers.errors import ConfigError
from support.device_llama import device_llama, host_compute, shim_device
from support.random_llama import VOCAB, StubPages, save_random, stub_pages

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-64": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "mha-80": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80},
    "mqa-128": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 128},
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}  # of the largest logit


@pytest.fixture
def compute() -> Iterator[Compute]:
    device = shim_device()
    yield host_compute(device)
    device.close()


def tokens_of(length: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, length))


def expected(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of every token, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        found: Tensor = model(tokens[None]).logits[0]
    return found.float()


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    error = float((got - wanted).abs().max())
    assert error <= TOLERANCE[dtype] * float(wanted.abs().max()), f"error {error}"


class Run:
    """Sequences over pages in random order, step by step, mixed as a test says."""

    def __init__(self, model: DeviceLlama, prompts: list[Tensor], page_tokens: int = 16) -> None:
        self.model, self.prompts, self.done = model, prompts, [0] * len(prompts)
        width = max(-(-len(p) // page_tokens) for p in prompts) + 1
        self.pages = stub_pages(model.config, width * len(prompts) + 3, model.dtype, page_tokens)
        for part in (*self.pages.keys, *self.pages.values):
            part.zero_()
        order = np.random.default_rng(1).permutation(width * len(prompts) + 3)
        self.tables = torch.from_numpy(order[: width * len(prompts)].reshape(len(prompts), width))

    def step(self, lengths: dict[int, int]) -> Tensor:
        """The next `lengths[sequence]` tokens of some sequences, in the order given."""
        who = list(lengths)
        parts = [self.prompts[i][self.done[i] : self.done[i] + n] for i, n in lengths.items()]
        batch = Batch(
            torch.cat(parts),
            [self.done[i] for i in who],
            list(lengths.values()),
            self.tables[who],
            [True] * len(who),
        )
        for i, n in lengths.items():
            self.done[i] += n
        return self.model.forward(batch, self.pages).clone()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_steps_give_the_logits_of_transformers(
    tmp_path: Path, compute: Compute, shape: str, dtype: torch.dtype
) -> None:
    """Prefill in chunks, few tokens, one token, and all of them in one step."""
    reference = save_random(tmp_path, num_hidden_layers=2, **SHAPES[shape])
    model = device_llama(tmp_path, compute, dtype)
    run = Run(model, [tokens_of(n, n) for n in (53, 37, 30)], page_tokens=7)
    wanted = [expected(reference, prompt) for prompt in run.prompts]
    plan: list[dict[int, int]] = [
        {0: 20},
        {1: 33, 0: 3},
        {2: 11, 1: 1, 0: 26},  # two long chunks around a decode
        {0: 1, 1: 1, 2: 1},
        {2: 8, 0: 1},
    ]
    for lengths in plan:
        got = run.step(lengths)
        for row, sequence in enumerate(lengths):
            assert_close(got[row], wanted[sequence][run.done[sequence] - 1], dtype)
    assert model.sample(got, [Sampling()] * 2, [0, 0]) == got.argmax(1).tolist()


def decoded(model: DeviceLlama, steps: int) -> list[list[int]]:
    """Greedy tokens of five sequences of different length, decoded together."""
    run = Run(model, [tokens_of(n, n) for n in (5, 17, 16, 40, 31)])
    logits = torch.stack([run.step({i: len(p)})[0] for i, p in enumerate(run.prompts)])
    found = []
    for _ in range(steps):
        chosen = model.sample(logits, [Sampling()] * 5, [0] * 5)
        found.append(chosen)
        run.prompts = [
            torch.cat([p, torch.tensor([t])]) for p, t in zip(run.prompts, chosen, strict=True)
        ]
        logits = run.step(dict.fromkeys(range(5), 1))
    return found


def test_padded_steps_give_the_tokens_of_steps_that_are_not(
    tmp_path: Path, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five sequences run as eight, three of which write and read nothing."""
    save_random(tmp_path, num_hidden_layers=2, **SHAPES["gqa-64"])
    padded = decoded(device_llama(tmp_path, compute), 6)
    again = decoded(device_llama(tmp_path, compute, graphs=False), 6)
    monkeypatch.setattr("kvstore.runtime.decode_steps.SEQUENCES_MAX", 0)
    plain = decoded(device_llama(tmp_path, compute), 6)
    assert padded == again == plain


def test_padding_touches_no_page(tmp_path: Path, compute: Compute) -> None:
    save_random(tmp_path, num_hidden_layers=1, **SHAPES["gqa-64"])
    model = device_llama(tmp_path, compute)
    run = Run(model, [tokens_of(9, i) for i in range(3)])
    for i in range(3):
        run.step({i: 8})
    before = [part.clone() for part in (*run.pages.keys, *run.pages.values)]
    run.step({0: 1, 1: 1, 2: 1})
    written = {(int(run.tables[i, 0]), 8) for i in range(3)}
    for old, new in zip(before, (*run.pages.keys, *run.pages.values), strict=True):
        changed = (old != new).flatten(2).any(2).nonzero().tolist()
        assert {(page, place) for page, place in changed} == written


class Recorder:
    """A device that remembers the launches between two points, and can repeat them."""

    def __init__(self, inner: CpuDevice) -> None:
        self.inner, self.launches = inner, list[Any]()
        self.name = inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, *arguments: Any, **named: Any) -> None:
        self.launches.append((arguments, named))
        self.inner.launch(*arguments, **named)


def test_a21_a_replayed_step_reads_the_table_of_today(tmp_path: Path) -> None:
    """Two pages change places between the capture and the replay: the same launches, to the last
    number, over the same memory, give the attention of the new table."""
    save_random(tmp_path, num_hidden_layers=1, **SHAPES["gqa-64"])
    inner = shim_device()
    recorder = Recorder(inner)
    model = device_llama(tmp_path, host_compute(recorder))
    run = Run(model, [tokens_of(40, 1)])
    run.step({0: 36})
    first = run.step({0: 1})
    steps = model._decode_steps(run.pages)
    ((arrays, replay),) = steps._shapes.values()
    recorder.launches.clear()
    replay()
    captured = list(recorder.launches)
    table = run.tables[0].clone()
    for part in (*run.pages.keys, *run.pages.values):
        part[[int(table[0]), int(table[2])]] = part[[int(table[2]), int(table[0])]]
    run.tables[0, [0, 2]] = run.tables[0, [2, 0]]
    batch = Batch(run.prompts[0][36:37], [36], [1], run.tables, [True])
    plan = plan_device_step(batch, run.pages, VOCAB, 1024)
    arrays.fill(plan)
    recorder.launches.clear()
    replayed = replay()
    for (old, _), (new, _) in zip(captured, recorder.launches, strict=True):
        assert old[1:4] == new[1:4]  # kernel, grid, threads
        # Work space may lie elsewhere outside a graph; numbers may not change.
        assert [a for a in old[4] if a < 1 << 32] == [a for a in new[4] if a < 1 << 32]
    decodes = [launch[4] for launch, _ in captured if launch[1].startswith("decode")]
    assert all(arrays.table.data_ptr() in given for given in decodes) and decodes
    torch.testing.assert_close(replayed, first, rtol=0, atol=0)
    inner.close()


def test_the_sampler_on_the_device_chooses_as_the_one_on_the_host() -> None:
    logits = torch.randn(64, 513, generator=torch.Generator().manual_seed(0)) * 3
    logits[:8, 5] = logits[:8, 9] = 50.0  # equal best ones: the lowest token wins
    sampling = [Sampling((0.0, 0.7, 1.0, 5.0)[i % 4], seed=i) for i in range(64)]
    steps = [i * 7 for i in range(64)]
    got = sample_on_device(logits, sampling, steps).tolist()
    assert got == sample(logits, sampling, steps).tolist()


def test_a_chunk_is_the_same_however_few_queries_are_taken_at_a_time() -> None:
    make = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(9, 5, 2, 64, generator=make) for _ in range(2))
    queries = torch.randn(13, 4, 64, generator=make)
    pages = torch.tensor([3, 1, 8, 0, 5, 2], dtype=torch.int32)
    whole = attend_chunk(queries, keys, values, pages, 28)
    parts = attend_chunk(queries, keys, values, pages, 28, scores_max=4 * 28 * 3)
    torch.testing.assert_close(parts, whole)


def test_heads_without_a_kernel_are_refused(tmp_path: Path, compute: Compute) -> None:
    save_random(tmp_path, head_dim=32)
    with pytest.raises(ConfigError, match="no kernel"):
        device_llama(tmp_path, compute)


def test_pages_of_another_type_are_refused(tmp_path: Path, compute: Compute) -> None:
    save_random(tmp_path, **SHAPES["gqa-64"])
    model = device_llama(tmp_path, compute, torch.bfloat16)
    pages: StubPages = stub_pages(model.config, 4)
    batch = Batch(tokens_of(3, 0), [0], [3], torch.tensor([[1]]), [True])
    with pytest.raises(ConfigError, match="other pages"):
        model.forward(batch, pages)
