"""Random Llamas saved by transformers, and pages to run them over."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.native import build
from kvstore.runtime.attention import Batch
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.models.llama import LlamaModel

torch.set_num_threads(1)  # The tests run two at a time on two cores.

VOCAB = 131


@dataclass
class StubPages:
    """Just what the model sees of a page pool. Full of NaN: what nobody wrote must never count."""

    keys: list[Tensor]
    values: list[Tensor]
    page_tokens: int


def stub_pages(
    config: ModelConfig, pages: int, dtype: torch.dtype = torch.float32, page_tokens: int = 16
) -> StubPages:
    shape = (pages, page_tokens, config.kv_heads, config.head_dim)
    parts = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2 * config.layers)]
    return StubPages(parts[: config.layers], parts[config.layers :], page_tokens)


def save_random(path: Path, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random model, saved to `path` and given back. Weights large enough that logits differ."""
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():  # Norm weights of ones would hide a forgotten one.
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    model.save_pretrained(path)
    return model


@contextmanager
def kernels_or_torch(native: bool) -> Iterator[None]:
    """Models made within run the compiled kernels, or what runs without a compiler."""
    with nullcontext() if native else build.forced_fallback():
        yield


def prefill(
    model: LlamaModel,
    pages: StubPages,
    tokens: Tensor,
    table: Tensor,
    cuts: list[int],
    start: int = 0,
) -> Tensor:
    """Runs `tokens` in chunks of the given lengths; logits of every chunk's last token."""
    logits = []
    for length in cuts:
        batch = Batch(tokens[start : start + length], [start], [length], table[None], [True])
        logits.append(model.forward(batch, pages)[0])
        start += length
    return torch.stack(logits)
