"""A stored block that an engine found bad by a check of its own: it goes, and is written again."""

from kvstore.leaving import Gone, drop_below
from kvstore.media import media_of
from kvstore.placement import Placement
from kvstore.sequence import Sequence
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.errors import TokenError


def report_bad(placement: Placement, sequence: Sequence, block: int) -> int:
    """Drop a block of a sequence, and what was computed from it, from every tier.

    See Store.report_bad. Returns: how many blocks were dropped.
    """
    if not 0 <= block < sequence.blocks:
        raise TokenError(
            f"block {block} is not one of the sequence's {sequence.blocks} full blocks"
        )
    with placement.lock:
        space = sequence.space
        found = placement.index.find(
            space.number,
            sequence.keys[: block + 1],
            sequence.block_tokens(0, block + 1),
            media=media_of(sequence, 0, block + 1),
        )
        gone = Gone()
        if len(found.rows) > block:
            gone = drop_below(placement, int(found.rows[block]), MissReason.EVICTED)
        for tier in gone.tiers or [TierName.DEVICE]:
            placement.counters.add(f"bad_blocks.{tier}")
        # Saves of others may hold what was computed from the bad block, and so may the engines.
        placement.epochs[space.number] += 1
        sequence.renew()
    return gone.blocks
