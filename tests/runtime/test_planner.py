"""The planner: what it loads, what it refuses, and that it learns from what really happened."""

import math

import numpy as np
import pytest

from kvstore.planner import EXPLORE_EVERY, PROBE_BLOCKS, CostModel, Decision, Plan, Planner
from kvstore.tiers.errors import ConfigError

BLOCK_BYTES = 360 << 10
TOKEN_S = 1e-3


def prefill_s(new: int, context: int) -> float:
    return 0.002 + TOKEN_S * new + 2e-7 * (new * context + new * (new + 1) / 2)


def trained(**tiers: float) -> Planner:
    """A planner that has seen prefill as above and tiers with so many bytes a second."""
    planner = Planner()
    for new, context in [(16, 0), (512, 0), (512, 512), (80, 1920), (2000, 0), (16, 4000)]:
        planner.observe(new, context, prefill_s(new, context))
    for tier, speed in tiers.items():
        for blocks in (1, 8, 120):
            size = blocks * BLOCK_BYTES
            planner.observe_load({tier: size}, {tier: blocks}, 0.001 + size / speed)
    return planner


def plan(planner: Planner, *spans: tuple[str, int], have: int = 0, total: int = 2000) -> Plan:
    return planner.plan(
        have=have, total=total, spans=spans, block_tokens=16, block_bytes=BLOCK_BYTES
    )


@pytest.mark.parametrize("new,context", [(64, 0), (1000, 1000), (300, 8000)])
def test_prefill_cost_is_predicted_between_and_beyond_what_was_seen(new: int, context: int) -> None:
    predicted = trained().prefill_s(new, context)
    assert predicted == pytest.approx(prefill_s(new, context), rel=0.02)


def test_load_cost_is_predicted_for_a_size_never_loaded() -> None:
    predicted = trained(disk=1e9).load_s("disk", 40 * BLOCK_BYTES, 40)
    assert predicted == pytest.approx(0.001 + 40 * BLOCK_BYTES / 1e9, rel=0.05)


def test_one_small_measurement_is_partly_fixed_cost_and_one_large_one_scales() -> None:
    small, large = Planner(), Planner()
    small.observe_load({"disk": 8 * BLOCK_BYTES}, {"disk": 8}, 0.010)
    large.observe_load({"disk": 80 * BLOCK_BYTES}, {"disk": 80}, 0.100)
    assert 0.030 < (small.load_s("disk", 80 * BLOCK_BYTES, 80) or 0) < 0.090
    assert large.load_s("disk", 160 * BLOCK_BYTES, 160) == pytest.approx(0.200, rel=0.1)


def test_weights_are_never_negative() -> None:
    model = CostModel(2, 1.0)
    for x in range(1, 6):  # falls with x: the honest straight line has a negative slope
        model.observe(np.array([1.0, x]), 10.0 / x)
    weights = model.weights()
    assert weights is not None and (weights >= 0).all() and weights.any()


def test_a_cheap_tier_is_loaded_whole() -> None:
    planned = plan(trained(host=10e9), ("host", 124))
    assert (planned.decision, planned.tokens, planned.again) == (Decision.LOAD, 124 * 16, False)
    assert planned.saved_s > planned.load_s > 0


def test_a_slow_tier_is_declined() -> None:
    planned = plan(trained(disk=1e6), ("disk", 124))
    assert (planned.decision, planned.tokens) == (Decision.DECLINE, 0)


def test_stops_at_the_block_from_which_computing_is_cheaper() -> None:
    planned = plan(trained(host=10e9, disk=1e6), ("host", 60), ("disk", 64))
    assert (planned.decision, planned.tokens) == (Decision.LOAD, 60 * 16)


def test_a_long_context_makes_loading_worth_more() -> None:
    # 16 tokens alone cost 16 ms; over 60,000 tokens of context they cost 200 ms more.
    planner = trained(disk=BLOCK_BYTES / 0.050)
    assert plan(planner, ("disk", 8), total=200).decision is Decision.DECLINE
    assert plan(planner, ("disk", 8), have=60_000, total=60_200).decision is Decision.LOAD


def test_the_device_prefix_is_kept_whatever_is_decided() -> None:
    planner = trained(host=10e9, disk=1e6)
    assert plan(planner, have=160).tokens == 160
    assert plan(planner, ("disk", 10), have=160).tokens == 160
    assert plan(planner, ("host", 10), have=160).tokens == 320


