"""Rows that a former owner left, put into an index at once."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.bulk import StoredBlocks, bulk_load
from kvstore.index import Index
from kvstore.native import build
from kvstore.tiers.base import MissReason, TierName
from support.index_model import Tokens, honest

HOST, DISK = TierName.HOST, TierName.DISK
ROOT = bytes(16)
BLOCK_TOKENS = 4


@pytest.fixture(params=["native", "fallback"])
def index(request: pytest.FixtureRequest) -> Iterator[Index]:
    index = Index(rows_expected=2)
    index.add_space(BLOCK_TOKENS, 8192)
    if request.param == "native":
        assert build.load() is not None
        yield index
    else:
        with build.forced_fallback():
            yield index


class Tree:
    """A random forest of blocks: what a store may have held."""

    def __init__(self, seed: int, blocks: int) -> None:
        random = np.random.default_rng(seed)
        self.tokens: list[Tokens] = []
        self.parent: list[int] = []
        self.keys: list[bytes] = []
        self.depth: list[int] = []
        known: set[bytes] = set()
        while len(self.keys) < blocks:
            parent = int(random.integers(-1, len(self.keys)))
            tokens = (int(random.integers(0, 1000)),) * BLOCK_TOKENS
            key = honest(self.keys[parent] if parent >= 0 else ROOT, tokens)
            if key not in known:
                known.add(key)
                self.tokens.append(tokens)
                self.parent.append(parent)
                self.keys.append(key)
                self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)

    def chain(self, block: int) -> list[int]:
        return [*self.chain(self.parent[block]), block] if block >= 0 else []

    def stored(self, these: list[int], first_slot: int = 0) -> StoredBlocks:
        parents = [self.keys[self.parent[b]] if self.parent[b] >= 0 else ROOT for b in these]
        return StoredBlocks(
            keys=np.frombuffer(b"".join(self.keys[b] for b in these), np.uint8).reshape(-1, 16),
            parents=np.frombuffer(b"".join(parents), np.uint8).reshape(-1, 16),
            spaces=np.zeros(len(these), np.uint16),
            tokens=np.array([self.tokens[b] for b in these], np.int32).reshape(-1, BLOCK_TOKENS),
            depths=np.array([self.depth[b] for b in these], np.uint32),
            contents=np.array(these, np.uint64),
            slots=np.arange(first_slot, first_slot + len(these)),
        )

    def find(self, index: Index, block: int) -> tuple[int, dict[TierName, int]]:
        chain = self.chain(block)
        keys = np.frombuffer(b"".join(self.keys[b] for b in chain), np.uint8).reshape(-1, 16)
        found = index.find(0, keys, np.array([self.tokens[b] for b in chain], np.int32))
        return len(found.rows), dict(found.blocks)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_reach_of_a_root_is_found_and_the_rest_left_out(index: Index, seed: int) -> None:
    tree = Tree(seed, 300)
    random = np.random.default_rng(seed)
    inside: dict[TierName, set[int]] = {}
    for tier, kept in ((HOST, 0.9), (DISK, 0.95)):
        these = [b for b in random.permutation(300).tolist() if random.random() < kept]
        inside[tier] = {b for b in these if set(tree.chain(b)) <= set(these)}
        assert 0 < len(inside[tier]) < len(these)
        rows = bulk_load(index, tier, tree.stored(these))
        index.check_integrity()
        assert {b for b, row in zip(these, rows.tolist(), strict=True) if row >= 0} == inside[tier]
        slots = index.slots(tier, rows[rows >= 0])
        assert slots.tolist() == np.flatnonzero(rows >= 0).tolist()
    assert len(index) == index.rows.used == len(inside[HOST] | inside[DISK])
    assert index.in_both == len(inside[HOST] & inside[DISK])
    for block in range(300):
        found, blocks = tree.find(index, block)
        in_tier = {t: sum(b in inside[t] for b in tree.chain(block)) for t in (HOST, DISK)}
        assert blocks == in_tier
        assert found == max(in_tier.values())


def test_a_chain_of_thousands_falls_with_its_first_block(index: Index) -> None:
    tree = Tree(0, 1)
    for depth in range(1, 3000):
        tokens = (depth,) * BLOCK_TOKENS
        tree.tokens.append(tokens)
        tree.keys.append(honest(tree.keys[-1], tokens))
        tree.parent.append(depth - 1)
        tree.depth.append(depth)
    rows = bulk_load(index, DISK, tree.stored([0, 1, *range(3, 3000)]))
    assert (rows >= 0).sum() == len(index) == 2
    index.check_integrity()


def test_of_two_records_of_one_block_the_newer_is_taken(index: Index) -> None:
    tree = Tree(1, 2)
    tree.parent[1], tree.depth[1] = 0, 1
    tree.keys[1] = honest(tree.keys[0], tree.tokens[1])
    stored = tree.stored([0, 1, 1, 0, 1])
    stored.contents[:] = (3, 7, 9, 2, 8)
    rows = bulk_load(index, DISK, stored)
    assert (rows >= 0).tolist() == [True, False, True, False, False]
    assert index.rows.content[rows[[0, 2]]].tolist() == [3, 9]
    index.check_integrity()


def test_another_generation_of_a_block_is_not_joined_to_its_row(index: Index) -> None:
    """A row has one generation, so the disk's copy could never pass its check."""
    tree = Tree(2, 1)
    bulk_load(index, HOST, tree.stored([0]))
    other = tree.stored([0])
    other.contents[:] = 99
    assert bulk_load(index, DISK, other).tolist() == [-1]
    assert tree.find(index, 0) == (1, {HOST: 1, DISK: 0})
    index.check_integrity()


