"""Where a save's blocks go: what of them is there, slots for the others, and their publication.

Everything here is called by the saver, under the placement's lock.
"""

import numpy as np
import numpy.typing as npt

from kvstore.media import media_of
from kvstore.placement import Placement
from kvstore.plans import SavePlan
from kvstore.rows import Ints
from kvstore.sequence import Sequence
from kvstore.tiers.base import MissReason, SaveDrop, TierName

Keys = npt.NDArray[np.uint8]  # [n, 16]
NO_ROWS: Ints = np.zeros(0, np.int32)


class SavePlacement:
    """Plans and publishes the saves of one store."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._index = placement.index
        self._host = placement.index.number(TierName.HOST)

    def is_tail(self, tail: tuple[int, int] | None) -> bool:
        """Whether a saved block is still in host memory, so that the next can follow it."""
        if tail is None:
            return False
        row, generation = tail
        rows = self._index.rows
        return bool(rows.generation[row] == generation and rows.slots[self._host][row] >= 0)

    def plan(self, sequence: Sequence, keys: Keys, first: int, last: int) -> SavePlan:
        """Find what of blocks first..last-1 host memory lacks, and take slots for it."""
        placement, index = self._placement, self._index
        if not placement.started.is_set():
            return _nothing(first, SaveDrop.STARTING)
        parent = -1
        if first:
            if sequence.tail is None or not self.is_tail(sequence.tail):
                return _nothing(first, SaveDrop.PARENT_GONE)
            parent = sequence.tail[0]
        space, tokens = sequence.space, sequence.block_tokens(first, last)
        media = media_of(sequence, first, last)
        found = index.find(space.number, keys[first:last], tokens, parent, media)
        if len(found.rows):
            index.touch(found.rows)
        present, drop = found.blocks[TierName.HOST], None
        if found.reason is MissReason.COLLISION:
            last, drop = first + len(found.rows), SaveDrop.COLLISION
        anchor = int(found.rows[present - 1]) if present else parent
        if anchor >= 0:
            index.hold(np.array([anchor], np.int32))
            self._note_tail(sequence, first + present, anchor)
        start = first + present
        slots = placement.host_slots(space.record.slot_bytes, last - start)
        if len(slots) < last - start:
            last, drop = start + len(slots), SaveDrop.HOST_FULL
        generations = placement.new_generations(len(slots))
        known = found.rows[present : present + len(slots)]
        # A block that lies on disk keeps its record's generation: the disk's copy must match.
        if len(known):
            generations[: len(known)] = index.rows.content[known]
        return SavePlan(
            start, last, anchor, slots, generations, present, drop, known, index.changes
        )

    def publish(self, sequence: Sequence, keys: Keys, plan: SavePlan) -> int:
        """Make copied blocks findable. Returns how many of the plan's blocks are stored now."""
        placement, stored = self._placement, 0
        if len(plan.slots):
            published = self._index.publish(
                TierName.HOST,
                sequence.space.number,
                plan.anchor,
                keys[plan.first : plan.last],
                sequence.block_tokens(plan.first, plan.last),
                plan.slots,
                plan.generations,
                media_of(sequence, plan.first, plan.last),
                # What was found is still so, unless something moved while the bytes were copied.
                plan.known if plan.changes == self._index.changes else None,
            )
            stored = len(published.rows)
            if stored < len(plan.slots) or not published.placed.all():
                used = np.zeros(len(plan.slots), bool)
                used[:stored] = published.placed
                placement.release_host_slots(plan.slots[~used])
            if stored:
                placement.entered_host(published.rows)
                self._note_tail(sequence, plan.first + stored, int(published.rows[-1]))
            if published.reason is not None:
                plan.drop = published.reason
        if plan.anchor >= 0:
            placement.unhold(np.array([plan.anchor], np.int32))
        placement.write_gauges()
        return stored

    def abandon(self, plan: SavePlan) -> None:
        """Give back what a plan took, when its copy failed."""
        self._placement.release_host_slots(plan.slots)
        if plan.anchor >= 0:
            self._placement.unhold(np.array([plan.anchor], np.int32))

    def _note_tail(self, sequence: Sequence, blocks: int, row: int) -> None:
        sequence.saved_blocks = blocks
        sequence.tail = (row, int(self._index.rows.generation[row]))


def _nothing(first: int, drop: SaveDrop) -> SavePlan:
    none = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    return SavePlan(first, first, -1, *none, 0, drop, NO_ROWS, -1)
