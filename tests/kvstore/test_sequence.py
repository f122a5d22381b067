"""Sequences: tokens and keys that only ever grow at their end, the same however they arrive."""

import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.sequence import FIRST_CAPACITY, Sequence
from kvstore.space import Space
from kvstore.store import open as open_store
from kvstore.tiers.errors import TokenError
from support.engine import prompt
from support.layouts import small_layout

BLOCK = 4


@pytest.fixture(scope="module")
def space() -> Iterator[Space]:
    with open_store(host="4MiB") as store:
        yield store.namespace(small_layout(BLOCK), model="m")


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 7 * BLOCK + 3])
def test_lengths(space: Space, length: int) -> None:
    tokens = prompt(length)
    sequence = space.sequence(tokens)
    assert sequence.length == length
    assert sequence.blocks == length // BLOCK == len(sequence.keys)
    assert np.array_equal(sequence.tokens, tokens)
    assert np.array_equal(
        sequence.block_tokens(0, sequence.blocks).ravel(), tokens[: length // 4 * 4]
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK), max_size=20))
def test_keys_do_not_depend_on_how_tokens_arrive(space: Space, pieces: list[int]) -> None:
    tokens = prompt(sum(pieces))
    whole, grown = space.sequence(tokens), space.sequence()
    at = 0
    for piece in pieces:
        grown.extend(tokens[at : at + piece])
        at += piece
    assert np.array_equal(grown.keys, whole.keys)
    assert np.array_equal(grown.tokens, whole.tokens)


def test_one_token_at_a_time_far_beyond_the_first_room(space: Space) -> None:
    tokens = prompt(3 * FIRST_CAPACITY + 1)
    sequence = space.sequence()
    for token in tokens:
        sequence.extend([int(token)])
    assert np.array_equal(sequence.keys, space.sequence(tokens).keys)


def test_what_a_save_keeps_does_not_change_when_the_sequence_grows(space: Space) -> None:
    sequence = space.sequence(prompt(FIRST_CAPACITY))
    keys, tokens = sequence.keys, sequence.block_tokens(0, sequence.blocks)
    kept = keys.copy(), tokens.copy()
    sequence.extend(prompt(10 * FIRST_CAPACITY, seed=2))
    assert np.array_equal(keys, kept[0])
    assert np.array_equal(tokens, kept[1])


def test_a_key_names_all_tokens_before_it(space: Space) -> None:
    tokens = prompt(5 * BLOCK)
    other = tokens.copy()
    other[BLOCK] += 1  # the first token of block 1
    one, two = space.sequence(tokens).keys, space.sequence(other).keys
    assert np.array_equal(one[0], two[0])
    assert all(not np.array_equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_every_kind_of_integers_gives_the_same_keys(space: Space) -> None:
    tokens = prompt(3 * BLOCK)
    expected = space.sequence(tokens).keys
    strided = np.repeat(tokens, 2)[::2]
    others: list[Any] = [tokens.tolist(), tuple(tokens.tolist()), tokens.astype(np.int64)]
    others += [
        tokens.astype(np.uint32),
        strided,
        tokens.astype(">i4"),
        array.array("i", tokens.tolist()),
    ]
    for other in others:
        assert np.array_equal(space.sequence(other).keys, expected)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [True, False],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        ["a"],
        [None],
        7,
        [-1],
        [2**31],
        [2**70],
        np.array([-1], np.int32),
        np.array([2**40], np.int64),
        np.array([2**63], np.uint64),
        np.zeros((2, 2), np.int32),
    ],
)
def test_what_are_no_tokens(space: Space, tokens: Any) -> None:
    sequence = space.sequence(prompt(BLOCK + 1))
    with pytest.raises(TokenError) as caught:
        sequence.extend(tokens)
    assert "\n" not in str(caught.value)
    assert (sequence.length, sequence.blocks) == (BLOCK + 1, 1)  # nothing was added


def test_the_largest_token_is_a_token(space: Space) -> None:
    assert space.sequence([2**31 - 1] * BLOCK).blocks == 1


def test_media_changes_the_keys_from_its_block_on(space: Space) -> None:
    tokens = prompt(4 * BLOCK)
    plain = space.sequence(tokens).keys
    one = space.sequence(tokens, media={2: b"x" * 32}).keys
    two = space.sequence(tokens, media={2: b"y" * 32}).keys
    assert np.array_equal(plain[:2], one[:2])
    assert len({keys[at].tobytes() for keys in (plain, one, two) for at in (2, 3)}) == 6
    late = Sequence(space, tokens[: BLOCK + 1], {2: b"x" * 32})
    late.extend(tokens[BLOCK + 1 :])
    assert np.array_equal(late.keys, one)


@pytest.mark.parametrize("media", [{0: b"short"}, {-1: b"x" * 32}, {9: "x" * 32}])
def test_what_is_no_media_digest(space: Space, media: dict[int, Any]) -> None:
    with pytest.raises(TokenError, match="32 bytes") as caught:
        space.sequence(prompt(BLOCK), media=media)
    assert "\n" not in str(caught.value)
