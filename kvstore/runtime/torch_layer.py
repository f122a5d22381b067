"""One Llama layer written in torch: what runs where there is no compiler.

Weights are rounded to the model's dtype and kept as float32, since few CPUs multiply bfloat16 fast.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.runtime.attention import Step, attend
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.weights import Checkpoint


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights in the model's dtype; matrices [outputs, inputs].

    `qkv` has the rows of queries, keys and values; `gate_up` those of gate and up.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


def read_layer(checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> LayerWeights:
    """Reads one layer. Raises ConfigError for a missing tensor or one of the wrong shape."""

    def weight(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{index}.{name}.weight").to(dtype)

    return LayerWeights(
        input_norm=weight("input_layernorm"),
        post_norm=weight("post_attention_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"]),
        output=weight("self_attn.o_proj"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]; tables [tokens, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the other half: what stands between the two matrices of the MLP."""
    return functional.silu(gate) * up


class TorchLayer:
    """One decoder layer."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        self._config = config
        self._input_norm = weights.input_norm.float()
        self._post_norm = weights.post_norm.float()
        self._qkv = weights.qkv.float()
        self._output = weights.output.float()
        self._gate_up = weights.gate_up.float()
        self._down = weights.down.float()

    def run(
        self,
        x: Tensor,
        step: Step,
        rotary: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        last: bool,
    ) -> Tensor:
        """x [tokens, hidden] -> the same, or [wanted, hidden] after the last layer.

        rotary: cosines and sines of the tokens; pages: this layer's keys and values.
        """
        config, (keys, values) = self._config, pages
        normed = rms_norm(x, self._input_norm, config.norm_epsilon)
        heads, kv_heads = config.heads, config.kv_heads
        mixed = functional.linear(normed, self._qkv).view(len(x), -1, config.head_dim)
        query, key = mixed[:, :heads], mixed[:, heads : heads + kv_heads]
        keys[step.pages, step.offsets] = rotate(key, *rotary).to(keys.dtype)
        values[step.pages, step.offsets] = mixed[:, heads + kv_heads :].to(values.dtype)
        query = rotate(query, *rotary)
        if last:
            x, query = x[step.wanted], query[step.wanted]
        attended = attend(query, keys, values, step, last).flatten(1)
        x = x + functional.linear(attended, self._output)
        normed = rms_norm(x, self._post_norm, config.norm_epsilon)
        gate, up = functional.linear(normed, self._gate_up).chunk(2, dim=-1)
        return x + functional.linear(silu_times(gate, up), self._down)
