"""Bad blocks on disk, dropped by the store's owner with all that was computed from them.

The next save writes them again. Whoever found them read beside the owner, so each is read again
here before it goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.bad_block import BadReason
from kvstore.hashing.namespace import root_key
from kvstore.placement import Placement
from kvstore.rows import Ints
from kvstore.slot_check import KnownSpace, faults_of, header_fault
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue_row import Rows, row_dtype
from kvstore.tiers.io import aligned_buffer
from kvstore.tiers.record import ALIGN, KEY_BYTES

SUSPECTS_MAX = 512  # In one call.


@dataclass(frozen=True)
class Suspect:
    """A block on disk that seems bad. segment, index: its slot; key: 16 bytes."""

    segment: int
    index: int
    key: bytes


@dataclass(frozen=True)
class Dropped:
    """What became of suspects: each is under exactly one of the first three.

    dropped: they were bad.  whole: they are not bad, and stay.  gone: they are not there any more,
    or never could be found.  descendants: further blocks that left the disk with them.
    """

    dropped: int
    whole: int
    gone: int
    descendants: int


def drop_bad_blocks(
    placement: Placement, numbers: Mapping[bytes, int], suspects: Sequence[Suspect]
) -> Dropped:
    """Read suspects again, and drop those that are bad from the disk tier, with all below them.

    numbers: of the namespaces in the index, by digest. What host memory has of them stays there and
    is written again. Raises ValueError for more than SUSPECTS_MAX.

    Returns: Dropped.
    """
    if len(suspects) > SUSPECTS_MAX or any(len(one.key) != KEY_BYTES for one in suspects):
        raise ValueError(
            f"give at most {SUSPECTS_MAX} suspects, each with a key of {KEY_BYTES} bytes"
        )
    assert placement.disk is not None
    dropped = whole = gone = descendants = 0
    for suspect in suspects:
        with placement.lock:
            row = _find(placement, suspect)
            if row is None:
                gone += 1
                continue
            placement.index.hold(row)
            there, space = _facts(placement, numbers, suspect, row)
        fault: BadReason | None = BadReason.IO_ERROR
        try:
            fault = _read_again(placement, there, space)
        finally:
            with placement.lock:
                before = placement.index.blocks(TierName.DISK)
                if fault is not None and _find(placement, suspect) is not None:
                    placement.drop_bad(int(row[0]), TierName.DISK)
                left = before - placement.index.blocks(TierName.DISK)
                placement.unhold(row)
        dropped += left > 0
        descendants += max(0, left - 1)
        whole += fault is None
        gone += fault is not None and left == 0
    placement.disk.flush_removals()
    return Dropped(dropped, whole, gone, descendants)


def _find(placement: Placement, suspect: Suspect) -> Ints | None:
    """The row of a block whose record is in this very slot, as an array [1]; or None."""
    assert placement.disk is not None
    key = np.frombuffer(suspect.key, np.uint8).reshape(1, 16)
    row = placement.index.table.probe(key)
    if row[0] < 0:
        return None
    slot = suspect.segment * placement.disk.per + suspect.index
    return row if int(placement.index.slots(TierName.DISK, row)[0]) == slot else None


def _facts(
    placement: Placement, numbers: Mapping[bytes, int], suspect: Suspect, row: Ints
) -> tuple[Rows, KnownSpace]:
    """What the record must be, as a row of the catalogue, and its namespace."""
    assert placement.disk is not None
    columns = placement.index.rows
    number, parent = int(columns.space[row[0]]), columns.parent[row]
    digest = next(digest for digest, known in numbers.items() if known == number)
    block_tokens = int(columns.space_block_tokens[number])
    there = np.zeros(1, row_dtype(block_tokens))
    there["generation"] = columns.content[row]
    there["key"] = np.frombuffer(suspect.key, "V16")
    before = columns.keys(parent).tobytes() if parent[0] >= 0 else root_key(digest)
    there["parent"] = np.frombuffer(before, "V16")
    there["segment"], there["index"] = suspect.segment, suspect.index
    there["slot_pages"] = placement.disk.slab.class_of(suspect.segment) // ALIGN
    there["tokens"] = columns.tokens(row, block_tokens)
    for namespace in placement.disk.namespaces().values():
        if namespace.digest == digest:
            return there, KnownSpace.of(namespace)
    return there, KnownSpace(digest, "", None)


def _read_again(placement: Placement, there: Rows, space: KnownSpace) -> BadReason | None:
    """Read the record of a row that is held, and check it."""
    assert placement.disk is not None
    slot_bytes = int(there["slot_pages"][0]) * ALIGN
    buffer = aligned_buffer(slot_bytes)
    slot = int(there["segment"][0]) * placement.disk.per + int(there["index"][0])
    if placement.disk.read_into(slot, buffer) is not None:
        return BadReason.IO_ERROR
    view = np.frombuffer(buffer, np.uint8)
    if space.layout is None:
        return header_fault(view, 0, there[0], slot_bytes, space)
    return faults_of(view, np.zeros(1, np.int64), there, slot_bytes, space.layout, space)[0]
