"""Row 13: eight threads against a store and a plain table; every hit is exactly the table's bytes.

Integrity is checked beside the running threads and whenever they pause; then leases, holds, slots
and descriptors must be back. Operations are calls to the store: see support/model_worker.py.
"""

from pathlib import Path

import pytest

from support.model_run import KINDS, LEG, MIB, SLICE, Kind, Totals, command_of, main, run_round
from support.model_worker import KINDS as REQUESTS
from support.model_worker import Violation, Worker

OPERATIONS = 200_000
LONG_OPERATIONS = 20_000_000
LONG_SEED = 1000


def assert_busy(kind: Kind, totals: Totals) -> None:
    """It was a check of what it says: blocks were hit, evicted, and found bad.

    How many bad ones are met on disk depends on the machine's pace: row 4 has all of those.
    """
    counters = totals.counters
    assert totals.hits > totals.operations // 100
    assert counters["evicted_blocks.host"] > 0 or kind.host > 5 * MIB
    assert counters["bad_blocks.host"] > 0
    if kind.disk:
        assert counters["tokens_hit.disk"] > 0
        assert counters["written_blocks"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_random_operations_return_what_the_table_says(kind: Kind, tmp_path: Path) -> None:
    share = -(-OPERATIONS // len(KINDS))
    totals = run_round(tmp_path, kind, seed=1, operations=share)
    print(f"{kind.name}: {totals.operations} operations, {totals.hits} hits, 0 violations")
    assert totals.operations >= share
    assert_busy(kind, totals)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_twenty_million_operations() -> None:
    """In rounds of SLICE with a seed each: a slice runs by itself with the command it prints."""
    assert LONG_OPERATIONS % SLICE == 0
    main(LONG_SEED, LONG_OPERATIONS)


def test_a_wrong_byte_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it names seed, command, and what was last done to the prompt."""
    save = Worker.save

    def save_something_else(self: Worker, desk: object, prompt: object) -> None:
        save(self, desk, prompt)  # type: ignore[arg-type]
        desk.arrays[0][:] ^= 1  # type: ignore[attr-defined]

    kinds = tuple(save_something_else if kind is save else kind for kind in REQUESTS)
    monkeypatch.setattr("support.model_worker.KINDS", kinds)
    with pytest.raises(Violation) as caught:
        run_round(tmp_path, KINDS[1], seed=1, operations=LEG)
    text = str(caught.value)
    assert "hold other bytes than were saved" in text and "WRONG" in text
    assert command_of(KINDS[1], 1, LEG) in text
