"""One Llama layer on a device: torch for norms and products, kernels for what touches pages.

Everything is computed in the model's dtype, as models are trained and served; sums within a product
or a norm are float32 inside torch.
"""

from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import functional

from kvstore.runtime.chunk_attention import attend_chunk
from kvstore.runtime.compute import Compute
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.paged_kernels import PagedKernels
from kvstore.runtime.step_arrays import Chunk, Group, StepArrays
from kvstore.runtime.torch_layer import LayerWeights, rms_norm, silu_times


@dataclass(frozen=True)
class DeviceStep:
    """What every layer of one step shares.

    arrays: filled for it.  groups, chunks: how its sequences are attended to.
    wanted: int64 rows that leave the last layer; None for all of them.
    """

    arrays: StepArrays
    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]
    wanted: Tensor | None


class DeviceLayer:
    """One decoder layer. Takes the weights over, to the device."""

    def __init__(
        self, compute: Compute, config: ModelConfig, kernels: PagedKernels, weights: LayerWeights
    ) -> None:
        self._config = config
        self._kernels = kernels
        moved = {f.name: getattr(weights, f.name).to(compute.tensors) for f in fields(weights)}
        self._weights = LayerWeights(**moved)

    def run(self, x: Tensor, step: DeviceStep, keys: Tensor, values: Tensor, last: bool) -> Tensor:
        """x [rows, hidden] -> the same, or [wanted, hidden] after the last layer."""
        config, weights, kernels = self._config, self._weights, self._kernels
        normed = rms_norm(x, weights.input_norm, config.norm_epsilon)
        mixed = functional.linear(normed, weights.qkv)
        kernels.rope_write(mixed, step.arrays, keys, values)
        width = config.heads * config.head_dim
        attended = mixed.new_empty(len(x), width)
        for group in step.groups:
            kernels.decode(mixed, attended, step.arrays, group, keys, values)
        for chunk in step.chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            queries = mixed[rows, :width].view(chunk.length, config.heads, config.head_dim)
            pages = step.arrays.table[chunk.sequence]
            context = chunk.start + chunk.length
            attended[rows] = attend_chunk(queries, keys, values, pages, context).flatten(1)
        if last and step.wanted is not None:
            x, attended = x[step.wanted], attended[step.wanted]
        x = x + functional.linear(attended, weights.output)
        normed = rms_norm(x, weights.post_norm, config.norm_epsilon)
        gate, up = functional.linear(normed, weights.gate_up).chunk(2, dim=-1)
        return x + functional.linear(silu_times(gate, up), weights.down)
