"""The whole store in one thread: engines, faults, crashes and time in an order that a seed decides.

A seed that fails prints the command that replays it. tests/support/sim_world.py says how it works.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tiers.failpoints import plant
from support.sim_world import Violation
from support.simulate import simulate

TESTS = Path(__file__).parents[1]
SEEDS_EACH = 125
PARTS = 16  # 2,000 seeds in all, in parts so that workers share them
PLANTED_MAX = 300
LONG_EACH = 2_000
LONG_PARTS = 50


def test_a_few_seeds() -> None:
    for seed in range(6):
        simulate(seed)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_two_thousand_seeds(part: int) -> None:
    for seed in range(part * SEEDS_EACH, (part + 1) * SEEDS_EACH):
        simulate(seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(LONG_PARTS))
def test_a_hundred_thousand_seeds(part: int) -> None:
    for seed in range(part * LONG_EACH, (part + 1) * LONG_EACH):
        simulate(seed)


@pytest.mark.slow
def test_a_seed_is_one_run_whatever_the_process() -> None:
    """Twice the same trace, in processes whose hashes of strings differ."""
    code = "from support.simulate import simulate\nprint([simulate(seed) for seed in (3, 11, 24)])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(TESTS), "PYTHONHASHSEED": str(number)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in (1, 2)
    }
    assert len(runs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        "publish_before_sync",
        "keep_children",
        "skip_checksum",
        "hold_by_timer",
        "leaf_first",
        "reuse_before_commit",
    ],
)
def test_a_planted_bug_is_found(bug: str) -> None:
    """In a few hundred seeds; and the seed that finds it has nothing to say without it."""
    for seed in range(PLANTED_MAX):
        try:
            with plant(bug):
                simulate(seed)
        except Violation:
            break
    else:
        pytest.fail(f"{bug} was not found in {PLANTED_MAX} seeds")
    simulate(seed)
