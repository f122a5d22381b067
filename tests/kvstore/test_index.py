"""The index against a model made of dictionaries, and the cases that stores get wrong."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.index import FIRST_AGE, SLOT_MAX, Index
from kvstore.native import build
from kvstore.tiers.base import MissReason, SaveDrop, TierName
from kvstore.tiers.errors import TokenError
from support.index_model import KeyFunction, Tokens, clashing, colliding, honest
from support.index_pair import BLOCK_TOKENS, DISK, HOST, Pair, arrays, keys_of


@pytest.fixture(params=["native", "fallback"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with it runs once with the compiled helper and once without."""
    if request.param == "native":
        if build.load() is None:
            pytest.fail("the compiled helper is missing on this machine")
        yield "native"
    else:
        with build.forced_fallback():
            yield "fallback"


@pytest.mark.parametrize("key", [honest, clashing, colliding])
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_the_models(form: str, key: KeyFunction, seed: int) -> None:
    pair = Pair(seed, key)
    calls = [
        *([pair.publish] * 4),
        *([pair.find] * 4),
        *(pair.place, pair.place, pair.place_missing, pair.clear, pair.clear),
        *(pair.drop, pair.drop_space, pair.use, pair.end_use),
    ]
    for _ in range(300):
        calls[int(pair.random.integers(len(calls)))]()
        pair.compare()
    while pair.users:
        pair.give_back(*pair.users.pop())
    for tier in (DISK, HOST):
        pair.index.drop_subtree(pair.index.rows_of(tier=tier), tier)
    pair.index.check_integrity()
    assert pair.index.rows.used == len(pair.index) == 0
    assert all(pool.list.used == 0 for pool in pair.index.rows.pools.values())


# -- single cases ------------------------------------------------------------------------------


def stored(
    index: Index, chain: list[Tokens], keys: list[bytes], tier: TierName = HOST, space: int = 0
) -> np.ndarray:
    """Publish a chain from the root, in slots of its own."""
    slots = np.arange(len(chain)) + 1000 * index.rows.high
    answer = index.publish(tier, space, -1, *arrays(keys, chain), slots, slots.astype(np.uint64))
    assert answer.reason is None
    return answer.rows


def numbered(*values: int) -> list[Tokens]:
    return [(value,) * BLOCK_TOKENS for value in values]


@pytest.fixture
def index() -> Index:
    index = Index()
    index.add_space(BLOCK_TOKENS, 8192)
    return index


def test_other_tokens_under_the_same_key_are_a_collision(form: str, index: Index) -> None:
    chain, other = numbered(1, 2, 3), numbered(1, 9, 3)
    keys = keys_of(chain)
    stored(index, chain, keys)
    found = index.find(0, *arrays(keys, other))
    assert (len(found.rows), found.reason) == (1, MissReason.COLLISION)
    answer = index.publish(
        HOST, 0, -1, *arrays(keys, other), np.arange(3) + 50, np.arange(3, dtype=np.uint64)
    )
    assert answer.placed.tolist() == [False]
    assert answer.reason is SaveDrop.COLLISION
    index.check_integrity()


def test_the_same_tokens_under_another_parent_are_a_collision(form: str, index: Index) -> None:
    stored(index, numbered(1, 2), keys_of(numbered(1, 2)))
    second = keys_of(numbered(1, 2))[1]
    keys = [keys_of(numbered(7))[0], second]
    stored(index, numbered(7), keys[:1])
    found = index.find(0, *arrays(keys, numbered(7, 2)))
    assert (len(found.rows), found.reason) == (1, MissReason.COLLISION)


