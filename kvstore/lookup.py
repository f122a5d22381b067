"""Looking up: the longest stored prefix of a sequence, and what is counted of it."""

import numpy as np

from kvstore.placement import Placement
from kvstore.rows import Ints
from kvstore.sequence import Sequence
from kvstore.tiers.base import MissReason, TierName


def find_prefix(
    placement: Placement, sequence: Sequence, usable: int
) -> tuple[Ints, int, MissReason]:
    """The rows of the longest prefix within `usable` blocks, which counts as their use.

    Under the placement's lock. Returns: (rows, how many of them host memory holds, why the next is
    missing if one is).
    """
    if not placement.started.is_set():
        return np.zeros(0, np.int32), 0, MissReason.STARTING
    found = placement.index.find(
        sequence.space.number,
        sequence.keys[:usable],
        sequence.block_tokens(0, usable),
        media=sequence.media or None,
    )
    placement.index.touch(found.rows)
    placement.pins.hit(sequence, found.rows, usable)
    in_host = found.blocks[TierName.HOST]
    readable = placement.disk_watch.readable(placement.index, found.rows, in_host)
    if readable < len(found.rows):
        return found.rows[:readable], in_host, MissReason.OFF
    return found.rows, in_host, found.reason or MissReason.ABSENT


def count_lookup(
    placement: Placement,
    sequence: Sequence,
    found: int,
    usable: int,
    skip_tokens: int,
    reason: MissReason,
) -> dict[MissReason, int]:
    """Count each block of a request once, whatever is asked again. Returns: tokens missed."""
    size, counters = sequence.space.layout.block_tokens, placement.counters
    device = min(usable, skip_tokens // size)
    with placement.lock:
        hit = int(sequence.outcomes.take(0, device).sum())
        missed = int(sequence.outcomes.take(max(found, device), usable).sum())
    counters.add("lookups")
    counters.add("tokens_asked", max(0, usable - sequence.asked_blocks) * size)
    counters.add("tokens_hit.device", hit * size)
    counters.add(f"misses.{reason}", missed * size)
    sequence.asked_blocks = max(sequence.asked_blocks, usable)
    return {reason: (usable - found) * size} if usable > found else {}
