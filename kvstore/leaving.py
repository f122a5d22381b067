"""Blocks that leave every tier at once, used or not: what invalidation and healing have in common.

A slot that somebody still reads stays taken until the last use ends, but nobody finds its block any
more: not a lookup, not a new owner of the arena, not a restart. All under the placement's lock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvstore.outcomes import Left
from kvstore.placement import Placement
from kvstore.rows import Ints
from kvstore.tiers.base import MissReason, TierName


@dataclass
class Gone:
    """What left. blocks: each once. bytes: of their slots in every tier. tiers: where any was.

    held: (row, generation) of blocks that a copy under way still reads.
    """

    blocks: int = 0
    bytes: int = 0
    tiers: list[TierName] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: "Gone") -> None:
        """Both."""
        self.blocks += other.blocks
        self.bytes += other.bytes
        self.held += other.held


def drop_namespace(placement: Placement, space: int) -> Gone:
    """Everything of a namespace, by its number in the index, leaves every tier."""
    reason = MissReason.INVALIDATED
    return _drop(placement, space, lambda tier: placement.index.drop_space(space, tier, reason))


def drop_below(placement: Placement, row: int, reason: MissReason = MissReason.INVALIDATED) -> Gone:
    """A block and all its descendants leave every tier."""
    index, rows = placement.index, np.array([row], np.int32)

    def leave(tier: TierName) -> Left:
        return index.drop_subtree(rows[index.slots(tier, rows) >= 0], tier, reason)

    return _drop(placement, int(index.rows.space[row]), leave)


def still_held(placement: Placement, held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the blocks that are still read."""
    rows = placement.index.rows
    return [(r, g) for r, g in held if rows.generation[r] == g and rows.holds[r] > 0]


def _drop(placement: Placement, space: int, leave: Callable[[TierName], Left]) -> Gone:
    index = placement.index
    slot_bytes = int(index.rows.space_slot_bytes[space])
    gone, left_rows = Gone(), np.zeros(0, np.int32)
    # The faster tier first: what left it is not dirty when it leaves the next.
    for tier in index.tiers:
        before = index.lingering(tier)
        left = leave(tier)
        lingering = np.setdiff1d(index.lingering(tier), before)
        if tier is TierName.HOST:
            placement.release_host_slots(left.free_slots)
            placement.host.unpublish(lingering)
        elif placement.disk is not None:
            placement.disk.remove(left.free_slots)
            placement.disk.unlist(lingering)
        if len(left.rows):
            gone.tiers.append(tier)
        gone.bytes += len(left.rows) * slot_bytes
        left_rows = np.union1d(left_rows, left.rows).astype(np.int32)
    gone.blocks = len(left_rows)
    gone.held = _held(placement, left_rows)
    placement.write_gauges()
    return gone


def _held(placement: Placement, left: Ints) -> list[tuple[int, int]]:
    rows = placement.index.rows
    held = left[rows.holds[left] > 0]
    return list(zip(held.tolist(), rows.generation[held].tolist(), strict=True))
