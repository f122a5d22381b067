"""The breaker: what opens it, when it is tried again, and that the back-off ends within 5 s."""

import pytest

from kvstore.tiers.guard import Guard, GuardState, growth_guard, read_guard, write_guard
from support.manual_clock import ManualClock


def backoffs(guard: Guard, clock: ManualClock, count: int) -> list[float]:
    """How long it stays open after each of so many failed probes."""
    waits = []
    for _ in range(count):
        began = clock.now_s
        while not guard.allows():
            clock.now_s += 1 / 64
        waits.append(clock.now_s - began)
        assert guard.state is GuardState.HALF_OPEN
        assert guard.failure()
    return waits


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    guard = Guard(ManualClock().monotonic, faults_max=3, first_s=1.0, longest_s=4.0)
    for _ in range(5):
        assert not guard.failure() and not guard.failure()
        assert guard.faulty and guard.allows()
        guard.success()
        assert not guard.faulty
    assert not guard.failure() and not guard.failure() and guard.failure()
    assert (guard.state, guard.allows(), guard.opened) == (GuardState.OPEN, False, 1)


def test_the_back_off_doubles_up_to_its_limit_and_starts_again_after_a_success() -> None:
    clock = ManualClock()
    guard = Guard(clock.monotonic, faults_max=1, first_s=0.25, longest_s=2.0)
    guard.failure()
    assert backoffs(guard, clock, 6) == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    guard.success()
    assert guard.state is GuardState.CLOSED
    guard.failure()
    assert backoffs(guard, clock, 2) == [0.25, 0.5]
    assert guard.opened == 2  # a failed probe does not open it again: it was open


def test_a_failure_that_began_before_it_opened_changes_nothing() -> None:
    clock = ManualClock()
    guard = Guard(clock.monotonic, faults_max=1, first_s=1.0, longest_s=8.0)
    guard.failure()
    for _ in range(10):
        clock.now_s += 0.05
        assert guard.failure()
    clock.now_s += 0.6
    assert guard.state is GuardState.HALF_OPEN


def test_a_final_fault_opens_it_at_once_and_whoever_asks_may_probe_at_once() -> None:
    guard = Guard(ManualClock().monotonic, faults_max=5, first_s=1.0, longest_s=1.0)
    assert guard.failure(final=True) and not guard.allows()
    guard.retry_now()
    assert guard.state is GuardState.HALF_OPEN
    guard.success()
    assert guard.allows()


@pytest.mark.parametrize(("make", "faults"), [(write_guard, 2), (growth_guard, 1), (read_guard, 5)])
def test_the_guards_of_a_volume(make: object, faults: int) -> None:
    clock = ManualClock()
    guard: Guard = make(clock.monotonic)  # type: ignore[operator]
    for _ in range(faults - 1):
        assert not guard.failure()
    assert guard.failure()
    assert max(backoffs(guard, clock, 10)) <= 2.0  # so a probe comes within 5 s of the return