def test_nothing_is_reached_through_another_block_in_a_dropped_parents_place(
    form: str, index: Index
) -> None:
    """The parent is dropped, and a block with other tokens takes its key: its children are gone."""
    chain = numbered(1, 2, 3)
    keys = keys_of(chain)
    rows = stored(index, chain, keys)
    assert index.place(DISK, rows, np.arange(3)).all()
    for tier in (HOST, DISK):
        index.drop_subtree(rows[:1], tier, MissReason.EVICTED)
    impostor = numbered(8)
    stored(index, impostor, keys[:1])
    found = index.find(0, *arrays(keys, impostor + chain[1:]))
    assert (len(found.rows), found.reason) == (1, MissReason.EVICTED)
    assert index.find(0, *arrays(keys, chain)).reason is MissReason.COLLISION
    index.check_integrity()


def test_a_key_that_repeats_within_one_chain_is_a_collision(form: str, index: Index) -> None:
    key = bytes(range(16))
    answer = index.publish(
        HOST, 0, -1, *arrays([key, key], numbered(1, 2)), np.arange(2), np.arange(2, dtype="u8")
    )
    assert answer.placed.tolist() == [True]
    assert answer.reason is SaveDrop.COLLISION
    index.check_integrity()


def test_a_block_of_another_space_is_a_collision_whatever_its_size(form: str, index: Index) -> None:
    other = index.add_space(64, 8192)
    stored(index, [(1,) * 64] * 1, keys_of([(1,) * 64]), space=other)
    stored(index, numbered(5), keys_of(numbered(5)))
    keys = keys_of([(1,) * 64])
    assert index.find(0, *arrays(keys, numbered(1))).reason is MissReason.COLLISION
    assert index.find(other, *arrays(keys, [(1,) * 64])).reason is None


def test_media_belong_to_a_blocks_identity(form: str, index: Index) -> None:
    chain = numbered(1, 2, 3)
    keys = keys_of(chain)
    picture, other = bytes([1]) * 32, bytes([2]) * 32
    slots, contents = np.arange(3), np.arange(3, dtype=np.uint64)
    index.publish(HOST, 0, -1, *arrays(keys, chain), slots, contents, {1: picture})
    assert index.find(0, *arrays(keys, chain), media={1: picture}).reason is None
    for media in (None, {1: other}, {0: picture, 1: picture}):
        found = index.find(0, *arrays(keys, chain), media=media)
        assert found.reason is MissReason.COLLISION
        assert len(found.rows) == found.blocks[HOST] == (0 if media and 0 in media else 1)
    index.drop_subtree(index.rows_of(), HOST)
    index.check_integrity()


def test_evicted_invalidated_and_never_stored_are_told_apart(form: str, index: Index) -> None:
    for value, reason in ((1, MissReason.EVICTED), (2, MissReason.INVALIDATED)):
        rows = stored(index, numbered(value), keys_of(numbered(value)))
        index.drop_subtree(rows, HOST, reason)
        keys = keys_of(numbered(value))
        assert index.find(0, *arrays(keys, numbered(value))).reason is reason
    absent = index.find(0, *arrays(keys_of(numbered(3)), numbered(3)))
    assert absent.reason is MissReason.ABSENT


def test_a_block_evicted_from_one_tier_is_found_in_the_other(form: str, index: Index) -> None:
    chain = numbered(1, 2)
    keys = keys_of(chain)
    rows = stored(index, chain, keys)
    index.place(DISK, rows, np.arange(2))
    index.clear(HOST, rows[1:])
    found = index.find(0, *arrays(keys, chain))
    assert (found.blocks, found.reason) == ({HOST: 1, DISK: 2}, None)


def test_a_reused_row_is_noticed_by_whoever_kept_its_number(index: Index) -> None:
    rows = stored(index, numbered(1), keys_of(numbered(1)))
    generations = index.generations(rows)
    assert index.alive(rows, generations).all()
    index.clear(HOST, rows)
    assert not index.alive(rows, generations).any()
    again = stored(index, numbered(2), keys_of(numbered(2)))
    assert again.tolist() == rows.tolist()
    assert not index.alive(rows, generations).any()


