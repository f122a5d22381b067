"""The model against transformers' own, however its input is cut, batched and paged."""

from pathlib import Path

import pytest
import torch

from kvstore.runtime.attention import Batch
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.weights import open_checkpoint
from kvstore.tiers.errors import ConfigError, TokenError
from support.random_llama import VOCAB, kernels_or_torch, prefill, save_random, stub_pages

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SHAPES: dict[str, dict[str, object]] = {
    "grouped": {},
    "one key head each": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    "one key head for all": {"num_key_value_heads": 1, "head_dim": 128},
    "tied": {"tie_word_embeddings": True},
    "llama 3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": LINEAR},
    "odd sizes": {"hidden_size": 78, "intermediate_size": 90, "head_dim": 20, "vocab_size": 101},
}
both = pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])


def loaded(path: Path, native: bool, dtype: torch.dtype = torch.float32) -> LlamaModel:
    with kernels_or_torch(native):
        model = LlamaModel(open_checkpoint(path), dtype)
    assert model.native is native
    return model


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(tmp_path: Path, shape: str, native: bool) -> None:
    reference = save_random(tmp_path, **SHAPES[shape])
    model = loaded(tmp_path, native)
    tokens = torch.randint(0, model.config.vocab_size, (150,))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    table = torch.randperm(40)[:10]
    cuts = [1, 15, 16, 17, 70, 1, 30]
    got = prefill(model, stub_pages(model.config, 40), tokens, table, cuts)
    ends = torch.tensor(cuts).cumsum(0) - 1
    torch.testing.assert_close(got, expected[ends], atol=2e-3, rtol=1e-4)
    assert torch.equal(got.argmax(-1), expected[ends].argmax(-1))


