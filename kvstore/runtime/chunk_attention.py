"""Attention of a chunk of a prompt over its whole context: the pages gathered, and torch's SDPA.

The chunk is the end of its context, so the mask is causal and aligned to the lower right. torch's
`is_causal` is aligned to the upper left; `causal_lower_right` says what is meant, and its flash
kernel needs no mask in memory. float32 has no flash kernel: there the mask and the scores are real,
and few queries are taken at a time. Nothing has to be merged: gathered, prefix and chunk are one.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

SCORES_MAX = 1 << 26  # numbers of scores in memory at a time, where there is no flash kernel


def gather_pages(part: Tensor, pages: Tensor, tokens: int) -> Tensor:
    """The first `tokens` rows of these pages of one layer's keys or values, one after the other."""
    return part.index_select(0, pages).flatten(0, 1)[:tokens]


def attend_chunk(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    context: int,
    scores_max: int = SCORES_MAX,
) -> Tensor:
    """Causal attention of the newest tokens of a context: [rows, heads, head_dim].

    queries [rows, heads, head_dim], rotated, not scaled; the last `rows` of `context` tokens.
    keys, values: one layer's pages, the chunk's own tokens in them already.
    pages: this sequence's.
    """
    rows, heads, _ = queries.shape
    count = -(-context // keys.shape[1])
    past = gather_pages(keys, pages[:count], context).transpose(0, 1)[None]
    content = gather_pages(values, pages[:count], context).transpose(0, 1)[None]
    asked = queries.transpose(0, 1)[None]
    flash = queries.dtype != torch.float32
    step = rows if flash else max(1, scores_max // (heads * context))
    parts = []
    for first in range(0, rows, step):
        last = min(first + step, rows)
        seen = context - rows + last
        parts.append(
            functional.scaled_dot_product_attention(
                asked[:, :, first:last],
                past[:, :, :seen],
                content[:, :, :seen],
                attn_mask=_mask(last - first, seen, None if flash else queries.device),
                enable_gqa=heads != keys.shape[2],
            )[0].transpose(0, 1)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _mask(rows: int, context: int, real: torch.device | None) -> Tensor:
    """Which of `context` tokens each of the last `rows` sees; in memory of `real`, if given."""
    if real is None:
        bias: Tensor = causal_lower_right(rows, context)
        return bias
    return torch.ones(rows, context, dtype=torch.bool, device=real).tril(context - rows)
