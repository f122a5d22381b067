"""The Llama family over paged keys and values."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.runtime.attention import Batch, Pages, Step, plan_step
from kvstore.runtime.kernels import (
    KernelLayer,
    KernelModel,
    KernelStep,
    PackedWeights,
    load_kernels,
    native_rms_norm,
)
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.sampler import Sampling, sample
from kvstore.runtime.torch_layer import LayerWeights, TorchLayer, read_layer, rms_norm
from kvstore.runtime.weights import EMBEDDING, HEAD, NORM, Checkpoint
from kvstore.tiers.errors import ConfigError

__all__ = ["Batch", "LlamaModel"]

DTYPES = (torch.float32, torch.bfloat16)
Progress = Callable[[int, int], None]


class LlamaModel:
    """A Llama model, ready to run on the CPU: in compiled kernels, or in torch without a compiler.

    `dtype` is the type of the weights and of the keys and values in the pages. What lies between
    (the residual stream, sums, scores) is float32 in both. One forward at a time.

    With the kernels (`native`), a token's keys, values and logits depend on the tokens before it
    and on nothing else, bit for bit: not on how a prefill was cut, not on other sequences of
    a batch, not on the number of threads. In torch they depend on the shapes of each step.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        """Reads and packs all weights; `progress` gets (layers done, layers).

        Raises ConfigError for a dtype other than float32 and bfloat16 and for damaged files.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"The runtime computes in float32 or bfloat16, not in {dtype}.")
        config = checkpoint.config
        self.config: ModelConfig = config
        self.dtype = dtype
        self._embedding = shaped(
            checkpoint.tensor(EMBEDDING).to(dtype), (config.vocab_size, config.hidden_size)
        )
        self._norm = shaped(checkpoint.tensor(NORM).to(dtype).float(), (config.hidden_size,))
        positions = torch.arange(config.context_length).float()
        angles = torch.outer(positions, checkpoint.inverse_frequencies())
        self._rotary = angles.cos(), angles.sin()
        library = load_kernels()
        self._kernels = library and KernelModel(library, config, dtype, self._rotary)
        self._native_layers: list[KernelLayer] = []
        self._torch_layers: list[TorchLayer] = []
        for index in range(config.layers):
            self._add_layer(read_layer(checkpoint, index, dtype))
            if progress:
                progress(index + 1, config.layers)
        head = self._embedding if config.tied_embeddings else checkpoint.tensor(HEAD).to(dtype)
        head = shaped(head, (config.vocab_size, config.hidden_size))
        self._head = PackedWeights(library, head) if library else head.float()

    @property
    def native(self) -> bool:
        """Whether the compiled kernels run."""
        return self._kernels is not None

    @torch.inference_mode()
    def forward(
        self, batch: Batch, pages: Pages, before_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """Runs one step: writes the new tokens' keys and values into the pages, returns logits.

        `before_layer(i)` is called before layer i touches its pages, so that a load can be waited
        for layer by layer. Raises ConfigError or TokenError for a batch that does not fit; then
        nothing was written.

        Returns: float32 [sequences that want logits, vocabulary], in batch order.
        """
        check_pages(self.config, self.dtype, pages)
        step = plan_step(batch, pages, self.config.vocab_size, self.config.context_length)
        x = self._embedding[batch.tokens].float()
        if self._kernels:
            x = self._run_native(self._kernels, x, step, pages, before_layer)
        else:
            x = self._run_torch(x, step, pages, before_layer)
        return self._logits(x)

    def sample(
        self, logits: Tensor, sampling: Sequence[Sampling], steps: Sequence[int]
    ) -> list[int]:
        """The next token of each row of logits: see sampler.sample."""
        tokens: list[int] = sample(logits, sampling, steps).tolist()
        return tokens

    def _run_native(
        self,
        kernels: KernelModel,
        x: Tensor,
        step: Step,
        pages: Pages,
        before_layer: Callable[[int], None] | None,
    ) -> Tensor:
        run = KernelStep(kernels, step, pages.page_tokens, x)
        for index, layer in enumerate(self._native_layers):
            if before_layer:
                before_layer(index)
            # Only the wanted rows leave the last layer; all of its keys and values are written.
            last = index == len(self._native_layers) - 1
            run.run(layer, pages.keys[index], pages.values[index], last)
        return x[: len(step.wanted)]

    def _run_torch(
        self, x: Tensor, step: Step, pages: Pages, before_layer: Callable[[int], None] | None
    ) -> Tensor:
        rotary = (self._rotary[0][step.positions], self._rotary[1][step.positions])
        for index, layer in enumerate(self._torch_layers):
            if before_layer:
                before_layer(index)
            last = index == len(self._torch_layers) - 1
            x = layer.run(x, step, rotary, (pages.keys[index], pages.values[index]), last)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return torch.empty(0, self.config.vocab_size)
        epsilon = self.config.norm_epsilon
        if self._kernels and isinstance(self._head, PackedWeights):
            kernels = self._kernels
            normed = native_rms_norm(kernels.library, x, self._norm, epsilon, kernels.rows)
            return self._head.linear(normed)
        assert isinstance(self._head, Tensor)
        return functional.linear(rms_norm(x, self._norm, epsilon), self._head)

    def _add_layer(self, weights: LayerWeights) -> None:
        check_layer(self.config, weights)
        if self._kernels:
            matrices = (weights.qkv, weights.output, weights.gate_up, weights.down)
            norms = (weights.input_norm, weights.post_norm)
            self._native_layers.append(KernelLayer(self._kernels.library, norms, matrices))
        else:
            self._torch_layers.append(TorchLayer(self.config, weights))


def check_layer(config: ModelConfig, weights: LayerWeights) -> None:
    """Raises ConfigError for a layer's weight whose shape is not that of the model."""
    hidden, width = config.hidden_size, config.heads * config.head_dim
    shaped(weights.input_norm, (hidden,))
    shaped(weights.post_norm, (hidden,))
    shaped(weights.qkv, (width + 2 * config.kv_heads * config.head_dim, hidden))
    shaped(weights.output, (hidden, width))
    shaped(weights.gate_up, (2 * config.intermediate_size, hidden))
    shaped(weights.down, (hidden, config.intermediate_size))


def check_pages(config: ModelConfig, dtype: torch.dtype, pages: Pages) -> None:
    """Raises ConfigError for pages that were made for another model, or are scattered."""
    shape = (pages.page_tokens, config.kv_heads, config.head_dim)
    if len(pages.keys) != config.layers or len(pages.values) != config.layers:
        raise ConfigError("The page pool has another number of layers than the model.")
    for keys, values in zip(pages.keys, pages.values, strict=True):
        fits = keys.shape == values.shape and keys.stride() == values.stride()
        if not fits or keys.shape[1:] != shape or {keys.dtype, values.dtype} != {dtype}:
            raise ConfigError("The page pool has other pages than the model; make one for it.")
        if keys.stride()[1:] != (shape[1] * shape[2], shape[2], 1):
            raise ConfigError("A page must be contiguous in memory; make the pool so.")


def shaped(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight. Raises ConfigError where its shape is another one."""
    if tuple(weight.shape) != shape:
        raise ConfigError(
            f"A weight has shape {tuple(weight.shape)} where {shape} is due; fetch the model again."
        )
    return weight
