"""Row 12: requests that are cancelled or never come back leave no lease, hold, slot or descriptor.

free + held = capacity is checked whenever the threads pause: see support/model_run.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from support.model_run import KINDS, Kind, run_round
from support.model_worker import GIVING_UP

CI_OPERATIONS = 12_000
LONG_OPERATIONS = 1_000_000


def give_up(kind: Kind, directory: Path, operations: int) -> None:
    totals = run_round(directory, replace(kind, weights=GIVING_UP), seed=12, operations=operations)
    assert totals.operations >= operations
    assert totals.counters["misses.expired"] > 0
    print(f"{kind.name}: {totals.operations} operations, nothing left")


@pytest.mark.slow
def test_cancels_leave_nothing(tmp_path: Path) -> None:
    give_up(KINDS[0], tmp_path, CI_OPERATIONS)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_million_operations_with_cancels_leave_nothing(kind: Kind, tmp_path: Path) -> None:
    give_up(kind, tmp_path, -(-LONG_OPERATIONS // len(KINDS)))
