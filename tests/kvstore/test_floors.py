"""The file `invalidated`: which records are void, in a bounded number of bytes."""

import numpy as np
import pytest

from kvstore.floors import ENTRIES_MAX, EVERY, FILE_BYTES_MAX, Floor, Floors
from kvstore.home import OVERHEAD_BYTES

STORE = bytes(range(16))


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_bytes_and_back() -> None:
    floors = Floors(STORE)
    floors.raise_to([digest(1), digest(2)], Floor(void=7))
    floors.raise_to([digest(2)], Floor(rebuild=9, start=9, arena=8))
    again = Floors.parse(floors.pack(), STORE)
    assert again is not None
    assert again.entries == {digest(1): Floor(7), digest(2): Floor(7, 9, 9, 8)}
    assert Floors.parse(floors.pack(), bytes(16)) is None


def test_every_flip_and_cut_is_seen() -> None:
    floors = Floors(STORE)
    floors.raise_to([digest(1)], Floor(void=7))
    data = floors.pack()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Floors.parse(bytes(flipped), STORE) is None
    assert all(Floors.parse(data[:size], STORE) is None for size in range(len(data)))


def test_which_floor_counts_where() -> None:
    floors = Floors(STORE)
    floors.raise_to([digest(1)], Floor(void=1, rebuild=4, start=3, arena=2))
    assert (floors.of_row(digest(1)), floors.of_rebuilt(digest(1))) == (3, 4)
    assert (floors.of_arena(digest(1)), floors.of_row(digest(2))) == (3, 0)
    floors.settle(arena_too=False)
    assert (floors.of_row(digest(1)), floors.of_rebuilt(digest(1))) == (1, 4)
    assert floors.of_arena(digest(1)) == 3, "somebody else's arena was not looked into"
    floors.raise_to([digest(2)], Floor(start=5, arena=4))
    floors.settle(arena_too=True)
    assert (floors.of_row(digest(2)), floors.of_arena(digest(2))) == (0, 4)
    floors.raise_to([EVERY], Floor(void=9))
    assert [floors.of_row(digest(n)) for n in (1, 2)] == [9, 9]
    assert list(floors.entries) == [EVERY], "what one floor says is said once"


@pytest.mark.parametrize("at_once", [5, ENTRIES_MAX + 50])
def test_it_stays_small_and_forgets_no_invalidation(at_once: int) -> None:
    random = np.random.default_rng(at_once)
    floors = Floors(STORE)
    rebuilt: dict[bytes, int] = {}
    now = 1
    for _ in range(2 * ENTRIES_MAX // at_once + 3):
        now += int(random.integers(1, 100))
        chosen = [digest(int(n)) for n in random.integers(1, 1024, at_once)]
        floors.raise_to(chosen, Floor(void=now))
        rebuilt.update(dict.fromkeys(chosen, now))
        # Until it is settled, also the next start leaves everything out that was just named.
        assert all(floors.of_row(one) >= now for one in chosen)
        floors.settle(arena_too=True)
        assert len(floors.entries) <= ENTRIES_MAX
        assert len(floors.pack()) <= FILE_BYTES_MAX
    assert all(floors.of_rebuilt(one) >= floor for one, floor in rebuilt.items())
    assert floors.highest() == now
    # What was merged costs others nothing at a start of a catalogue that is whole.
    assert floors.of_row(digest(5000)) == 0


def test_two_of_it_fit_the_overhead() -> None:
    assert 2 * FILE_BYTES_MAX <= OVERHEAD_BYTES // 2
