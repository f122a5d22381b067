"""Each kernel against float64, in all forms the compiler may give it, and the torch form too."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.native import build
from kvstore.runtime import kernels
from kvstore.runtime.attention import Batch, Step, attend, plan_step
from kvstore.runtime.kernels import ADD, SILU_TIMES, STORE, KernelModel, KernelStep, PackedWeights
from kvstore.runtime.models import llama
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.torch_layer import rms_norm, rotate, silu_times
from kvstore.runtime.weights import open_checkpoint
from support.random_llama import StubPages, prefill, save_random, stub_pages

# The machine's own form; vectors of 8 lanes; and the order of VDPBF16PS, emulated where it lacks.
FORMS = {
    "native": [],
    "8 lanes": ["-mno-avx512f"],
    "bf16 dot": ["-DKV_EMULATE_BF16_DOT"],
}
slow_forms = [
    pytest.param(form, marks=[] if form == "native" else pytest.mark.slow) for form in FORMS
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=slow_forms)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    found = kernels.load_library(FORMS[request.param])
    assert found is not None
    return found


def config(heads: int, kv_heads: int, head_dim: int, hidden: int = 64) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=80,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=100,
        context_length=4096,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied_embeddings=True,
        bos_id=None,
        stop_ids=(),
    )


def tolerance(dtype: torch.dtype) -> float:
    """What one rounding to `dtype` may change, relative to values near 1."""
    return 2e-5 if dtype == torch.float32 else 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 96, 576, 77])
def test_rms_norm(library: ctypes.CDLL, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, width) * 3, torch.rand(width) + 0.5
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    got = kernels.native_rms_norm(library, x, weight, 1e-5, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=tolerance(dtype), rtol=tolerance(dtype))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 200])
@pytest.mark.parametrize("columns", [16, 20, 64, 131])
def test_products(library: ctypes.CDLL, columns: int, inputs: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(columns, inputs) / inputs**0.5).to(dtype)
    packed = PackedWeights(library, weight)
    for rows in (1, 2, 11, 12, 13, 29):
        a = torch.randn(rows, inputs).to(kernels.row_dtype(library, dtype))
        exact = a.double() @ weight.double().T
        torch.testing.assert_close(packed.linear(a, STORE).double(), exact, atol=1e-5, rtol=1e-5)
        onto = torch.randn(rows, columns)
        exact += onto
        torch.testing.assert_close(
            packed.linear(a, ADD, onto).double(), exact, atol=1e-5, rtol=1e-5
        )
        alone = torch.cat([packed.linear(row[None].contiguous()) for row in a])
        assert torch.equal(alone, packed.linear(a)), "a row's result depends on its neighbours"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [16, 40, 101])
def test_products_that_end_in_silu(library: ctypes.CDLL, pairs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(2 * pairs, 64).to(dtype)  # Gates from -25 to 25 or so.
    packed = PackedWeights(library, weight, paired=True)
    a = torch.randn(15, 64).to(kernels.row_dtype(library, dtype))
    gate, up = (a.double() @ weight.double().T).chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    got = packed.linear(a, SILU_TIMES)
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(silu_times(gate, up), exact)


def planned(
    sizes: ModelConfig, pages: StubPages, starts: list[int], lengths: list[int], wants: list[bool]
) -> Step:
    longest = max(start + length for start, length in zip(starts, lengths, strict=True))
    each = -(-longest // pages.page_tokens)
    tables = torch.randperm(len(pages.keys[0]))[: each * len(starts)].view(len(starts), each)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    return plan_step(Batch(tokens, starts, lengths, tables, wants), pages, 100, 4096)


def tables_of(sizes: ModelConfig) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(4096).float(), sizes.inverse_frequencies())
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 32), (3, 1, 20)])
def test_rotation_and_writes(
    library: ctypes.CDLL, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    sizes = config(heads, kv_heads, head_dim)
    pages = stub_pages(sizes, 40, dtype)
    step = planned(sizes, pages, [0, 37], [20, 1], [True, True])
    model = KernelModel(library, sizes, dtype, tables_of(sizes))
    run = KernelStep(model, step, 16, torch.zeros(21, 64))
    run.mixed.copy_(torch.randn(21, (heads + 2 * kv_heads) * head_dim))
    run.rotate_and_write(pages.keys[0], pages.values[0])
    mixed = run.mixed.view(21, -1, head_dim).double()
    cosines, sines = (table[step.positions].double() for table in tables_of(sizes))
    query, key, value = torch.split(mixed, [heads, kv_heads, kv_heads], dim=1)
    near = {"atol": 2e-5, "rtol": 2e-5 if dtype == torch.float32 else 2**-8}
    torch.testing.assert_close(
        run.queries.double(), rotate(query, cosines, sines) * head_dim**-0.5, atol=2e-5, rtol=2e-5
    )
    stored = pages.keys[0][step.pages, step.offsets].double()
    torch.testing.assert_close(stored, rotate(key, cosines, sines), **near)
    assert torch.equal(pages.values[0][step.pages, step.offsets], value.float().to(dtype))
    # Nothing but these tokens' places was written.
    pages.keys[0][step.pages, step.offsets] = torch.nan
    pages.values[0][step.pages, step.offsets] = torch.nan
    assert torch.isnan(pages.keys[0]).all() and torch.isnan(pages.values[0]).all()


def exact_attention(queries: Tensor, pages: StubPages, step: Step, rows: list[int]) -> Tensor:
    """Softmax over all that came before, in float64; queries are scaled already."""
    out = []
    for sequence in range(len(step.starts)):
        first, start = int(step.firsts[sequence]), int(step.starts[sequence])
        end = start + int(step.lengths[sequence])
        keys, values = (
            part[0][step.tables[sequence]].flatten(0, 1)[:end].double()
            for part in (pages.keys, pages.values)
        )
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        for position in range(start, end):
            query = queries[first + position - start].double()
            scores = torch.einsum("hd,nhd->hn", query, keys[: position + 1])
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values[: position + 1]))
    return torch.stack(out)[rows]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens"),
    [(6, 2, 64, 16), (4, 4, 32, 16), (8, 1, 128, 32), (3, 1, 20, 5)],
)
def test_attention(
    library: ctypes.CDLL,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
) -> None:
    """Prefill, continued prefill and decode in one batch; beyond one span of keys; pages of other
    sequences and the rest of a last page hold NaN."""
    sizes = config(heads, kv_heads, head_dim)
    pages = stub_pages(sizes, 1200 // page_tokens * 4, dtype, page_tokens)
    starts, lengths = [0, 500, 1100, 63], [130, 70, 1, 1]
    step = planned(sizes, pages, starts, lengths, [False, True, True, True])
    for sequence, start in enumerate(starts):
        ends = start + lengths[sequence]
        places = torch.arange(ends)
        where = step.tables[sequence][places // page_tokens], places % page_tokens
        for part in (pages.keys[0], pages.values[0]):
            part[where] = torch.randn(ends, kv_heads, head_dim).to(dtype)
    model = KernelModel(library, sizes, dtype, tables_of(sizes))
    tokens = sum(lengths)
    run = KernelStep(model, step, page_tokens, torch.zeros(tokens, 64))
    run.queries.copy_(torch.randn(tokens, heads, head_dim) * 3 * head_dim**-0.5)
    got = run.attend(pages.keys[0], pages.values[0], wanted_only=False)
    exact = exact_attention(run.queries, pages, step, list(range(tokens)))
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
    plain = attend(run.queries * head_dim**0.5, pages.keys[0], pages.values[0], step, False)
    torch.testing.assert_close(plain.double(), exact, atol=1e-5, rtol=1e-5)
    wanted = run.queries[step.wanted].clone()
    run.queries[: len(wanted)] = wanted
    few = run.attend(pages.keys[0], pages.values[0], wanted_only=True)
    assert torch.equal(few, got[step.wanted])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_model_in_this_form(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Close to the torch form, and the same to the bit however the prompt is cut."""
    save_random(tmp_path, head_dim=64)
    monkeypatch.setattr(llama, "load_kernels", lambda: library)
    model = llama.LlamaModel(open_checkpoint(tmp_path), dtype)
    monkeypatch.setattr(llama, "load_kernels", lambda: None)
    plain = llama.LlamaModel(open_checkpoint(tmp_path), dtype)
    assert model.native and not plain.native
    tokens, table = torch.randint(0, 100, (700,)), torch.randperm(50)
    logits = []
    for cuts in ([700], [600, 1, 99]):
        pages = stub_pages(model.config, 50, dtype)
        logits.append(prefill(model, pages, tokens, table, cuts)[-1])
    assert torch.equal(*logits)
    expected = prefill(plain, stub_pages(model.config, 50, dtype), tokens, table, [700])[-1]
    near = 2e-3 if dtype == torch.float32 else 0.1
    assert (logits[0] - expected).norm() < near * expected.norm()


def test_the_kernels_share_torchs_thread_pool() -> None:
    """Two copies of libgomp would mean two pools of threads on the same cores."""
    assert kernels.load_kernels() is not None
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    assert len(loaded) == 1


def test_without_a_compiler_there_are_no_kernels() -> None:
    with build.forced_fallback():
        assert kernels.load_kernels() is None
