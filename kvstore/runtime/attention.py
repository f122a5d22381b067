"""Paged attention: what a step needs to know about its sequences, and the form written in torch.

The compiled form is in kernels.cpp; both read keys and values where they lie, page by page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvstore.tiers.errors import ConfigError, TokenError


class Pages(Protocol):
    """The page pool as the model sees it. `keys[i]` and `values[i]`, one pair a layer:
    [pages, page_tokens, kv_heads, head_dim], contiguous within a page.
    """

    @property
    def keys(self) -> Sequence[Tensor]: ...
    @property
    def values(self) -> Sequence[Tensor]: ...
    @property
    def page_tokens(self) -> int: ...


@dataclass(frozen=True)
class Batch:
    """One step: the new tokens of several sequences, one after the other.

    tokens        int64 [total]
    starts        per sequence: how many tokens have their keys and values in its pages already
    lengths       per sequence: new tokens, at least 1 (1 is a decode step, or a prefill's rest)
    tables        int64 [sequences, max_pages]: page ids in order; what lies past the end is ignored
    wants_logits  per sequence: whether its last token's logits are wanted
    """

    tokens: Tensor
    starts: list[int]
    lengths: list[int]
    tables: Tensor
    wants_logits: list[bool]


@dataclass(frozen=True)
class Step:
    """What every layer of one step shares. All int64, one entry a token or a sequence.

    positions  [total]      a token's place in its sequence
    pages      [total]      the page its keys and values go to
    offsets    [total]      and its place in that page
    firsts     [sequences]  where a sequence's tokens begin in the batch
    starts     [sequences]  tokens already in its pages
    lengths    [sequences]  new tokens
    wanted     [wanted]     rows of the tokens whose logits are wanted
    wanted_of  [wanted]     and their sequences
    """

    positions: Tensor
    pages: Tensor
    offsets: Tensor
    firsts: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    wanted: Tensor
    wanted_of: Tensor


def plan_step(batch: Batch, pool: Pages, vocab_size: int, positions_max: int) -> Step:
    """Checks a batch against the pool and works out where every token goes.

    Raises TokenError for token ids outside the vocabulary, ConfigError for a batch whose parts do
    not fit together, page ids outside the pool, or a sequence longer than the model's context.
    """
    count = len(batch.starts)
    starts = torch.tensor(batch.starts, dtype=torch.int64)
    lengths = torch.tensor(batch.lengths, dtype=torch.int64)
    ends = starts + lengths
    page_tokens = pool.page_tokens
    needed = (ends + page_tokens - 1) // page_tokens
    tables = batch.tables.contiguous()
    if not (len(batch.lengths) == len(batch.wants_logits) == count == tables.shape[0] > 0):
        raise ConfigError("Every sequence of a batch needs a start, a length, a table and a flag.")
    if int(lengths.min()) < 1 or int(starts.min()) < 0 or int(lengths.sum()) != len(batch.tokens):
        raise ConfigError("Give each sequence at least one token, and as many as its length says.")
    if int(ends.max()) > positions_max:
        raise ConfigError(f"The model's context is {positions_max} tokens; shorten the sequence.")
    if int(needed.max()) > tables.shape[1]:
        raise ConfigError("A block table is shorter than its sequence; give it more pages.")
    used = torch.arange(tables.shape[1]) < needed[:, None]
    ids = tables[used]
    if int(ids.min()) < 0 or int(ids.max()) >= pool.keys[0].shape[0]:
        raise ConfigError("A block table names a page that the pool does not have.")
    if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= vocab_size:
        raise TokenError(f"Token ids must lie in 0..{vocab_size - 1}; check the model.")
    firsts = torch.cumsum(lengths, 0) - lengths
    sequence = torch.repeat_interleave(torch.arange(count), lengths)
    positions = torch.arange(len(batch.tokens)) - firsts[sequence] + starts[sequence]
    wanted_of = torch.tensor(batch.wants_logits).nonzero()[:, 0]
    return Step(
        positions=positions,
        pages=tables[sequence, positions // page_tokens],
        offsets=positions % page_tokens,
        firsts=firsts,
        starts=starts,
        lengths=lengths,
        tables=tables,
        wanted=(firsts + lengths - 1)[wanted_of],
        wanted_of=wanted_of,
    )


def attend(queries: Tensor, keys: Tensor, values: Tensor, step: Step, last_only: bool) -> Tensor:
    """Causal attention of a step's tokens over their sequences' pages, in torch.

    queries [rows, heads, head_dim], not scaled, float32; keys and values one layer's pages. With
    `last_only` the rows are the wanted tokens only. Returns float32 [rows, heads, head_dim].
    """
    output = torch.empty_like(queries)
    chosen = step.wanted_of.tolist() if last_only else range(len(step.starts))
    row = 0
    for sequence in chosen:
        length = 1 if last_only else int(step.lengths[sequence])
        end = int(step.starts[sequence] + step.lengths[sequence])
        table = step.tables[sequence, : -(-end // keys.shape[1])]
        past = keys[table].flatten(0, 1)[:end].float().transpose(0, 1)
        content = values[table].flatten(0, 1)[:end].float().transpose(0, 1)
        visible = torch.arange(end) <= torch.arange(end - length, end)[:, None]
        mixed = functional.scaled_dot_product_attention(
            queries[row : row + length].transpose(0, 1)[None],
            past[None],
            content[None],
            attn_mask=visible,
            enable_gqa=True,
        )
        output[row : row + length] = mixed[0].transpose(0, 1)
        row += length
    return output
