"""The bytes of a group on their way to segment files: several threads, then one sync a file."""

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvstore.tiers.disk_outcomes import WriteFault
from kvstore.tiers.io import FileIo

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
