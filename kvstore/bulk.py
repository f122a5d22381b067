"""Filling an index from what a former owner left: catalogue rows and a taken-over arena.

Whole arrays at a time, because a store may start with a million blocks. What cannot be reached is
left out: a row whose chain is broken anywhere before it, in each tier by itself.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.block_table import Keys, check_keys
from kvstore.index import FIRST_AGE, SLOT_MAX, Index
from kvstore.rows import MEDIA, MEDIA_UNSEEN, NONE, Ints, Longs, span
from kvstore.tiers.base import TierName

Mask = npt.NDArray[np.bool_]
NO_MEDIA = bytes(32)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks of one block size that lie in one tier; all arrays have n rows, in any order.

    keys, parents uint8 [n, 16]: the key, and the key of the block before (of a block at depth 0:
      anything). spaces uint16 [n]: their spaces' numbers. tokens int32 [n, block_tokens].
    depths uint32 [n], contents uint64 [n] (record generations), slots int64 [n].
    media: uint8 [n, 32] digests, zeros for none; or None if they are not known.
    """

    keys: Keys
    parents: Keys
    spaces: npt.NDArray[np.uint16]
    tokens: Ints
    depths: npt.NDArray[np.uint32]
    contents: npt.NDArray[np.uint64]
    slots: Longs
    media: npt.NDArray[np.uint8] | None = None


def bulk_load(index: Index, tier: TierName, blocks: StoredBlocks) -> Ints:
    """Put stored blocks into an index, which may hold others already. Call it once for each tier.

    A block whose key a row carries (from the other tier, or from a save that came first) is joined
    to that row if parent, tokens and generation are the same. Of two blocks with one key the one
    with the later generation is taken. Blocks in reach of no root are left out, as are those
    beyond the index's rows_max. A call brings all blocks of one size that the tier has: the block
    before each of them is among them, because the tier was prefix-closed.

    Returns: int32 [n], the row that now has the slot, or -1: free that slot.
    """
    if len(blocks.slots) and not 0 <= blocks.slots.min() <= blocks.slots.max() <= SLOT_MAX:
        raise ValueError(f"slot ids must lie in 0..{SLOT_MAX}")
    chosen = _newest_of_each_key(blocks)
    keys = check_keys(blocks.keys)
    rows = np.full(len(keys), NONE, np.int32)
    rows[chosen] = index.table.probe(keys[chosen])
    fresh = chosen[rows[chosen] < 0]
    joined = chosen[rows[chosen] >= 0]
    new = index.rows.allocate(len(fresh))
    fresh = fresh[: len(new)]  # What is beyond rows_max stays NONE.
    rows[fresh] = new
    _fill_columns(index, new, fresh, blocks)
    index.table.insert(new)
    parents = _parent_rows(index, blocks, rows)
    usable = rows >= 0
    usable[fresh] = (parents[fresh] >= 0) | (blocks.depths[fresh] == 0)
    usable[joined] = _same_block(index, rows[joined], parents[joined], joined, blocks)
    usable = _in_reach(index, rows, parents, usable)
    lost = fresh[~usable[fresh]]
    index.table.remove(rows[lost])
    index.rows.free(rows[lost])
    fresh = fresh[usable[fresh]]
    index.rows.link_many(rows[fresh], parents[fresh])
    usable[usable] = index.rows.slots[index.number(tier)][rows[usable]] < 0
    rows[~usable] = NONE
    index.pinned.attach_found(index.table.probe)
    index.adopt(tier, rows[usable], blocks.slots[usable])
    return rows


def _newest_of_each_key(blocks: StoredBlocks) -> Longs:
    """Places of the blocks to take: all, but for older ones with the same key."""
    words = np.ascontiguousarray(blocks.keys).view(np.uint64)
    order = np.argsort(words[:, 0])
    ordered = words[order, 0]
    if not (ordered[1:] == ordered[:-1]).any():
        return np.arange(len(words))
    order = np.lexsort((blocks.contents, words[:, 1], words[:, 0]))
    last = np.ones(len(order), bool)
    last[:-1] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    return np.sort(order[last])


def _fill_columns(index: Index, rows: Ints, places: Longs, blocks: StoredBlocks) -> None:
    columns, new, fresh = index.rows, span(rows), span(places)
    words = np.ascontiguousarray(blocks.keys).view(np.uint64)
    columns.key0[new], columns.key1[new] = words[fresh, 0], words[fresh, 1]
    columns.space[new] = blocks.spaces[fresh]
    columns.depth[new] = blocks.depths[fresh]
    columns.content[new] = blocks.contents[fresh]
    # Older than everything this run touches, and in the order in which they were saved.
    columns.age[new] = np.minimum(blocks.contents[fresh], FIRST_AGE).astype(np.int64)
    columns.store_tokens(rows, blocks.tokens[fresh])
    if blocks.media is None:
        columns.flags[new] |= np.uint8(MEDIA_UNSEEN)
    else:
        for row, digest in zip(rows.tolist(), blocks.media[fresh], strict=True):
            if digest.any():
                columns.media[row] = digest.tobytes()
                columns.flags[row] |= MEDIA


def _parent_rows(index: Index, blocks: StoredBlocks, rows: Ints) -> Ints:
    """The row of each block's parent; -1 for a root, and for a block whose parent no row is."""
    parents = np.full(len(rows), NONE, np.int32)
    below = np.flatnonzero((blocks.depths > 0) & (rows >= 0))
    parents[below] = index.table.probe(check_keys(blocks.parents[below]))
    known = below[parents[below] >= 0]
    theirs = parents[known]
    right = (index.rows.space[theirs] == blocks.spaces[known]) & (
        index.rows.depth[theirs].astype(np.int64) + 1 == blocks.depths[known]
    )
    parents[known[~right]] = NONE
    return parents


def _in_reach(index: Index, rows: Ints, parents: Ints, usable: Mask) -> Mask:
    """Which usable blocks have only usable blocks before them: bool [n].

    A parent must be among these blocks: a row that merely carries its key may be another block.
    """
    place = np.full(index.rows.high, NONE, np.int64)  # of each row, among these blocks
    place[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
    up = np.where(parents >= 0, place[parents], NONE)
    bad = ~usable | ((parents >= 0) & (up < 0))
    # A block is lost if any block before it is: pointers are doubled, so a chain of any length is
    # followed in as many steps as its length has bits.
    while bad[rows >= 0].any() and (up >= 0).any():
        bad |= (up >= 0) & bad[up]
        up = np.where(up >= 0, up[up], NONE)
    return ~bad


def _same_block(
    index: Index, rows: Ints, parents: Ints, joined: Longs, blocks: StoredBlocks
) -> Mask:
    """Which blocks are those that their rows stand for, by all that a lookup and a load compare."""
    columns = index.rows
    same: Mask = (
        (columns.space[rows] == blocks.spaces[joined])
        & (columns.parent[rows] == parents)
        & (columns.depth[rows] == blocks.depths[joined])
        & (columns.content[rows] == blocks.contents[joined])
    )
    tokens = columns.tokens(rows[same], blocks.tokens.shape[1])
    same[same] = (tokens == blocks.tokens[joined[same]]).all(axis=1)
    for at in np.flatnonzero(same).tolist() if columns.media or blocks.media is not None else ():
        theirs = NO_MEDIA if blocks.media is None else blocks.media[joined[at]].tobytes()
        same[at] = columns.media.get(int(rows[at]), NO_MEDIA) == theirs
    return same
