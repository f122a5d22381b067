"""What the index answers: values, never exceptions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.rows import Ints, Longs
from kvstore.tiers.base import MissReason, SaveDrop, TierName


@dataclass(frozen=True, slots=True)
class Found:
    """The longest stored prefix of a chain.

    rows: int32 [m], root first. blocks: for each tier, how many of them it holds (the first ones).
    reason: why block m is missing (ABSENT, EVICTED, INVALIDATED, COLLISION); None if none is.
    """

    rows: Ints
    blocks: Mapping[TierName, int]
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class Published:
    """What became of the blocks of a save.

    rows: int32 [k], root first: the leading blocks that are now in the tier.
    placed: bool [k]: the slot given for it is used; where False the block was there already
      (PRESENT) and the caller gives its slot back.
    reason: why blocks from k on, and their slots, were not taken; None if all were.
    """

    rows: Ints
    placed: npt.NDArray[np.bool_]
    reason: SaveDrop | None


@dataclass(frozen=True, slots=True)
class Left:
    """Rows that left a tier.

    rows: int32 [n]. slots: int64 [n], free for reuse now, or -1 where someone still uses the row:
    `unlease` or `unhold` gives that slot back later.
    """

    rows: Ints
    slots: Longs

    @property
    def free_slots(self) -> Longs:
        """The slots that are free now."""
        return self.slots[self.slots >= 0]
