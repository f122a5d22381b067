"""The store's kernels over an engine's pages: rotary embedding and write, decode attention.

Launches with grids that follow from sizes alone, never from what a table or a length holds, so that
a graph may repeat them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvstore.cuda.device import Span
from kvstore.cuda.kernel_table import (
    DECODE_THREADS,
    HEAD_DIMS,
    KERNELS,
    TILE_ROWS,
    decode_shared_bytes,
)
from kvstore.runtime.compute import Compute
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.step_arrays import Group, StepArrays
from kvstore.tiers.errors import ConfigError

KERNEL_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPLIT_TOKENS_MIN = 256  # A shorter part of a context is not worth a block of threads.
SPLITS_MAX = 64
SPLIT_STEP = 64  # tokens that the four warps of a block read at a time
BLOCKS_A_PROCESSOR = 4  # blocks of threads wanted of a launch: two at a time, twice


def split_context(context: int, blocks: int, processors: int) -> tuple[int, int]:
    """(splits, tokens in each) of a context, for a launch of `blocks` blocks without splits."""
    wanted = -(-BLOCKS_A_PROCESSOR * processors // max(1, blocks))
    most = max(1, min(SPLITS_MAX, context // SPLIT_TOKENS_MIN))
    splits = min(wanted, most)
    tokens = -(-context // (splits * SPLIT_STEP)) * SPLIT_STEP
    return -(-context // tokens), tokens


class PagedKernels:
    """The kernels of one model's shape and type, over pages [pages, tokens, kv_heads, head_dim].

    rotary: float32 [positions, head_dim]: cosines, then sines. Raises ConfigError for a head_dim
    that there is no kernel for.
    """

    def __init__(
        self, compute: Compute, config: ModelConfig, dtype: torch.dtype, rotary: Tensor
    ) -> None:
        if config.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"Heads of {config.head_dim} have no kernel on this device, only {HEAD_DIMS}; "
                "run this model on the CPU."
            )
        self._compute = compute
        self._config = config
        self._dtype = KERNEL_DTYPES[dtype]
        self._rotary = rotary
        # A kernel that meets a page beyond the pool says so here. The host looks at it in passing.
        self.error = torch.zeros(1, dtype=torch.int32, device=compute.tensors)

    def rope_write(self, mixed: Tensor, step: StepArrays, keys: Tensor, values: Tensor) -> None:
        """Rotate queries in `mixed` [rows, heads + 2 * kv_heads, head_dim]; write keys and values.

        Rows of `mixed` are those of `step`; a row whose slot is negative writes no page.
        """
        config, rows = self._config, mixed.shape[0]
        name = f"rope_write_{self._dtype}"
        self._compute.launch(
            name,
            (rows,),
            KERNELS[name].threads,
            [
                *(mixed, self._rotary, step.positions, step.slots, keys, values, self.error),
                *(*keys.stride()[:3], *values.stride()[:3], config.heads, config.kv_heads),
                *(config.head_dim, config.head_dim, 0, keys.shape[1], keys.shape[0]),
            ],
            _written(step.slots[:rows], keys, values),
        )

    def decode(
        self,
        mixed: Tensor,
        output: Tensor,
        step: StepArrays,
        group: Group,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Attention of a group's queries in `mixed` over their pages, into the rows of `output`.

        Reads up to step.width pages of a sequence, and as many tokens as its length says.
        """
        config, dtype = self._config, self._dtype
        rows, page_tokens = group.count * group.tokens, keys.shape[1]
        tiles = -(-group.tokens * config.group // TILE_ROWS[dtype])
        across = config.kv_heads * tiles
        context = step.width * page_tokens
        splits, split_tokens = split_context(
            context, across * group.count, self._compute.processors
        )
        found = rows * config.heads * (splits if splits > 1 else 0)
        partial = mixed.new_empty(found, config.head_dim, dtype=torch.float32)
        sums = mixed.new_empty(found, 2, dtype=torch.float32)
        wide = mixed.stride(0)
        last = group.first + group.count
        lengths, table = step.lengths[group.first : last], step.table[group.first : last]
        target = output[group.row : group.row + rows]
        self._compute.launch(
            f"decode_{dtype}_{config.head_dim}",
            (splits, across, group.count),
            DECODE_THREADS,
            [
                *(mixed[group.row :], keys, values, table, lengths, partial, sums, target),
                *(self.error, wide, *keys.stride()[:3], *values.stride()[:3], config.heads),
                *(config.kv_heads, group.tokens, page_tokens, step.width, keys.shape[0]),
                *(split_tokens, 0, config.head_dim**-0.5),
            ],
            _read(table, lengths, keys, values),
            shared_bytes=decode_shared_bytes(dtype, config.head_dim),
        )
        if splits > 1:
            name = f"combine_{dtype}"
            self._compute.launch(
                name,
                (rows * config.heads,),
                KERNELS[name].threads,
                [partial, sums, target, splits, config.head_dim],
            )


def page_spans(pages: Sequence[int], part: Tensor, writes: bool = False) -> list[Span]:
    """What whoever reads, or writes, these pages of one layer's keys or values touches."""
    size = part.stride(0) * part.itemsize
    return [Span(part.data_ptr() + page * size, part[0].nbytes, writes) for page in pages]


def _written(slots: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Sequence[Span]]:
    def spans() -> Sequence[Span]:
        touched = []
        for slot in slots.tolist():
            page, place = divmod(slot, keys.shape[1])
            for part in (keys, values) if slot >= 0 else ():
                token = part[page, place]
                touched.append(Span(token.data_ptr(), token.nbytes, True))
        return touched

    return spans


def _read(
    table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Callable[[], Sequence[Span]]:
    def spans() -> Sequence[Span]:
        touched = []
        for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
            pages = row[: -(-length // keys.shape[1])]
            touched += [*page_spans(pages, keys), *page_spans(pages, values)]
        return touched

    return spans
