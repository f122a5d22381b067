"""Block keys: what they depend on, and that every form and every cut gives the same ones."""

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.hashing.chain import Chain, HashName, chain_function
from kvstore.native import build

HASHES: tuple[HashName, ...] = ("xxh3-128", "sha256")
PARENT = bytes(range(16))
MEDIA = {0: b"a" * 32, 2: b"b" * 32}


def tokens_of(blocks: int, block_tokens: int = 16, seed: int = 0) -> npt.NDArray[np.int32]:
    source = np.random.default_rng(seed)
    return source.integers(0, 2**31, (blocks, block_tokens)).astype(np.int32)


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("block_tokens", [1, 3, 4, 5, 12, 13, 16, 28, 29, 56, 57, 64, 333])
@pytest.mark.parametrize("media", [None, {}, MEDIA, {4: b"z" * 32}])
def test_a_key_is_the_hash_of_its_parent_and_its_own_block(
    form: str, name: HashName, block_tokens: int, media: dict[int, bytes] | None
) -> None:
    tokens = tokens_of(5, block_tokens)
    keys = chain_function(name)(PARENT, tokens, media)
    assert keys.shape == (5, 16) and keys.dtype == np.uint8
    parent = PARENT
    for block in range(5):
        data = parent + tokens[block].tobytes() + (media or {}).get(block, b"")
        parent = (
            xxhash.xxh3_128_digest(data)
            if name == "xxh3-128"
            else hashlib.sha256(data).digest()[:16]
        )
        assert keys[block].tobytes() == parent, block


@pytest.mark.parametrize("name", HASHES)
def test_a_chain_extended_in_pieces_has_the_keys_of_the_whole(form: str, name: HashName) -> None:
    tokens, chain = tokens_of(20), Chain(name)
    whole = chain.extend(PARENT, tokens)
    for cut in (0, 1, 7, 19, 20):
        head = chain.extend(PARENT, tokens[:cut])
        parent = head[-1].tobytes() if cut else PARENT
        pieces = np.concatenate([head, chain.extend(parent, tokens[cut:])])
        assert np.array_equal(pieces, whole), cut


@pytest.mark.parametrize("name", HASHES)
def test_any_change_changes_its_own_key_and_all_below_and_none_above(
    form: str, name: HashName
) -> None:
    tokens, extend = tokens_of(6), chain_function(name)
    whole = extend(PARENT, tokens, None)
    changed = tokens.copy()
    changed[3, 15] ^= 1
    for other in (extend(PARENT, changed, None), extend(PARENT, tokens, {3: bytes(32)})):
        assert np.array_equal(other[:3], whole[:3])
        assert not (other[3:] == whole[3:]).all(axis=1).any()
    assert not (extend(bytes(16), tokens, None) == whole).all(axis=1).any()


def test_tokens_are_left_as_they_were_and_keys_are_the_callers(form: str) -> None:
    tokens = tokens_of(3)
    tokens.flags.writeable = False
    before = tokens.copy()
    for name in HASHES:
        keys = chain_function(name)(PARENT, tokens, {1: bytes(32)})
        assert np.array_equal(tokens, before)
        keys[:] = 0  # Raises if the keys were a view of something immutable.


def test_compiled_and_plain_forms_agree_on_a_long_prompt() -> None:
    tokens, chain = tokens_of(6250), Chain("xxh3-128")
    native = chain.extend(PARENT, tokens, {5: bytes(32)})
    with build.forced_fallback():
        assert np.array_equal(chain.extend(PARENT, tokens, {5: bytes(32)}), native)


@pytest.mark.parametrize(
    ("parent", "tokens", "media"),
    [
        (b"short", tokens_of(1), None),
        (PARENT, tokens_of(2).astype(np.int64), None),
        (PARENT, tokens_of(2)[0], None),
        (PARENT, tokens_of(2)[:, ::2], None),
        (PARENT, np.zeros((2, 0), np.int32), None),
        (PARENT, tokens_of(2), {2: bytes(32)}),
        (PARENT, tokens_of(2), {-1: bytes(32)}),
        (PARENT, tokens_of(2), {0: bytes(31)}),
    ],
)
@pytest.mark.parametrize("name", HASHES)
def test_misuse_is_refused(
    form: str,
    name: HashName,
    parent: bytes,
    tokens: npt.NDArray[np.int32],
    media: dict[int, bytes] | None,
) -> None:
    with pytest.raises(ValueError):
        chain_function(name)(parent, tokens, media)


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="xxh3-128"):
        chain_function("md5")  # type: ignore[arg-type]
