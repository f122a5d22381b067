"""The Llama family on a device: torch's products, the store's kernels over the pages."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.cuda.device import DeviceError
from kvstore.runtime.attention import Batch, Pages
from kvstore.runtime.compute import Compute
from kvstore.runtime.decode_steps import DecodeSteps
from kvstore.runtime.device_layer import DeviceLayer, DeviceStep
from kvstore.runtime.device_sampler import sample_on_device
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.models.llama import Progress, check_layer, check_pages, shaped
from kvstore.runtime.models.model import BeforeLayer
from kvstore.runtime.paged_kernels import KERNEL_DTYPES, PagedKernels
from kvstore.runtime.sampler import Sampling
from kvstore.runtime.step_arrays import (
    Group,
    StepArrays,
    StepPlan,
    bucket,
    plan_device_step,
    table_width,
)
from kvstore.runtime.torch_layer import read_layer, rms_norm
from kvstore.runtime.weights import EMBEDDING, HEAD, NORM, Checkpoint
from kvstore.tiers.errors import ConfigError


class _Pool(NamedTuple):
    """The pages that the decode graphs were captured over."""

    pages: Pages
    steps: DecodeSteps


class DeviceLlama:
    """A Llama model on a device. Everything is in `dtype`: float32, bfloat16 or float16.

    Belongs to one thread; a step is queued, and only `sample` waits for it. Tokens are the same
    with and without graphs; logits depend on a step's shape as torch's products do.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        compute: Compute,
        progress: Progress | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        """Reads all weights, layer by layer, onto the device; `progress` gets (done, layers).

        Raises ConfigError for another dtype, a shape without kernels, and for damaged files.
        """
        if dtype not in KERNEL_DTYPES:
            raise ConfigError(f"A device computes in float32, bfloat16 or float16, not in {dtype}.")
        config = checkpoint.config
        self.config: ModelConfig = config
        self.dtype = dtype
        self._compute = compute
        self._graphs = graphs
        self._arrays: StepArrays | None = None  # of steps that are no graph
        self._pool: _Pool | None = None
        with compute.active(), torch.inference_mode():
            angles = torch.outer(
                torch.arange(config.context_length).float(), checkpoint.inverse_frequencies()
            )
            rotary = torch.cat([angles.cos(), angles.sin()], dim=1).to(compute.tensors)
            self._kernels = PagedKernels(compute, config, dtype, rotary)
            embedding = shaped(
                checkpoint.tensor(EMBEDDING).to(dtype), (config.vocab_size, config.hidden_size)
            )
            self._embedding = embedding.to(compute.tensors)
            norm = shaped(checkpoint.tensor(NORM).to(dtype), (config.hidden_size,))
            self._norm = norm.to(compute.tensors)
            self._layers: list[DeviceLayer] = []
            for index in range(config.layers):
                weights = read_layer(checkpoint, index, dtype)
                check_layer(config, weights)
                self._layers.append(DeviceLayer(compute, config, self._kernels, weights))
                if progress:
                    progress(index + 1, config.layers)
            self._head = self._embedding
            if not config.tied_embeddings:
                head = checkpoint.tensor(HEAD).to(dtype)
                self._head = shaped(head, tuple(embedding.shape)).to(compute.tensors)

    def forward(
        self, batch: Batch, pages: Pages, before_layer: BeforeLayer | None = None
    ) -> Tensor:
        """Queue one step: see Model.forward. `before_layer(i)` is called as layer i is queued.

        The logits lie on the device, until the next step at most.
        """
        check_pages(self.config, self.dtype, pages)
        config = self.config
        plan = plan_device_step(batch, pages, config.vocab_size, config.context_length)
        with self._compute.active(), torch.inference_mode():
            steps = self._decode_steps(pages)
            if before_layer is None and steps.takes(plan):
                logits = steps.run(plan, pages.page_tokens)
                if len(plan.wanted) < len(plan.ends):
                    logits = logits[torch.from_numpy(plan.wanted).to(logits.device)]
                return logits[: len(plan.wanted)]
            return self._run_once(plan, pages, before_layer)

    def sample(
        self, logits: Tensor, sampling: Sequence[Sampling], steps: Sequence[int]
    ) -> list[int]:
        """The next token of each row; only these come to the host, with the kernels' error word.

        Raises DeviceError when a kernel met a page that is not in the pool.
        """
        with self._compute.active(), torch.inference_mode():
            chosen = sample_on_device(logits, sampling, steps)
            *tokens, error = torch.cat([chosen, self._kernels.error.long()]).tolist()
        if error:
            raise DeviceError(f"a kernel was given a page beyond the pool, at place {error - 1}")
        return tokens

    # --- inside

    def _decode_steps(self, pages: Pages) -> DecodeSteps:
        """Those over these pages: a graph has their addresses in it, so others begin anew."""
        if self._pool is None or self._pool.pages is not pages:

            def work(arrays: StepArrays) -> Tensor:
                group = Group(0, arrays.sequences, 1, 0)
                return self._run(DeviceStep(arrays, (group,), (), None), arrays.rows, pages, None)

            self._pool = _Pool(pages, DecodeSteps(self._compute, work, self._graphs))
        return self._pool.steps

    def _run_once(self, plan: StepPlan, pages: Pages, before_layer: BeforeLayer | None) -> Tensor:
        arrays = self._arrays_for(plan, pages.page_tokens)
        arrays.fill(plan)
        wanted = arrays.wanted[: len(plan.wanted)]
        step = DeviceStep(arrays, plan.groups, plan.chunks, wanted)
        return self._run(step, len(plan.tokens), pages, before_layer)

    def _arrays_for(self, plan: StepPlan, page_tokens: int) -> StepArrays:
        width, old = table_width(plan.ends, page_tokens), self._arrays
        if old is not None and old.holds(plan, width):
            return old
        rows, sequences = bucket(len(plan.tokens), 64), bucket(len(plan.ends), 8)
        if old is not None:
            rows, sequences = max(rows, old.rows), max(sequences, old.sequences)
            width = max(width, old.width)
            old.close()
        self._arrays = StepArrays(self._compute, rows, sequences, width)
        return self._arrays

    def _run(
        self,
        step: DeviceStep,
        rows: int,
        pages: Pages,
        before_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """From embeddings to logits, for the first `rows` rows of the step's arrays."""
        x = functional.embedding(step.arrays.tokens[:rows], self._embedding)
        for index, layer in enumerate(self._layers):
            if before_layer:
                before_layer(index)
            last = index == len(self._layers) - 1
            x = layer.run(x, step, pages.keys[index], pages.values[index], last)
        normed = rms_norm(x, self._norm, self.config.norm_epsilon)
        return functional.linear(normed, self._head).float()
