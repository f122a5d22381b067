"""The page pool: states of pages, shared prefixes, eviction, and copies that still read a page."""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore.hashing.chain import ChainFunction, chain_function
from kvstore.runtime.pages import PagePool
from kvstore.tiers.errors import ConfigError

SIZE = 4  # tokens in a page
HASHER = chain_function("xxh3-128")
ROOT = bytes(16)


@dataclass
class Copying:
    """A copy of the store that ends when the test says so."""

    done: bool = False


def pool_of(pages: int) -> PagePool:
    return PagePool(layers=2, kv_heads=1, head_dim=8, pages=pages, page_tokens=SIZE)


def chain(
    *blocks: int, hasher: ChainFunction = HASHER
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Keys and tokens of blocks, each block being one number repeated."""
    tokens = np.repeat(np.array(blocks, np.int32)[:, None], SIZE, axis=1)
    return hasher(ROOT, tokens, None), tokens


def put(pool: PagePool, *blocks: int) -> list[int]:
    """Compute a prompt as a request does, and end: its blocks are cached. Returns its pages."""
    keys, tokens = chain(*blocks)
    pages = pool.find(keys, tokens)
    pool.retain(pages)
    fresh = pool.allocate(len(blocks) - len(pages))
    assert fresh is not None
    pool.publish(keys, tokens, pages + fresh)
    pool.release(pages + fresh)
    pool.check_integrity()
    return pages + fresh


def test_tensors_are_one_pair_a_layer_and_zero() -> None:
    pool = pool_of(5)
    assert [tuple(part.shape) for part in pool.arrays()] == [(5, SIZE, 1, 8)] * 4
    assert all(part.is_contiguous() and not part.any() for part in pool.arrays())
    assert pool.arrays()[1] is pool.values[0] and pool.arrays()[2] is pool.keys[1]
    assert pool.layout.payload_bytes == 2 * 2 * SIZE * 8 * 4


def test_pages_come_back_and_too_many_are_refused_whole() -> None:
    pool = pool_of(3)
    pages = pool.allocate(2)
    assert pages is not None and len(set(pages)) == 2
    assert pool.allocate(2) is None and pool.available == 1
    pool.release(pages)
    assert pool.allocate(3) is not None


def test_a_full_block_is_shared_without_a_copy() -> None:
    pool = pool_of(4)
    pages = put(pool, 1, 2)
    pool.keys[0][pages[0]] = 7.0
    found = pool.find(*chain(1, 3))
    assert found == pages[:1] and bool((pool.keys[0][found[0]] == 7.0).all())
    pool.retain(found)
    pool.retain(found)  # a second request
    pool.release(found)
    assert pool.in_use == 1 and pool.cached == 1
    pool.release(found)
    assert pool.in_use == 0 and pool.cached == 2
    pool.check_integrity()


def test_the_deepest_block_goes_first_and_the_prefix_stays_usable() -> None:
    pool = pool_of(4)
    pages = put(pool, 1, 2, 3, 4)
    assert pool.allocate(1) == [pages[3]]
    assert pool.find(*chain(1, 2, 3, 4)) == pages[:3]
    pool.check_integrity()


def test_the_chain_used_least_recently_goes_first() -> None:
    pool = pool_of(4)
    old, new = put(pool, 1, 2), put(pool, 3, 4)
    pool.find(*chain(1, 2))  # used again, so the other one is the colder now
    assert sorted(pool.allocate(2) or []) == sorted(new)
    assert pool.find(*chain(1, 2)) == old
    assert pool.find(*chain(3, 4)) == []


def test_pages_in_use_are_never_evicted() -> None:
    pool = pool_of(4)
    pages = put(pool, 1, 2)
    pool.retain(pages)
    assert pool.allocate(3) is None
    fresh = pool.allocate(2)
    assert fresh is not None and not set(fresh) & set(pages)


def test_a_block_computed_twice_stays_where_it_was_first() -> None:
    pool = pool_of(4)
    first = put(pool, 1)
    keys, tokens = chain(1, 2)
    own = pool.allocate(2)
    assert own is not None
    pool.publish(keys, tokens, own)
    assert pool.find(keys, tokens) == [first[0], own[1]]
    pool.release(own)
    assert pool.available == 4 and pool.cached == 2
    pool.check_integrity()


def test_a_page_is_not_reused_while_a_copy_touches_it() -> None:
    pool = pool_of(3)
    copying = Copying()
    pages = pool.allocate(2)
    assert pages is not None
    pool.hold_for(copying, pages)
    pool.release(pages)  # the request is over; the save is not
    assert pool.allocate(2) is None and not pool.wait_copies(timeout_s=0.01)
    copying.done = True
    assert pool.wait_copies()
    again = pool.allocate(3)
    assert again is not None and set(pages) < set(again)


def test_allocate_takes_back_what_finished_copies_held() -> None:
    pool = pool_of(1)
    copying = Copying()
    pages = pool.allocate(1)
    assert pages is not None
    pool.hold_for(copying, pages)
    pool.release(pages)
    copying.done = True
    assert pool.allocate(1) == pages and pool.copies == 0


def test_a_hash_collision_never_gives_another_prompts_page() -> None:
    def colliding(parent: bytes, tokens: npt.NDArray[np.int32], _: object) -> npt.NDArray[np.uint8]:
        return np.tile(np.arange(len(tokens), dtype=np.uint8)[:, None], (1, 16))

    pool = pool_of(4)
    keys, tokens = chain(1, 2, hasher=colliding)
    first = pool.allocate(2)
    assert first is not None
    pool.publish(keys, tokens, first)
    other = chain(8, 9, hasher=colliding)
    assert pool.find(*other) == []
    second = pool.allocate(2)
    assert second is not None
    pool.publish(*other, second)
    assert pool.find(*other) == [] and pool.find(keys, tokens) == first
    pool.release(second)
    assert pool.cached == 0
    pool.release(first)
    pool.check_integrity()


def test_clear_forgets_blocks_but_takes_no_page_from_its_user() -> None:
    pool = pool_of(4)
    put(pool, 5, 6)
    pages = put(pool, 1)
    pool.retain(pages)
    pool.clear()
    assert pool.find(*chain(1)) == [] and pool.find(*chain(5)) == []
    assert pool.in_use == 1 and pool.available == 3
    pool.check_integrity()
    pool.release(pages)
    assert pool.available == 4 and pool.cached == 0


@pytest.mark.parametrize("pages", [0, -1, 1 << 40])
def test_sizes_that_make_no_sense_are_refused(pages: int) -> None:
    with pytest.raises(ConfigError, match="pages="):
        pool_of(pages)


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_always_find_the_bytes_of_their_own_prefix(seed: int) -> None:
    """Against a plain model: what a page must hold is a function of the whole prefix."""
    choose = random.Random(seed)
    pool = pool_of(choose.choice([6, 12, 40]))
    live: list[tuple[tuple[int, ...], list[int]]] = []
    copies: list[Copying] = []
    for _ in range(1500):
        action = choose.random()
        if action < 0.5:
            blocks = tuple(choose.randrange(3) for _ in range(choose.randint(1, 6)))
            keys, tokens = chain(*blocks)
            shared = pool.find(keys, tokens)
            for depth, page in enumerate(shared):
                assert float(pool.keys[1][page, 0, 0, 0]) == _mark(blocks[: depth + 1]), blocks
            pool.retain(shared)
            fresh = pool.allocate(len(blocks) - len(shared))
            if fresh is None:
                pool.release(shared)
                continue
            for depth, page in enumerate(fresh, len(shared)):
                pool.keys[1][page] = _mark(blocks[: depth + 1])
            pool.publish(keys, tokens, shared + fresh)
            live.append((blocks, shared + fresh))
            if choose.random() < 0.3:
                copies.append(Copying())
                pool.hold_for(copies[-1], shared + fresh)
        elif action < 0.9 and live:
            blocks, pages = live.pop(choose.randrange(len(live)))
            for depth, page in enumerate(pages):
                assert float(pool.keys[1][page, 0, 0, 0]) == _mark(blocks[: depth + 1])
            pool.release(pages)
        elif copies:
            copies.pop(choose.randrange(len(copies))).done = True
        if choose.random() < 0.02:
            pool.check_integrity()
        if choose.random() < 0.005:
            pool.clear()
    for _, pages in live:
        pool.release(pages)
    for copying in copies:
        copying.done = True
    pool.reap_copies()
    assert pool.in_use == 0 and pool.available == pool.pages
    pool.check_integrity()
    assert isinstance(pool.keys[0], torch.Tensor)


def _mark(blocks: tuple[int, ...]) -> float:
    return float(hash(blocks) % 1_000_003)
