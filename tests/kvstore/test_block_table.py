"""The bucket table by itself: clashes, full buckets, growth, and native against NumPy."""

import numpy as np
import pytest

from kvstore.block_table import LANES, BlockTable
from kvstore.native import build
from kvstore.rows import Rows

MANY = 3000


def rows_with(keys: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Rows that carry these keys, uint8 [n, 16]."""
    rows = Rows(16, 1 << 20)
    taken = rows.allocate(len(keys))
    words = keys.view(np.uint64)
    rows.key0[taken], rows.key1[taken] = words[:, 0], words[:, 1]
    return rows, taken


def random_keys(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def one_bucket_keys(count: int, seed: int) -> np.ndarray:
    """Keys that all want one bucket; some have the same fingerprint, some the same first half."""
    keys = random_keys(count, seed)
    keys[:, :4] = 0
    keys[: count // 2, 4:8] = 7
    return keys


def both(action: str, table: BlockTable, keys: np.ndarray) -> np.ndarray:
    """The answer, which must be the same with and without the helper."""
    assert build.load() is not None
    native = getattr(table, action)(keys)
    with build.forced_fallback():
        assert np.array_equal(getattr(table, action)(keys), native)
    return native


@pytest.mark.parametrize("keys", [random_keys(MANY, 1), one_bucket_keys(200, 2)])
@pytest.mark.parametrize("native", [True, False])
def test_every_row_is_found_and_no_other(keys: np.ndarray, native: bool) -> None:
    rows, taken = rows_with(keys)
    table = BlockTable(rows, 16)
    if native:
        table.insert(taken)
    else:
        with build.forced_fallback():
            table.insert(taken)
    assert np.array_equal(both("probe", table, keys), taken)
    absent = keys.copy()
    absent[:, 15] ^= 1  # The same bucket and fingerprint, another key.
    assert (both("probe", table, absent) == -1).all()
    assert (both("probe", table, random_keys(500, 3)) == -1).all()


def test_both_forms_fill_the_buckets_alike() -> None:
    keys = np.concatenate([random_keys(500, 4), one_bucket_keys(40, 5)])
    rows, taken = rows_with(keys)
    native, plain = BlockTable(rows, 600), BlockTable(rows, 600)
    for part in np.array_split(taken, 7):
        native.insert(part)
        with build.forced_fallback():
            plain.insert(part)
    assert np.array_equal(native._table, plain._table)
    assert native.overflow == plain.overflow > 0


def test_removed_rows_leave_room_and_the_others_stay() -> None:
    keys = one_bucket_keys(60, 6)
    rows, taken = rows_with(keys)
    table = BlockTable(rows, 600)
    table.insert(taken)
    assert table.overflow == 60 - LANES
    random = np.random.default_rng(7)
    for _ in range(100):
        going = random.choice(taken, 20, replace=False)
        table.remove(going)
        assert len(table) == 40
        found = both("probe", table, keys)
        assert np.array_equal(np.sort(found[found >= 0]), np.setdiff1d(taken, going))
        table.insert(going)
        assert np.array_equal(both("probe", table, keys), taken)


def test_a_row_that_is_not_there_cannot_be_removed() -> None:
    rows, taken = rows_with(random_keys(4, 8))
    table = BlockTable(rows, 16)
    table.insert(taken[:2])
    with pytest.raises(AssertionError):
        table.remove(taken[2:])


def test_growth_keeps_overflow_rare() -> None:
    keys = random_keys(MANY, 9)
    rows, taken = rows_with(keys)
    table = BlockTable(rows, 1)
    for part in np.array_split(taken, 50):
        table.insert(part)
    assert np.array_equal(np.sort(table.entries()), taken)
    assert table.overflow < MANY // 100
    assert table.buckets * 3 >= MANY


def test_a_row_that_moved_is_still_found() -> None:
    """Growing the rows moves the memory that the helper reads."""
    keys = random_keys(10, 10)
    rows, taken = rows_with(keys)
    table = BlockTable(rows, 16)
    table.insert(taken)
    assert np.array_equal(table.probe(keys), taken)
    before = rows.capacity
    rows.allocate(4 * before)
    assert rows.capacity > before
    rows.key1[taken[0]] += np.uint64(1)  # Only in the new place.
    assert table.probe(keys)[0] == -1
    assert np.array_equal(table.probe(keys[1:]), taken[1:])


def test_long_blocks_are_compared_to_the_last_token() -> None:
    block_tokens = 37
    rows = Rows(16, 1 << 20)
    space = rows.add_space(block_tokens, 8192)
    tokens = np.arange(5 * block_tokens, dtype=np.int32).reshape(5, -1)
    keys = random_keys(5, 11)
    taken = rows.allocate(5)
    rows.heads["key0"][taken], rows.heads["key1"][taken] = keys.view(np.uint64).T
    rows.space[taken] = space
    rows.store_tokens(taken, tokens)
    rows.link_chain(taken, -1)
    table = BlockTable(rows, 16)
    table.insert(taken)
    assert table.walk(keys, tokens, space, -1).rows.tolist() == taken.tolist()
    for token in (0, 15, 16, 36):
        other = tokens.copy()
        other[3, token] += 1
        assert len(table.walk(keys, other, space, -1).rows) == 3
        with build.forced_fallback():
            assert len(table.walk(keys, other, space, -1).rows) == 3
