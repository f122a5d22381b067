"""kill -9 at every named failpoint, and at every file call of a first start.

Row 2: afterwards the store opens, serves nothing wrong, has all that `flush` said is durable,
leaves no arena behind, and saves again.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.failpoints import FAILPOINTS
from support.after_kill import as_victims_do, check
from support.victims import (
    FILE_CALL,
    Victims,
)

ROUNDS = 5
LONG_ROUNDS = 100
NEEDS_A_NEW_STORE = {"disk.add_segment", "host.steal", "disk.steal"}
DAMAGE = b"\xff" * (16 * 4096)


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    as_victims_do(monkeypatch)


def damage_catalogue(directory: Path) -> None:
    with (directory / "disk0" / "catalogue" / "data.mdb").open("r+b") as file:
        file.seek(2 * 4096)
        file.write(DAMAGE)


@pytest.fixture(scope="module")
def full(victims: Victims, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A store that no victim was killed on, and how often one passed each place."""
    directory = tmp_path_factory.mktemp("full") / "store"
    ended = victims.run(directory, 0, "none", 0)
    assert ended.passed is not None
    return directory, ended.passed


def kill_at(
    victims: Victims, full: tuple[Path, dict[str, int]], root: Path, place: str, rounds: int
) -> None:
    """Kill a victim at a failpoint in each round, at a random passing, and look at its store."""
    chance = np.random.default_rng(FAILPOINTS.index(place))
    directory = root / "store"
    shutil.copytree(full[0], directory)
    for number in range(1, rounds + 1):
        turn = number
        if place in NEEDS_A_NEW_STORE:
            directory, turn = root / f"store{number}", 0
        if place == "start.rebuild":
            damage_catalogue(directory)
        if place == "start.takeover":
            victims.run(directory, turn, "writeback.take", 6)
        passing = int(chance.integers(1, max(2, full[1][place] // 2 + 1)))
        ended = victims.run(directory, turn, place, passing)
        assert ended.passed is None, f"{place} was passed {ended.passed} times, not {passing}"
        check(directory, turn, ended)


@pytest.mark.slow
@pytest.mark.parametrize("place", FAILPOINTS)
def test_killed_at_a_failpoint(
    victims: Victims, full: tuple[Path, dict[str, int]], tmp_path: Path, place: str
) -> None:
    kill_at(victims, full, tmp_path, place, ROUNDS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", FAILPOINTS)
def test_killed_at_a_failpoint_a_hundred_times(
    victims: Victims, full: tuple[Path, dict[str, int]], tmp_path: Path, place: str
) -> None:
    kill_at(victims, full, tmp_path, place, LONG_ROUNDS)


@pytest.mark.slow
def test_killed_at_any_file_call_of_a_first_start(victims: Victims, tmp_path: Path) -> None:
    """A store whose making was cut short is made by the next start."""
    for call in range(1, 200):
        directory = tmp_path / f"store{call}"
        ended = victims.run(directory, 0, FILE_CALL, call)
        check(directory, 0, ended)
        if ended.opened:
            break
    assert 20 < call < 199
