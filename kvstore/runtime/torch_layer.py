"""One Llama layer written in torch: what runs where there is no compiler.

Weights are rounded to the model's dtype and kept as float32, since few CPUs multiply bfloat16 fast.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.runtime.attention import Step, attend
from kvstore.runtime.weights import Checkpoint


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

    def __init__(self, checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> None:
        def weight(name: str) -> Tensor:
            return checkpoint.tensor(f"model.layers.{index}.{name}.weight").to(dtype).float()

        config = checkpoint.config
        self._config = config
        self._input_norm = weight("input_layernorm")
        self._post_norm = weight("post_attention_layernorm")
        self._qkv = torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"])
        self._output = weight("self_attn.o_proj")
        self._gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])
        self._down = weight("mlp.down_proj")

    def run(
        self,
        x: Tensor,
        step: Step,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        last: bool,
    ) -> Tensor:
        """x [tokens, hidden] -> the same, or [wanted, hidden] after the last layer."""
        config = self._config
        normed = rms_norm(x, self._input_norm, config.norm_epsilon)
        heads, kv_heads = config.heads, config.kv_heads
        mixed = functional.linear(normed, self._qkv).view(len(x), -1, config.head_dim)
        query, key, value = torch.split(mixed, [heads, kv_heads, kv_heads], dim=1)
        keys[step.pages, step.offsets] = rotate(key, *rotary).to(keys.dtype)
        values[step.pages, step.offsets] = value.to(values.dtype)
        query = rotate(query, *rotary)
        if last:
            x, query = x[step.wanted], query[step.wanted]
        attended = attend(query, keys, values, step, last).flatten(1)
        x = x + functional.linear(attended, self._output)
        normed = rms_norm(x, self._post_norm, config.norm_epsilon)
        gate, up = functional.linear(normed, self._gate_up).chunk(2, dim=-1)
        return x + functional.linear(silu_times(gate, up), self._down)
