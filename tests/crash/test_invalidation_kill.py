"""kill -9 around an invalidation: what it named is served by no later owner once it has returned.

A tenant's weights are replaced under load. Afterwards each of its blocks that is found was computed
with the new ones, whole: also in a taken-over arena, and after the catalogue was lost as well.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.alone import opened_alone
from kvstore.clock import Clock
from kvstore.invalidation import Scope
from kvstore.store import open as open_store
from kvstore.tiers.io import FileIo
from support.checks import assert_at_rest
from support.weights import (
    DEATHS,
    DISK_BYTES,
    HOST_BYTES,
    PAGES,
    PROMPTS,
    SCOPES,
    Versioned,
    engine_of,
    prompt_of,
)

KILLS = 10
LONG_KILLS = 600
TESTS = Path(__file__).resolve().parents[1]


class Victims:
    """Processes whose weights are replaced, one at a time."""

    def __init__(self, directory: Path, persist: bool) -> None:
        self.directory, self.persist = directory, persist
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.weights"],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, round_number: int, scope: str, death: str) -> bool:
        """Let one run until it is dead. Returns: whether its invalidation had returned."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = f"{self.directory} {round_number} {self.persist} {scope} {death}\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        returned = False
        for word in self._process.stdout:
            if word.strip() == "ended":
                return returned
            returned |= word.strip() == "returned"
        raise AssertionError("the process that forks the victims ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture(params=[False, True], ids=["disk", "arena"])
def victims(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Victims]:
    """Whose host memory ends with them, or lies in an arena that the next owner takes over."""
    made = Victims(tmp_path / "store", request.param)
    yield made
    made.close()


def found(engine: Versioned, versions: list[int]) -> int:
    """Blocks that are found, each of which is of one of these versions, whole."""
    blocks = 0
    table = engine.table(PAGES)
    for number in range(PROMPTS):
        with engine.space.sequence(prompt_of(number)).lookup() as ticket:
            tokens = ticket.load(engine.pool, table).result(60).tokens
        wrong = None
        for engine.version in versions:
            bad = set(engine.wrong(ticket.sequence, table, tokens))
            wrong = bad if wrong is None else wrong & bad
        assert not wrong, f"prompt {number}: blocks {wrong} are of none of versions {versions}"
        blocks += tokens // 4
    return blocks


def kill_many(victims: Victims, kills: int) -> None:
    kept = again = 0
    for round_number in range(1, kills + 1):
        death = DEATHS[round_number % len(DEATHS)]
        scope = SCOPES[(round_number + round_number // len(DEATHS)) % len(SCOPES)]
        returned = victims.kill_one(round_number, scope, death)
        assert returned <= (not death.startswith("invalidate"))
        lost = round_number % 4 == 0
        if lost:
            (victims.directory / "disk0" / "catalogue" / "data.mdb").write_bytes(b"x" * 8192)
        sizes = {"host": HOST_BYTES, "disk_capacity": DISK_BYTES}
        with open_store(victims.directory, persist=victims.persist, **sizes) as store:
            store.check_integrity()
            tenant, other = engine_of(store, "a"), engine_of(store, "b")
            # What is durable counts although the call did not come to its end.
            done = returned or death in ("invalidate.noted", "invalidate.settled")
            versions = [round_number] if done else [round_number - 1, round_number]
            again += found(tenant, versions)
            kept += found(other, [0])
            store.invalidate(Scope(tenant="a"))
            assert found(tenant, [round_number]) == 0
            tenant.version = round_number
            for number in range(3):
                tenant.save(prompt_of(number))
            assert found(tenant, [round_number]) > 0
            assert_at_rest(store)
            bad = {n: c for n, c in store.counters().items() if n.startswith("bad_blocks") and c}
            assert not bad
    print(f"{kills} kills: {again} blocks of new weights found, {kept} of the other tenant")
    assert kept > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "looked_into"), [("tenant", False), ("prefix", False), ("prefix", True)]
)
def test_blocks_that_land_in_an_arena_after_they_were_invalidated(
    tmp_path: Path, scope: str, looked_into: bool
) -> None:
    victims = Victims(tmp_path / "store", persist=True)
    assert victims.kill_one(0, scope, "landing")
    victims.close()
    if looked_into:  # by an owner without this arena, such as a command
        with opened_alone(victims.directory, FileIo(), Clock()):
            pass
    sizes = {"host": HOST_BYTES, "disk_capacity": DISK_BYTES}
    with open_store(victims.directory, persist=True, **sizes) as store:
        assert store._placement.host.taken_over
        tenant = engine_of(store, "a")
        with tenant.space.sequence(prompt_of(0)).lookup() as ticket:
            assert ticket.blocks == 0
        tenant.save(prompt_of(0))
        assert found(tenant, [0]) > 0
        assert_at_rest(store)


@pytest.mark.slow
def test_kills_around_an_invalidation(victims: Victims) -> None:
    kill_many(victims, KILLS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_kills_around_an_invalidation(victims: Victims) -> None:
    kill_many(victims, LONG_KILLS)
