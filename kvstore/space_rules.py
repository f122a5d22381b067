"""Which namespaces a store takes: none that no tier holds, no second layout by mistake."""

from typing import TYPE_CHECKING

from kvstore.inspect import layout_of
from kvstore.labels import shown
from kvstore.placement import Placement
from kvstore.pool import PagePool
from kvstore.sequence import Sequence
from kvstore.tiers.errors import LayoutError

if TYPE_CHECKING:
    from kvstore.space import Space


def refuse_other_layout(placement: Placement, space: "Space") -> None:
    """Raise LayoutError where the store holds the same model and tenant in another layout."""
    there = placement.disk.namespaces().values() if placement.disk is not None else ()
    if any(known.digest == space.digest for known in there):
        return
    for known in there:
        stored = layout_of(known.layout)
        if known.label == space.label and stored not in (None, space.layout):
            raise LayoutError(
                f"the store holds {shown(space.label)} with blocks of {stored}, not "
                f"{space.layout}; use that layout or another store, or keep both with mixed=True"
            )


def refuse_too_large(placement: Placement, slot_bytes: int) -> None:
    """Raise LayoutError for a block that no segment of a tier can hold."""
    if not placement.host.fits(slot_bytes):
        raise LayoutError(
            f"a block takes {slot_bytes} bytes, more than a segment of host memory; "
            f"give the host tier at least {slot_bytes * 32} bytes or lower block_tokens"
        )
    if placement.disk is not None and not placement.disk.slab.fits(slot_bytes):
        raise LayoutError(
            f"a block takes {slot_bytes} bytes, more than a segment on disk; "
            f"give the disk tier at least {slot_bytes * 32} bytes or lower block_tokens"
        )


def refuse_other_pool(sequence: Sequence, pool: PagePool) -> None:
    """LayoutError for a pool of another layout than the sequence's."""
    if pool.layout != sequence.space.layout:
        raise LayoutError("the pool has another layout than the sequence; make it by its space")
