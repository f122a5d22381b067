"""The Llama family over paged keys and values."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstore.runtime.attention import Batch, Pages, Step, plan_step
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.torch_layer import TorchLayer, rms_norm
from kvstore.runtime.weights import EMBEDDING, HEAD, NORM, Checkpoint
from kvstore.tiers.errors import ConfigError

__all__ = ["Batch", "LlamaModel"]

DTYPES = (torch.float32, torch.bfloat16)
Progress = Callable[[int, int], None]


class LlamaModel:
    """A Llama model, ready to run on the CPU.

    `dtype` is the type of the weights and of the keys and values in the pages. What lies between
    (the residual stream, queries, sums) is float32 in both. One forward at a time.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        """Reads and packs all weights; `progress` gets (layers done, layers).

        Raises ConfigError for a dtype other than float32 and bfloat16 and for damaged files.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"The runtime computes in float32 or bfloat16, not in {dtype}.")
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        config = self.config
        self._embedding = checkpoint.tensor(EMBEDDING).to(dtype)
        self._norm = checkpoint.tensor(NORM).to(dtype).float()
        angles = torch.outer(
            torch.arange(config.context_length).float(), checkpoint.inverse_frequencies()
        )
        self._cosines, self._sines = angles.cos(), angles.sin()
        self._layers: list[TorchLayer] = []
        for index in range(config.layers):
            self._layers.append(TorchLayer(checkpoint, index, dtype))
            if progress:
                progress(index + 1, config.layers)
        head = self._embedding if config.tied_embeddings else checkpoint.tensor(HEAD).to(dtype)
        self._head = head.float()

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
        step = plan_step(batch, pages, self.config.vocab_size, self.config.context_length)
        self._check_pages(pages)
        x = self._embedding[batch.tokens].float()
        rotary = (self._cosines[step.positions], self._sines[step.positions])
        for index, layer in enumerate(self._layers):
            if before_layer:
                before_layer(index)
            # Only the wanted rows leave the last layer; all of its keys and values are written.
            last = index == len(self._layers) - 1
            x = layer.run(x, step, rotary, pages.keys[index], pages.values[index], last)
        return self._logits(x, step)

    def _logits(self, x: Tensor, step: Step) -> Tensor:
        if len(step.wanted) == 0:
            return torch.empty(0, self.config.vocab_size)
        normed = rms_norm(x, self._norm, self.config.norm_epsilon)
        return torch.nn.functional.linear(normed, self._head)

    def _check_pages(self, pages: Pages) -> None:
        config = self.config
        shape = (pages.page_tokens, config.kv_heads, config.head_dim)
        if len(pages.keys) != config.layers or len(pages.values) != config.layers:
            raise ConfigError("The page pool has another number of layers than the model.")
        for part in (pages.keys[0], pages.values[0]):
            if tuple(part.shape[1:]) != shape or part.dtype != self.dtype:
                raise ConfigError("The page pool has other pages than the model; make one for it.")