def test_a_held_block_that_is_dropped_keeps_its_slot_until_released(index: Index) -> None:
    chain = numbered(1, 2)
    keys = keys_of(chain)
    rows = stored(index, chain, keys)
    slots = index.slots(HOST, rows)
    index.hold(rows[1:])
    left = index.drop_subtree(rows[:1], HOST, MissReason.INVALIDATED)
    assert left.free_slots.tolist() == slots[:1].tolist()
    assert index.find(0, *arrays(keys, chain)).reason is MissReason.INVALIDATED
    fresh = stored(index, chain, keys)
    assert rows[1] not in fresh
    freed = index.unhold(rows[1:])
    assert {tier: these.tolist() for tier, these in freed.items()} == {HOST: [slots[1]]}
    index.check_integrity()


def test_rows_max_is_kept_and_what_fits_is_stored() -> None:
    index = Index(rows_expected=2, rows_max=3)
    index.add_space(BLOCK_TOKENS, 8192)
    chain = numbered(*range(5))
    answer = index.publish(
        HOST, 0, -1, *arrays(keys_of(chain), chain), np.arange(5), np.arange(5, dtype=np.uint64)
    )
    assert (len(answer.rows), answer.reason) == (3, SaveDrop.HOST_FULL)
    index.check_integrity()


def test_growth_loses_nothing(form: str) -> None:
    index = Index(rows_expected=1)
    index.add_space(BLOCK_TOKENS, 8192)
    chains = [numbered(*range(i, i + 50)) for i in range(60)]
    for chain in chains:
        stored(index, chain, keys_of(chain))
    index.check_integrity()
    assert index.table.buckets > 64
    for chain in chains:
        assert index.find(0, *arrays(keys_of(chain), chain)).reason is None


def test_an_index_of_one_tier_serves_pages() -> None:
    index = Index((TierName.DEVICE,))
    index.add_space(BLOCK_TOKENS, 8192)
    chain = numbered(1, 2)
    rows = stored(index, chain, keys_of(chain), tier=TierName.DEVICE)
    found = index.find(0, *arrays(keys_of(chain), chain))
    assert found.blocks == {TierName.DEVICE: 2}
    assert len(index.clear(TierName.DEVICE, rows[::-1]).free_slots) == 2
    index.check_integrity()


def test_a_touch_makes_the_deepest_block_the_oldest(index: Index) -> None:
    rows = stored(index, numbered(1, 2, 3), keys_of(numbered(1, 2, 3)))
    index.touch(rows)
    ages = index.rows.age[rows]
    assert (np.diff(ages) < 0).all()
    assert ages.min() > FIRST_AGE


def test_misuse_is_refused(index: Index) -> None:
    chain = numbered(1)
    keys, tokens = arrays(keys_of(chain), chain)
    one, content = np.zeros(1, np.int64), np.zeros(1, np.uint64)
    with pytest.raises(TokenError, match="int32"):
        index.find(0, keys, tokens.astype(np.int64))
    with pytest.raises(TokenError, match="one row a key"):
        index.find(0, keys, tokens[:, :2])
    with pytest.raises(ValueError, match="keys"):
        index.find(0, keys[:, :8], tokens)
    with pytest.raises(ValueError, match="slot ids"):
        index.publish(HOST, 0, -1, keys, tokens, one + SLOT_MAX + 1, content)
    rows = stored(index, chain, keys_of(chain))
    with pytest.raises(ValueError, match="once"):
        index.place(DISK, np.repeat(rows, 2), np.arange(2))
    with pytest.raises(ValueError, match="once"):
        index.clear(HOST, np.repeat(rows, 2))
    with pytest.raises(ValueError, match="another space"):
        index.find(index.add_space(BLOCK_TOKENS, 8192), keys, tokens, int(rows[0]))
    with pytest.raises(AssertionError, match="twice"):
        index.unlease(rows)
    with pytest.raises(ValueError, match="tiers"):
        Index((HOST, HOST))
