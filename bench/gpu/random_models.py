"""Llamas of known shapes with random weights from a seed, made where they are used."""

import zlib
from typing import Any

import torch
from torch import Tensor

from bench.gpu.place import Place
from kvstore.runtime.models.config import ModelConfig, from_huggingface
from kvstore.runtime.models.device_llama import DeviceLlama
from kvstore.runtime.pages import PagePool
from kvstore.runtime.weights import EMBEDDING, HEAD

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 18,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SMOLLM2: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **SMOLLM2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}


class RandomCheckpoint:
    """Answers as a checkpoint does. A tensor depends on its name, its shape and the device only."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype, where: torch.device) -> None:
        self.config: ModelConfig = from_huggingface(shape, {})
        self._dtype, self._where = dtype, where

    def tensor(self, name: str) -> Tensor:
        """Weights of the usual size, so that activations neither vanish nor grow."""
        shape = self._shape(name)
        values = torch.empty(shape, dtype=self._dtype, device=self._where)
        if "norm" in name:
            return values.fill_(1.0)
        generator = torch.Generator(self._where).manual_seed(zlib.crc32(name.encode()))
        return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def inverse_frequencies(self) -> Tensor:
        """As the shape says."""
        return self.config.inverse_frequencies()

    def _shape(self, name: str) -> tuple[int, ...]:
        config = self.config
        hidden, wide = config.hidden_size, config.intermediate_size
        if name in (EMBEDDING, HEAD):
            return config.vocab_size, hidden
        if "norm" in name:
            return (hidden,)
        part = name.split(".")[-2]
        return {
            "q_proj": (config.heads * config.head_dim, hidden),
            "k_proj": (config.kv_heads * config.head_dim, hidden),
            "v_proj": (config.kv_heads * config.head_dim, hidden),
            "o_proj": (hidden, config.heads * config.head_dim),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }[part]


def make_model(place: Place, shape: dict[str, Any], dtype: torch.dtype) -> DeviceLlama:
    """A model on the device."""
    with place.compute.active():
        checkpoint = RandomCheckpoint(shape, dtype, place.compute.tensors)
        return DeviceLlama(checkpoint, dtype, place.compute)  # type: ignore[arg-type]


def make_pool(place: Place, config: ModelConfig, tokens: int, dtype: torch.dtype) -> PagePool:
    """Pages for so many tokens."""
    return PagePool(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        pages=-(-tokens // 16),
        page_tokens=16,
        dtype=dtype,
        compute=place.compute,
    )