@both
def test_a_mixed_batch_gives_each_sequence_its_own_answer(tmp_path: Path, native: bool) -> None:
    """Prefill from nothing, a continued prefill and decodes in one step, pages scattered."""
    reference = save_random(tmp_path)
    model = loaded(tmp_path, native)
    lengths = [90, 40, 33, 16]
    prompts = [torch.randint(0, VOCAB, (length,)) for length in lengths]
    tables = torch.randperm(100)[:24].view(4, 6)
    pages = stub_pages(model.config, 100)
    starts = [0, 24, 32, 15]
    for prompt, start, table in zip(prompts, starts, tables, strict=True):
        if start:
            prefill(model, pages, prompt, table, [start])
    tail = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    wants = [True, False, True, True]
    batch = Batch(torch.cat(tail), starts, [len(part) for part in tail], tables, wants)
    logits = model.forward(batch, pages)
    asked = [prompt for prompt, want in zip(prompts, wants, strict=True) if want]
    for row, prompt in zip(logits, asked, strict=True):
        with torch.no_grad():
            expected = reference(prompt[None]).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_the_kernels_the_cut_changes_nothing_at_all(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Logits, keys and values are equal to the bit: whole, in 3 or 10 chunks, token by token, on
    two threads, and among other sequences."""
    save_random(tmp_path, head_dim=64)
    model = loaded(tmp_path, True, dtype)
    tokens = torch.randint(0, VOCAB, (600,))
    other = torch.randint(0, VOCAB, (75,))

    def run(cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        pages = stub_pages(model.config, 90, dtype)
        table = torch.randperm(90)[:40]
        logits = prefill(model, pages, tokens, table, cuts)[-1]
        return logits, written(pages, table)

    def written(pages, table):  # type: ignore[no-untyped-def]
        parts = [part[table].flatten(0, 1)[:600] for part in [*pages.keys, *pages.values]]
        return torch.stack(parts)

    whole, stored = run([600])
    for cuts in ([200] * 3, [60] * 10, [1] * 20 + [570] + [1] * 10):
        logits, again = run(cuts)
        assert torch.equal(logits, whole)
        assert torch.equal(again, stored)
    torch.set_num_threads(2)
    try:
        assert torch.equal(run([599, 1])[0], whole)
    finally:
        torch.set_num_threads(1)
    pages = stub_pages(model.config, 90, dtype)
    tables = torch.randperm(90)[:80].view(2, 40)
    first = Batch(torch.cat([other[:74], tokens[:550]]), [0, 0], [74, 550], tables, [False, False])
    model.forward(first, pages)
    second = Batch(torch.cat([other[74:], tokens[550:]]), [74, 550], [1, 50], tables, [True, True])
    assert torch.equal(model.forward(second, pages)[1], whole)
    assert torch.equal(written(pages, tables[1]), stored)


@both
def test_bfloat16_stays_close_to_float32(tmp_path: Path, native: bool) -> None:
    save_random(tmp_path)
    exact, rounded = loaded(tmp_path, native), loaded(tmp_path, native, torch.bfloat16)
    tokens, table = torch.randint(0, VOCAB, (100,)), torch.arange(7)
    wide = prefill(exact, stub_pages(exact.config, 7), tokens, table, [100])
    pages = stub_pages(rounded.config, 7, torch.bfloat16)
    narrow = prefill(rounded, pages, tokens, table, [60, 40])[-1:]
    assert pages.keys[0].dtype == torch.bfloat16
    assert torch.corrcoef(torch.cat([wide, narrow]))[0, 1] > 0.995


@both
def test_layers_are_announced_before_they_run(tmp_path: Path, native: bool) -> None:
    """A load may land layer by layer: what the hook writes into layer i's pages is used."""
    save_random(tmp_path)
    model = loaded(tmp_path, native)
    tokens, table = torch.randint(0, VOCAB, (60,)), torch.arange(4)
    source = stub_pages(model.config, 4)
    expected = prefill(model, source, tokens, table, [48, 12])[-1]
    empty, seen = stub_pages(model.config, 4), []

    def land(layer: int) -> None:
        seen.append(layer)
        empty.keys[layer][:3] = source.keys[layer][:3]
        empty.values[layer][:3] = source.values[layer][:3]

    batch = Batch(tokens[48:], [48], [12], table[None], [True])
    assert torch.equal(model.forward(batch, empty, land)[0], expected)
    assert seen == [0, 1, 2]


@both
def test_no_logits_wanted_still_writes_every_layer(tmp_path: Path, native: bool) -> None:
    save_random(tmp_path)
    model = loaded(tmp_path, native)
    tokens, table = torch.randint(0, VOCAB, (32,)), torch.arange(2)
    pages = stub_pages(model.config, 2)
    logits = model.forward(Batch(tokens, [0], [32], table[None], [False]), pages)
    assert logits.shape == (0, VOCAB)
    assert not any(torch.isnan(part).any() for part in [*pages.keys, *pages.values])


@both
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": torch.tensor([0, 1, VOCAB])}, TokenError),
        ({"tokens": torch.tensor([0, -1, 2])}, TokenError),
        ({"tables": torch.tensor([[9]])}, ConfigError),
        ({"tables": torch.tensor([[-1]])}, ConfigError),
        ({"starts": [14]}, ConfigError),  # The table has no second page.
        ({"starts": [-1]}, ConfigError),
        ({"lengths": [2]}, ConfigError),
        ({"wants_logits": []}, ConfigError),
        ({"starts": [1023], "tables": torch.zeros(1, 99, dtype=torch.int64)}, ConfigError),
    ],
)
def test_a_batch_that_does_not_fit_writes_nothing(
    tmp_path: Path, native: bool, change: dict[str, object], error: type[Exception]
) -> None:
    save_random(tmp_path, num_hidden_layers=1)
    model = loaded(tmp_path, native)
    pages = stub_pages(model.config, 4)
    good: dict[str, object] = {
        "tokens": torch.tensor([1, 2, 3]),
        "starts": [0],
        "lengths": [3],
        "tables": torch.tensor([[0]]),
        "wants_logits": [True],
    }
    with pytest.raises(error):
        model.forward(Batch(**{**good, **change}), pages)  # type: ignore[arg-type]
    assert all(torch.isnan(part).all() for part in [*pages.keys, *pages.values])


def test_pages_of_another_model_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path)
    model = loaded(tmp_path, True)
    batch = Batch(torch.tensor([1]), [0], [1], torch.tensor([[0]]), [True])
    with pytest.raises(ConfigError):
        model.forward(batch, stub_pages(model.config, 2, torch.bfloat16))
    with pytest.raises(ConfigError):
        pages = stub_pages(model.config, 2)
        pages.keys = [part.transpose(1, 2) for part in pages.keys]
        model.forward(batch, pages)
    with pytest.raises(ConfigError):
        LlamaModel(open_checkpoint(tmp_path), torch.float16)