def test_children_are_not_hung_under_another_block_with_their_parents_key(index: Index) -> None:
    tree = Tree(3, 2)
    tree.parent[1], tree.depth[1] = 0, 1
    tree.keys[1] = honest(tree.keys[0], tree.tokens[1])
    impostor = tree.stored([0])
    impostor.tokens[:] = 5000
    assert (bulk_load(index, DISK, impostor) >= 0).all()
    assert bulk_load(index, HOST, tree.stored([0, 1])).tolist() == [-1, -1]
    assert bulk_load(index, DISK, tree.stored([1])).tolist() == [-1]
    assert tree.find(index, 1) == (0, {HOST: 0, DISK: 0})
    index.check_integrity()


def test_loaded_blocks_are_colder_than_any_touched_since(index: Index) -> None:
    tree = Tree(4, 40)
    rows = bulk_load(index, DISK, tree.stored(list(range(40))))
    assert index.rows.age[rows].tolist() == list(range(40))
    touched = rows[tree.chain(39)]
    index.touch(touched)
    assert index.rows.age[touched].min() > index.rows.age[np.setdiff1d(rows, touched)].max()


def test_media_come_along(index: Index) -> None:
    tree = Tree(5, 1)
    stored = tree.stored([0])
    digest = np.full((1, 32), 6, np.uint8)
    for tier, media in ((HOST, digest), (DISK, digest), (DISK, None)):
        rows = bulk_load(index, tier, StoredBlocks(**{**vars_of(stored), "media": media}))
        assert (rows >= 0).all() == (media is not None)
        if tier is DISK and media is not None:
            index.clear(DISK, rows)
    tokens = stored.tokens
    assert index.find(0, stored.keys, tokens).reason is MissReason.COLLISION
    assert index.find(0, stored.keys, tokens, media={0: digest.tobytes()}).reason is None
    index.check_integrity()


def vars_of(stored: StoredBlocks) -> dict[str, np.ndarray | None]:
    return {name: getattr(stored, name) for name in StoredBlocks.__slots__}


def test_rows_max_leaves_out_what_does_not_fit() -> None:
    index = Index(rows_max=10)
    index.add_space(BLOCK_TOKENS, 8192)
    rows = bulk_load(index, DISK, Tree(6, 30).stored(list(range(30))))
    assert 0 < (rows >= 0).sum() == len(index) <= 10
    index.check_integrity()


def test_nothing_to_load(index: Index) -> None:
    assert len(bulk_load(index, DISK, Tree(0, 1).stored([]))) == 0
    index.check_integrity()
