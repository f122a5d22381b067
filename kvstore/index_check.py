"""Is an index whole? Every rule of index.py, asserted over all rows. For tests and `verify`."""

from typing import TYPE_CHECKING

import numpy as np

from kvstore.rows import HIDDEN, MEDIA, NO_SPACE, NONE

if TYPE_CHECKING:
    from kvstore.index import Index


def check_integrity(index: "Index") -> None:
    """AssertionError on the first rule that is broken."""
    rows, high = index.rows, index.rows.high
    everywhere = np.arange(high)
    free = np.zeros(high, bool)
    free[rows.list.free()] = True
    assert free.sum() == high - rows.used, "a row was freed twice"
    assert ((rows.space[:high] == NO_SPACE) == free).all(), "a free row has a space"
    inside = (rows.slots[0][:high] >= 0) | (rows.slots[1][:high] >= 0)
    hidden = (rows.flags[:high] & HIDDEN) != 0
    assert (inside ^ hidden ^ free).all(), "a row is not exactly one of findable, hidden, free"
    assert not (inside & hidden).any(), "a hidden row is in a tier"
    assert not (free & (rows.leases[:high] | rows.holds[:high]).astype(bool)).any(), "freed in use"
    assert (rows.in_use(everywhere.astype(np.int32)) >= hidden).all(), "hidden for nobody"
    _check_table(index, np.flatnonzero(inside))
    for number in range(2):
        _check_tier(index, number)
    both = (rows.slots[0][:high] >= 0) & (rows.slots[1][:high] >= 0)
    assert index.in_both == both.sum(), "in_both is miscounted"
    for total, column in ((index.uses.leased, rows.leases), (index.uses.held, rows.holds)):
        assert (column[:high] >= 0).all(), "a count of uses is negative"
        assert total == column[:high].sum(), "leases or holds are miscounted"
    _check_tree(index, np.flatnonzero(inside))
    media = np.flatnonzero(rows.flags[:high] & MEDIA)
    assert set(media.tolist()) == set(rows.media), "media digests without rows, or rows without"
    for size, pool in rows.pools.items():
        tokened = ~free & (index.rows.space_block_tokens[rows.space[:high] % 0xFFFF] == size)
        used = rows.token_row[:high][tokened]
        assert len(np.unique(used)) == len(used) == pool.list.used, "token rows leak or are shared"


def _check_table(index: "Index", inside: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    entries = np.sort(index.table.entries())
    assert np.array_equal(entries, inside), "the table and the rows disagree"
    assert len(index.table) == len(inside), "the table miscounts"
    findable = inside.astype(np.int32)
    assert np.array_equal(index.table.probe(index.rows.keys(findable)), findable), "unfindable row"


def _check_tier(index: "Index", number: int) -> None:
    rows, high = index.rows, index.rows.high
    slots, children = rows.slots[number][:high], rows.children[number][:high]
    here = slots >= 0
    assert index._blocks[number] == here.sum(), "blocks of a tier are miscounted"
    assert len(np.unique(slots[here])) == here.sum(), "two rows share a slot"
    parents = rows.parent[:high][here]
    assert (slots[parents[parents >= 0]] >= 0).all(), "a tier is not prefix-closed"
    counts = np.bincount(parents[parents >= 0], minlength=high)
    assert (children[~here] == NONE).all(), "a row outside a tier counts children in it"
    assert np.array_equal(children[here], counts[here]), "children are miscounted"
    if number < len(index.tiers):
        lingering = set(index.lingering(index.tiers[number]).tolist())
        assert not lingering & set(slots[here].tolist()), "a lingering slot was given away"


def _check_tree(index: "Index", inside: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    rows = index.rows
    parents = rows.parent[inside]
    below = parents >= 0
    assert (rows.depth[inside[~below]] == 0).all(), "a root is not at depth 0"
    deeper = rows.depth[inside[below]] == rows.depth[parents[below]] + 1
    assert deeper.all(), "a child is not one deeper than its parent"
    assert (rows.space[inside[below]] == rows.space[parents[below]]).all(), "a child changed space"
    listed: set[int] = set()
    for parent in inside.tolist():
        before, child = NONE, int(rows.first_child[parent])
        while child >= 0:
            assert rows.parent[child] == parent, "a child is in another's list"
            assert rows.previous_sibling[child] == before, "a list of children is torn"
            assert child not in listed, "a child is listed twice"
            listed.add(child)
            before, child = child, int(rows.next_sibling[child])
    assert listed == set(inside[below].tolist()), "a child is in no list"
