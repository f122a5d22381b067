"""Sampling: greedy, and at random but repeatable, each request by itself."""

import numpy as np
import pytest
import torch

from kvstore.runtime.sampler import Sampling, margins, sample
from kvstore.tiers.errors import ConfigError


def test_temperature_zero_takes_the_best_and_of_equals_the_lowest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-5.0, -7.0, -1.0]])
    assert sample(logits, [Sampling()] * 3, [0, 0, 0]).tolist() == [1, 0, 2]


def test_a_draw_depends_on_seed_and_step_and_not_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 500)
    how = [Sampling(1.0, seed) for seed in range(8)]
    steps = list(range(8))
    together = sample(logits, how, steps)
    assert np.array_equal(together, sample(logits, how, steps))
    for row in range(8):
        alone = sample(logits[row : row + 1], [how[row]], [steps[row]])
        assert alone[0] == together[row]
    mixed = [Sampling() if row % 2 else how[row] for row in range(8)]
    chosen = sample(logits, mixed, steps)
    assert chosen[::2].tolist() == together[::2].tolist()
    assert chosen[1::2].tolist() == logits.argmax(1)[1::2].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """20,000 draws over steps of one seed, and over seeds at one step: chi-square, 7 degrees."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -0.5, 0.25])
    expected = torch.softmax(logits / temperature, 0).numpy() * 20000
    rows = logits.expand(20000, 8)
    over_steps = sample(rows, [Sampling(temperature, 11)] * 20000, list(range(20000)))
    over_seeds = sample(rows, [Sampling(temperature, seed) for seed in range(20000)], [3] * 20000)
    for drawn in (over_steps, over_seeds):
        counts = np.bincount(drawn, minlength=8)
        assert ((counts - expected) ** 2 / expected).sum() < 35.0


def test_a_token_of_no_weight_is_never_drawn() -> None:
    logits = torch.full((4000, 6), -torch.inf)
    logits[:, 2] = 0.0
    drawn = sample(logits, [Sampling(1.0, 5)] * 4000, list(range(4000)))
    assert set(drawn.tolist()) == {2}


def test_margins_tell_a_near_tie() -> None:
    logits = torch.tensor([[1.0, 0.99995, -3.0], [4.0, 1.0, 2.0]])
    assert torch.allclose(margins(logits), torch.tensor([5e-5, 2.0]), atol=1e-6)


@pytest.mark.parametrize(
    ("temperature", "seed"), [(-0.1, 0), (1e9, 0), (float("nan"), 0), (1.0, -1)]
)
def test_impossible_settings_are_refused(temperature: float, seed: int) -> None:
    with pytest.raises(ConfigError):
        Sampling(temperature, seed)
