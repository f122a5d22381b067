"""What the engine asks of a model. llama.py computes on the CPU, device_llama.py on a device."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvstore.runtime.attention import Batch, Pages
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.sampler import Sampling

BeforeLayer = Callable[[int], None]


class Model(Protocol):
    """A model that is ready to run. One call at a time."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def forward(
        self, batch: Batch, pages: Pages, before_layer: BeforeLayer | None = None
    ) -> Tensor:
        """Queue or run one step. Raises ConfigError or TokenError; then nothing was written.

        Returns: float32 [sequences that want logits, vocabulary], in batch order.
        """

    def sample(
        self, logits: Tensor, sampling: Sequence[Sampling], steps: Sequence[int]
    ) -> list[int]:
        """The next token of each row of `forward`'s logits; waits until the step is computed."""
