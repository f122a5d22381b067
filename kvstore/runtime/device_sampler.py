"""The choice of the next tokens where the logits are: only the tokens come to the host.

The same rule as sampler.sample, from the same random numbers. Sums are float64 in both, but not in
the same order: a point that falls on the border of two tokens, within 1e-15, may choose the other.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore.runtime.sampler import Sampling, uniform_of


def sample_on_device(logits: Tensor, sampling: Sequence[Sampling], steps: Sequence[int]) -> Tensor:
    """The next token of each row of `logits` [rows, vocabulary]: int64 [rows], on its device."""
    chosen = logits.argmax(dim=-1)
    warm = [row for row, how in enumerate(sampling) if how.temperature > 0.0]
    if not warm:
        return chosen
    temperatures = np.array([sampling[row].temperature for row in warm], np.float64)
    uniform = uniform_of([sampling[row].seed for row in warm], [steps[row] for row in warm])
    rows = torch.tensor(warm, device=logits.device)
    told = torch.from_numpy(np.stack([temperatures, uniform])).to(logits.device)
    values = logits[rows]
    scaled = (values - values.amax(dim=1, keepdim=True)).double() / told[0, :, None]
    cumulative = scaled.exp().cumsum(dim=1)
    point = (told[1] * cumulative[:, -1])[:, None].contiguous()
    # The first token whose cumulative weight exceeds the point; so one of weight 0 never is.
    places = torch.searchsorted(cumulative, point, right=True)[:, 0]
    chosen[rows] = places.clamp_(max=logits.shape[1] - 1)
    return chosen