def test_a_deadline_shortens_the_load() -> None:
    planner = trained(disk=BLOCK_BYTES / 0.001)
    planned = planner.plan(
        have=0,
        total=2000,
        spans=[("disk", 124)],
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        deadline_s=0.050,
    )
    assert 0.040 < planned.load_s <= 0.050
    assert planned.tokens == pytest.approx(49 * 16, abs=32)


def test_an_unknown_tier_is_probed_and_then_trusted_with_the_rest() -> None:
    planner = trained()
    first = plan(planner, ("disk", 124))
    assert first == Plan(Decision.EXPLORE, PROBE_BLOCKS * 16, again=True)
    size = PROBE_BLOCKS * BLOCK_BYTES
    planner.observe_load({"disk": size}, {"disk": PROBE_BLOCKS}, size / 1e9)
    rest = planner.plan(
        have=first.tokens,
        total=2000,
        spans=[("disk", 124 - PROBE_BLOCKS)],
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        probed=True,
    )
    assert (rest.decision, rest.tokens) == (Decision.LOAD, 124 * 16)
    assert planner.counters()["explored"] == 1 and planner.counters()["loaded"] == 0
    assert plan(planner, ("disk", 124)).decision is Decision.LOAD


def test_a_known_tier_is_loaded_up_to_the_probe_of_an_unknown_one() -> None:
    planned = plan(trained(host=10e9), ("host", 50), ("disk", 50))
    assert planned == Plan(Decision.EXPLORE, (50 + PROBE_BLOCKS) * 16, again=True)


def test_nothing_is_loaded_while_the_cost_of_computing_is_unknown() -> None:
    assert plan(Planner(), ("host", 100)).decision is Decision.DECLINE


def test_a_tier_that_was_slow_is_tried_again_rarely_and_recovers() -> None:
    planner = trained(disk=1e6)
    decisions = [plan(planner, ("disk", 124)).decision for _ in range(EXPLORE_EVERY)]
    assert decisions.count(Decision.EXPLORE) == 1
    for _ in range(3):
        size = PROBE_BLOCKS * BLOCK_BYTES
        planner.observe_load({"disk": size}, {"disk": PROBE_BLOCKS}, size / 2e9)
    assert plan(planner, ("disk", 124)).decision is Decision.LOAD


def test_one_stall_does_not_undo_what_was_learnt_but_lasting_slowness_does() -> None:
    planner = trained(disk=1e9)
    size = 100 * BLOCK_BYTES
    planner.observe_load({"disk": size}, {"disk": 100}, 30.0)
    assert plan(planner, ("disk", 100)).decision is Decision.LOAD
    for _ in range(3):
        planner.observe_load({"disk": size}, {"disk": 100}, 30.0)
    assert plan(planner, ("disk", 100)).decision is Decision.DECLINE


def test_of_a_mixed_load_the_slow_tier_pays_for_what_the_fast_one_does_not() -> None:
    planner = trained(host=10e9)
    size = 64 * BLOCK_BYTES
    for _ in range(10):
        seconds = 0.001 + size / 10e9 + size / 1e9
        planner.observe_load({"host": size, "disk": size}, {"host": 64, "disk": 64}, seconds)
    assert planner.load_s("host", size, 64) == pytest.approx(0.001 + size / 10e9, rel=0.1)
    assert planner.load_s("disk", size, 64) == pytest.approx(size / 1e9, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_absurd_times_are_not_learnt(seconds: float) -> None:
    planner = trained(host=10e9)
    before = planner.load_s("host", BLOCK_BYTES, 1), planner.prefill_s(100, 0)
    planner.observe_load({"host": BLOCK_BYTES}, {"host": 1}, seconds)
    planner.observe(100, 0, seconds)
    assert (planner.load_s("host", BLOCK_BYTES, 1), planner.prefill_s(100, 0)) == before


def test_every_plan_is_counted_once() -> None:
    planner = trained(host=10e9, disk=1e6)
    plan(planner, ("host", 10))
    plan(planner, ("disk", 10))
    plan(planner)
    planner.joined()
    counters = planner.counters()
    assert [counters[str(kind)] for kind in Decision] == [1, 1, 0, 1]
    assert counters["declined_tokens"] == 160 and counters["joined"] == 1
    assert counters["seconds_saved"] == pytest.approx(0.16, rel=0.2)


def test_a_deadline_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        Planner(deadline_s=0)


def test_an_eager_planner_loads_all_it_is_told_of_without_knowing_any_cost() -> None:
    planned = plan(Planner(eager=True), ("host", 3), ("disk", 100), have=32)
    assert (planned.decision, planned.tokens) == (Decision.LOAD, 32 + 103 * 16)
