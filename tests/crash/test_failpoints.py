"""kill -9 at every named failpoint, and at every file call of a first start.

Row 2: afterwards the store opens, serves nothing wrong, has all that `flush` said is durable,
leaves no arena behind, and saves again.
"""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.home import read_facts
from kvstore.store import Store
from kvstore.tiers.failpoints import FAILPOINTS
from kvstore.tiers.io import FileIo
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine
from support.victims import (
    BLOCKS,
    CAPACITY_BYTES,
    FILE_CALL,
    PROMPTS,
    ROOT_BLOCKS,
    Ended,
    Victims,
    config_of,
    prompt_of,
    share_a_space,
    small_segments,
    space_of,
)

ROUNDS = 5
LONG_ROUNDS = 100
NEVER = 1 << 30
SAVES = 5
NEEDS_A_NEW_STORE = {"disk.add_segment", "host.steal", "disk.steal"}
DAMAGE = b"\xff" * (16 * 4096)


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    made = Victims()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments; and in this process nothing is written back, and so evicted, unasked."""
    monkeypatch.setattr("kvstore.writeback.START_AT", math.inf)
    monkeypatch.setattr("kvstore.opening.segment_bytes", None)
    small_segments()


def check(directory: Path, turn: int, ended: Ended) -> None:
    """Reopen a victim's store."""
    on_disk = ended.promised.slots.keys() | ended.promised.loaded.keys()
    must = 0
    with Store(config_of(directory, dirty_age_s=3600)) as store:
        store.check_integrity()
        numbers = range(max(0, turn * PROMPTS - 2), (turn + 1) * PROMPTS)
        for number in numbers:
            sequence = space_of(store, number).sequence(prompt_of(number))
            ticket = sequence.lookup()
            there = [key.tobytes() in on_disk for key in sequence.keys[: sequence.blocks]]
            durable = len(there) if all(there) else there.index(False)
            if ended.unsettled is None or not share_a_space(number, ended.unsettled):
                assert ticket.blocks >= durable, f"a durable block of prompt {number} was lost"
            assert not any(there[durable:]), f"a block of prompt {number} is there, its parent not"
            must += durable
            if number == ended.invalidated:
                assert ticket.blocks <= ROOT_BLOCKS, "a block that was invalidated is served"
            ticket.release()
        assert must or not on_disk
        store.flush()  # What host memory alone holds would keep it from taking what is on disk.
        for number in numbers:
            engine = Engine(space_of(store, number), 2 * BLOCKS)
            with engine.space.sequence(prompt_of(number)).lookup() as ticket:
                result = engine.load(ticket)  # asserts every byte of it
                assert result.tokens == ticket.tokens, result.reason
        # What host memory alone holds may leave no room for it at once, never for good.
        for _ in range(SAVES):
            _, saved = engine.save(prompt_of(NEVER))
            store.flush()
            if not saved.dropped:
                break
        assert not saved.dropped
        assert_at_rest(store)
        bad = {n: c for n, c in store.counters().items() if n.startswith("bad_blocks") and c}
        assert not bad
    assert disk_usage(directory) <= CAPACITY_BYTES
    facts = read_facts(directory, FileIo())
    assert facts is not None
    left = Path("/dev/shm").glob(f"kvstore-{os.geteuid()}-{facts.store_id.hex()}*")
    assert not list(left), "a clean stop leaves no arena"


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
