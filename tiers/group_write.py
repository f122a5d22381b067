"""The bytes of a group on their way to segment files: several threads, then one sync a file."""

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvstore.tiers.catalogue import ROWS_PER_TXN
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.disk_outcomes import Slots, WriteFault
from kvstore.tiers.io import FileIo
from kvstore.tiers.slab import Slab

Submit = Callable[[Callable[[], None]], "Future[None]"]

MERGE_BYTES = 1 << 20  # Neighbouring records go to the device in one call up to this size.
INLINE_BYTES = 256 << 10  # A smaller group is not worth a second thread.


class Piece(NamedTuple):
    """One record and where it goes: a descriptor and a byte offset."""

    fd: int
    offset: int
    record: memoryview


class GroupWriter:
    """Writes groups with up to `threads` threads: the caller's own, and others by `submit`."""

    def __init__(self, io: FileIo, submit: Submit | None, threads: int) -> None:
        self._io = io
        self._submit = submit
        self._threads = threads if submit is not None else 1

    def write(self, pieces: Sequence[Piece]) -> WriteFault | None:
        """Write all pieces and wait for all, whatever happens. Nothing is synced.

        Returns: None | NO_SPACE | IO_ERROR.
        """
        ordered = sorted(pieces, key=lambda piece: piece[:2])
        size = sum(len(piece.record) for piece in ordered)
        threads = 1 if size < INLINE_BYTES else self._threads
        share = -(-len(ordered) // threads)
        parts = [ordered[at : at + share] for at in range(0, len(ordered), share)]
        faults: list[WriteFault] = []
        waiting = []
        if self._submit is not None:
            waiting = [self._submit(partial(self._part, part, faults)) for part in parts[1:]]
            parts = parts[:1]
        for part in parts:
            self._part(part, faults)
        for future in waiting:
            future.result()
        return faults[0] if faults else None

    def sync(self, fd: int) -> bool:
        """fdatasync a file. Returns: whether all that was written to it is on the device."""
        try:
            self._io.fdatasync(fd)
        except OSError:
            return False
        return True

    def _part(self, part: Sequence[Piece], faults: list[WriteFault]) -> None:
        try:
            for run in _runs(part):
                self._io.pwritev(run[0].fd, [piece.record for piece in run], run[0].offset)
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            faults.append(WriteFault.NO_SPACE if full else WriteFault.IO_ERROR)


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that lie one after the other in a file, at most MERGE_BYTES of them at once."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        follows = run and piece.fd == run[0].fd and piece.offset == run[0].offset + size
        if run and not (follows and size + len(piece.record) <= MERGE_BYTES):
            yield run
            run, size = [], 0
        run.append(piece)
        size += len(piece.record)
    if run:
        yield run


def refuse_bad_group(
    slab: Slab, reserved: set[int], slots: Slots, records: Sequence[memoryview], rows: Rows
) -> int:
    """Raise ValueError for a group that is not one reserved slot, record and row for each block.

    Returns: the group's slot_bytes.
    """
    if not 0 < len(slots) == len(records) == len(rows):
        raise ValueError("a group has as many slots as records and rows, and at least one")
    if len(rows) > ROWS_PER_TXN:
        raise ValueError(f"a group has at most {ROWS_PER_TXN} blocks, to be one commit")
    wanted = slots.tolist()
    if len(set(wanted)) != len(wanted) or not reserved.issuperset(wanted):
        raise ValueError("every slot of a group is reserved, and appears once")
    sizes = {slab.class_of(segment) for segment in set(slab.segments_of(slots).tolist())}
    slot_bytes = sizes.pop()
    if sizes or any(len(record) != slot_bytes for record in records):
        raise ValueError(f"every record of this group has {slot_bytes} bytes, as its slots have")
    return slot_bytes
