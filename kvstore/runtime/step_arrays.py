"""What a step's kernels read of its tokens and sequences, in memory of the device that stays.

Everything goes there in one copy a step, from pinned memory. The addresses never change, so a graph
that was captured over them finds the step of today: page ids are read from the block table, always.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.cuda.device import Event
from kvstore.runtime.attention import Batch, Pages, plan_step
from kvstore.runtime.compute import Compute

FEW_TOKENS = 8  # new tokens of a sequence up to which the decode kernels take it
CONTEXT_MIN = 1024  # tokens: block tables are no narrower

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Group:
    """Sequences first..first+count-1, each with `tokens` new tokens from row `row` on."""

    first: int
    count: int
    tokens: int
    row: int


@dataclass(frozen=True)
class Chunk:
    """More new tokens of one sequence: `length` rows from `row`, after `start` tokens."""

    sequence: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """A batch, its sequences ordered by their new tokens, as host arrays.

    tokens, positions, slots: one for each new token; slot = page * page_tokens + place.
    ends: tokens of each sequence with the new ones.  tables: page ids [sequences, pages].
    wanted: rows whose logits are wanted, in the order of the batch.
    """

    tokens: Numbers
    positions: Numbers
    slots: Numbers
    ends: Numbers
    tables: Numbers
    wanted: Numbers
    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.tokens) == len(self.ends)


def plan_device_step(batch: Batch, pool: Pages, vocab_size: int, positions_max: int) -> StepPlan:
    """Check a batch as attention.plan_step does, with its errors; order it for the kernels."""
    lengths = np.array(batch.lengths, np.int64)
    order = np.argsort(lengths, kind="stable")
    ordered = batch
    if len(order) == len(batch.starts) and (order != np.arange(len(order))).any():
        ends = np.cumsum(lengths)
        rows = [np.arange(ends[i] - lengths[i], ends[i]) for i in order.tolist()]
        places = order.tolist()
        ordered = Batch(
            tokens=batch.tokens[torch.from_numpy(np.concatenate(rows))],
            starts=[batch.starts[i] for i in places],
            lengths=[batch.lengths[i] for i in places],
            tables=batch.tables[torch.from_numpy(order)],
            wants_logits=[batch.wants_logits[i] for i in places],
        )
    step = plan_step(ordered, pool, vocab_size, positions_max)
    firsts, starts, counts = (a.tolist() for a in (step.firsts, step.starts, step.lengths))
    place = np.argsort(order, kind="stable")  # of a sequence of the batch, in `ordered`
    wanting = place[np.array(batch.wants_logits, bool)]
    groups = []
    for tokens in sorted({n for n in counts if n <= FEW_TOKENS}):
        first = counts.index(tokens)
        groups.append(Group(first, counts.count(tokens), tokens, firsts[first]))
    return StepPlan(
        tokens=ordered.tokens.numpy(),
        positions=step.positions.numpy(),
        slots=(step.pages * pool.page_tokens + step.offsets).numpy(),
        ends=(step.starts + step.lengths).numpy(),
        tables=step.tables.numpy(),
        wanted=(step.firsts + step.lengths - 1).numpy()[wanting],
        groups=tuple(groups),
        chunks=tuple(
            Chunk(sequence, firsts[sequence], starts[sequence], n)
            for sequence, n in enumerate(counts)
            if n > FEW_TOKENS
        ),
    )


def bucket(count: int, least: int = 1) -> int:
    """The smallest of least, 2 * least, 4 * least, ... that is not below `count`."""
    while least < count:
        least *= 2
    return least


def table_width(ends: Numbers, page_tokens: int) -> int:
    """Pages of a row of a block table that these sequences fit in; few different ones."""
    return bucket(-(-int(ends.max()) // page_tokens), -(-CONTEXT_MIN // page_tokens))


class StepArrays:
    """Tensors for up to `rows` new tokens of `sequences` sequences with `width` pages each.

    slots, wanted: int64 [rows], [sequences].  tokens, positions: int32 [rows].
    lengths: int32 [sequences].  table: int32 [sequences, width].
    """

    def __init__(self, compute: Compute, rows: int, sequences: int, width: int) -> None:
        self._compute = compute
        self.rows, self.sequences, self.width = rows, sequences, width
        parts = {
            "slots": (np.int64, (rows,)),
            "wanted": (np.int64, (sequences,)),
            "tokens": (np.int32, (rows,)),
            "positions": (np.int32, (rows,)),
            "lengths": (np.int32, (sequences,)),
            "table": (np.int32, (sequences, width)),
        }
        sizes = [np.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in parts.values()]
        self._pinned = compute.device.allocate_pinned(sum(sizes))
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=compute.tensors)
        self._uploaded: Event | None = None
        self._host: dict[str, Numbers] = {}
        tensors: dict[str, Tensor] = {}
        at = 0
        for (name, (kind, shape)), size in zip(parts.items(), sizes, strict=True):
            view = self._pinned.view()[at : at + size]
            self._host[name] = view.view(kind).reshape(shape)
            wide = torch.int64 if kind is np.int64 else torch.int32
            tensors[name] = self._memory[at : at + size].view(wide).view(shape)
            at += size
        self.slots, self.wanted = tensors["slots"], tensors["wanted"]
        self.tokens, self.positions = tensors["tokens"], tensors["positions"]
        self.lengths, self.table = tensors["lengths"], tensors["table"]

    def holds(self, plan: StepPlan, width: int) -> bool:
        """Whether a step fits."""
        fits = len(plan.tokens) <= self.rows and len(plan.ends) <= self.sequences
        return fits and width <= self.width

    def fill(self, plan: StepPlan) -> None:
        """Queue the copy of a step's numbers. Rows beyond it write nothing, and read nothing."""
        if self._uploaded is not None:
            self._uploaded.wait()  # The copy before may still read the pinned memory.
        host, rows, sequences = self._host, len(plan.tokens), len(plan.ends)
        host["slots"].fill(-1)
        for name in ("wanted", "tokens", "positions", "lengths"):
            host[name].fill(0)  # Of the table nothing is read beyond a sequence's length.
        host["slots"][:rows], host["wanted"][: len(plan.wanted)] = plan.slots, plan.wanted
        host["tokens"][:rows], host["positions"][:rows] = plan.tokens, plan.positions
        host["lengths"][:sequences] = plan.ends
        width = min(self.width, plan.tables.shape[1])
        host["table"][:sequences, :width] = plan.tables[:, :width]
        self._compute.upload(self._memory, self._pinned)
        self._uploaded = self._compute.stream.record()

    def close(self) -> None:
        """Give the pinned memory back."""
        if self._uploaded is not None:
            self._uploaded.wait()
        self._host.clear()
        self._pinned.free()
