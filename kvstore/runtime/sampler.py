"""Chooses the next token of each sequence in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.tiers.errors import ConfigError

TEMPERATURE_MAX = 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen: greedily at temperature 0, else at random from `seed`.

    The choice depends on the logits, the seed and the token's number in its request, and on nothing
    else: not on other requests of the batch, not on when the step ran.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= TEMPERATURE_MAX:
            raise ConfigError(f"Temperature must lie between 0 and {TEMPERATURE_MAX}.")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError("The seed must be a whole number below 2**64, and not negative.")


def sample(logits: Tensor, sampling: Sequence[Sampling], steps: Sequence[int]) -> NDArray[np.int64]:
    """The next token of each row of `logits`, float32 [rows, vocabulary].

    `steps[i]` is how many tokens row i's request has generated so far. Of equal best logits the
    lowest token wins.
    """
    values = logits.numpy()
    chosen: NDArray[np.int64] = values.argmax(axis=1).astype(np.int64)
    warm = [row for row, how in enumerate(sampling) if how.temperature > 0.0]
    if warm:
        temperatures = np.array([sampling[row].temperature for row in warm], np.float64)
        uniform = uniform_of([sampling[row].seed for row in warm], [steps[row] for row in warm])
        chosen[warm] = _draw(values[warm], temperatures, uniform)
    return chosen


def margins(logits: Tensor) -> Tensor:
    """How far the best logit lies above the second best, per row; float32 [rows].

    A step with a margin below 1e-4 is a near-tie, where other rounding may choose another token.
    """
    best = torch.topk(logits, 2, dim=-1).values
    return best[:, 0] - best[:, 1]


def _draw(
    logits: NDArray[np.float32], temperatures: NDArray[np.float64], uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperatures[:, None]
    cumulative = np.cumsum(np.exp(scaled), axis=1)
    # The first token whose cumulative weight exceeds the drawn point; so one of weight 0 never is.
    below = cumulative <= (uniform * cumulative[:, -1])[:, None]
    places: NDArray[np.int64] = below.sum(axis=1, dtype=np.int64)
    np.minimum(places, logits.shape[1] - 1, out=places)
    return places


def uniform_of(seeds: Sequence[int], steps: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), 53 bits, a function of (seed, step): SplitMix64's finaliser, twice."""
    start = np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(_mix(start) ^ np.array(steps, np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
