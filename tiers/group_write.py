"""The bytes of a group on their way to segment files: several threads, then one sync a file."""

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore.tiers.catalogue import ROWS_PER_TXN
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.disk_outcomes import Slots, WriteFailed, WriteFault
from kvstore.tiers.failpoints import planted, reach
from kvstore.tiers.io import FileIo
from kvstore.tiers.open_files import OpenFiles
from kvstore.tiers.slab import Slab

Submit = Callable[[Callable[[], None]], "Future[None]"]

MERGE_BYTES = 1 << 20  # Neighbouring records go to the device in one call up to this size.
INLINE_BYTES = 256 << 10  # A smaller group is not worth a second thread.
FILES_AT_ONCE = 4  # A group that is scattered over more files holds no more of them open.


class Piece(NamedTuple):
    """One record and where it goes: a segment and a byte offset in its file."""

    segment: int
    offset: int
    record: memoryview


class GroupWriter:
    """Writes groups with up to `threads` threads: the caller's own, and others by `submit`.

    abandon: called with a segment whose sync failed; returns the slots of the blocks that are lost
    with it. is_abandoned: whether that happened to a segment. Thread-safe.
    """

    def __init__(
        self,
        io: FileIo,
        files: OpenFiles,
        *,
        submit: Submit | None,
        threads: int,
        abandon: Callable[[int], list[int]],
        is_abandoned: Callable[[int], bool],
    ) -> None:
        self._io = io
        self._files = files
        self._submit = submit
        self._threads = threads if submit is not None else 1
        self._abandon = abandon
        self._is_abandoned = is_abandoned
        self._sync_lock = threading.Lock()

    def write(self, pieces: Sequence[Piece]) -> WriteFailed | None:
        """Write all pieces and sync their files, FILES_AT_ONCE of them at a time.

        Each file is written and synced under one descriptor.
        Returns: None, all is on the device | WriteFailed: NO_SPACE, IO_ERROR or SYNC_FAILED.
        """
        ordered = sorted(pieces, key=lambda piece: piece[:2])
        segments = list(dict.fromkeys(piece.segment for piece in ordered))
        for first in range(0, len(segments), FILES_AT_ONCE):
            few = segments[first : first + FILES_AT_ONCE]
            part = [piece for piece in ordered if few[0] <= piece.segment <= few[-1]]
            failed = self._write_files(few, part)
            if failed is not None:
                return failed
        return None

    def _write_files(self, segments: list[int], pieces: list[Piece]) -> WriteFailed | None:
        with ExitStack() as uses:
            try:
                fds = {s: uses.enter_context(self._files.use(s)) for s in segments}
            except OSError as error:
                return WriteFailed(_fault(error))
            fault = self._write_pieces(pieces, fds)
            reach("disk.written")
            if fault is not None:
                return WriteFailed(fault)
            return None if planted("publish_before_sync") else self._sync(fds)

    def _write_pieces(self, pieces: list[Piece], fds: Mapping[int, int]) -> WriteFault | None:
        """Write all pieces and wait for all, whatever happens. Nothing is synced."""
        size = sum(len(piece.record) for piece in pieces)
        threads = 1 if size < INLINE_BYTES else self._threads
        share = -(-len(pieces) // threads)
        parts = [pieces[at : at + share] for at in range(0, len(pieces), share)]
        faults: list[WriteFault] = []
        waiting = []
        if self._submit is not None:
            waiting = [self._submit(partial(self._part, part, fds, faults)) for part in parts[1:]]
            parts = parts[:1]
        for part in parts:
            self._part(part, fds, faults)
        for future in waiting:
            future.result()
        return faults[0] if faults else None

    def _sync(self, fds: Mapping[int, int]) -> WriteFailed | None:
        """Sync files, and abandon those where it fails: what of them is durable is unknown.

        Under one lock: the kernel tells of a lost write once, so whoever syncs next must find the
        segment abandoned.
        """
        lost: list[int] = []
        with self._sync_lock:
            for segment, fd in fds.items():
                try:
                    self._io.fdatasync(fd)
                except OSError:
                    lost += self._abandon(segment)
            safe = not any(self._is_abandoned(segment) for segment in fds)
        return None if safe else WriteFailed(WriteFault.SYNC_FAILED, np.array(lost, np.int64))

    def _part(
        self, part: Sequence[Piece], fds: Mapping[int, int], faults: list[WriteFault]
    ) -> None:
        try:
            for run in _runs(part):
                records = [piece.record for piece in run]
                self._io.pwritev(fds[run[0].segment], records, run[0].offset)
        except OSError as error:
            faults.append(_fault(error))


def _fault(error: OSError) -> WriteFault:
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    return WriteFault.NO_SPACE if full else WriteFault.IO_ERROR


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that lie one after the other in a file, at most MERGE_BYTES of them at once."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        follows = run and piece.segment == run[0].segment and piece.offset == run[0].offset + size
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
