"""The catalogue as a plain model: four tables in memory, commits atomic and durable at once.

tests/tiers/test_catalogue_contract.py holds it to what the real one does. Its file holds only a
name of its state, so that it comes, grows and goes as the real file does; the bytes of rows and
namespaces are the real ones, so that damage is what it is there.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.tiers.catalogue import BASE_BYTES, DATA_FILE, ROWS_PER_TXN, Change, CommitFault
from kvstore.tiers.catalogue_row import Collected, Rows, keys_of, parse_rows, seal, values_of
from kvstore.tiers.catalogue_tables import (
    FORMAT,
    IDENTITY,
    Identity,
    Namespace,
    SegmentState,
    parse_namespaces,
    refuse_identity,
)
from kvstore.tiers.errors import StoreError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.io import FileIo
from kvstore.tiers.walk import Walk

PAGE = 4096
ROW_OVERHEAD_BYTES = 24  # What a key and its place in a page take.
NAME = struct.Struct("<QQ")  # number of the state, number of commits


@dataclass
class State:
    """What is durable."""

    identity: bytes
    commits: int = 0
    rows: dict[bytes, bytes] = field(default_factory=dict)
    segments: dict[int, tuple[int, SegmentState]] = field(default_factory=dict)
    namespaces: dict[int, bytes] = field(default_factory=dict)
    readable: bool = True  # else a walk fails


class ModelCatalogue:
    """One volume's catalogue: see kvstore.tiers.catalogues.OwnedCatalogue.

    chance: whether a fault happens now: "map_full", "device". after_device: whether a commit that
    failed so was made all the same.
    """

    def __init__(
        self,
        directory: Path,
        io: FileIo,
        state: State,
        size_bytes: int,
        chance: Callable[[str], bool],
    ) -> None:
        self.closed = False
        self.written_bytes = 0
        self.state = state
        self._path, self._io, self._chance = directory / DATA_FILE, io, chance
        self._size_bytes = max(size_bytes, BASE_BYTES)
        self._broken = False

    def commit(self, change: Change) -> CommitFault | None:
        for rows in change.rows:
            seal(rows)
        for part in _parts(change):
            fault = self._commit_part(part)
            if fault is not None:
                return fault
        return None

    def _commit_part(self, change: Change) -> CommitFault | None:
        if self._broken or self.closed:
            return CommitFault.DEVICE
        reach("catalogue.commit")
        if self._chance("map_full"):
            return CommitFault.MAP_FULL
        if self._chance("device"):
            self._broken = True
            if not self._chance("device"):
                return CommitFault.DEVICE
        elif not self._fits(change):
            return CommitFault.MAP_FULL
        self._apply(change)
        reach("catalogue.committed")
        return CommitFault.DEVICE if self._broken else None

    def _fits(self, change: Change) -> bool:
        new = sum(len(rows) * rows.dtype.itemsize for rows in change.rows)
        if not new:
            return True
        held = sum(map(len, self.state.rows.values())) + new
        count = len(self.state.rows) + sum(map(len, change.rows))
        return BASE_BYTES + held + count * ROW_OVERHEAD_BYTES <= self._size_bytes

    def _apply(self, change: Change) -> None:
        state = self.state
        state.commits += 1
        self.written_bytes += PAGE
        for number, namespace in change.namespaces.items():
            state.namespaces[number] = namespace.pack()
        state.segments.update(change.segments)
        for key in change.removed:
            state.rows.pop(key, None)
        for rows in change.rows:
            state.rows.update(zip(keys_of(rows), values_of(rows), strict=True))

    def grow(self, size_bytes: int) -> CommitFault | None:
        try:
            fd = self._io.open(self._path, write=True)
            try:
                if self._io.size(fd) < size_bytes:
                    self._io.allocate(fd, size_bytes)
                self._io.fdatasync(fd)
            finally:
                self._io.close(fd)
        except OSError:
            return CommitFault.DEVICE
        self._size_bytes = max(self._size_bytes, size_bytes)
        return None

    def shrink(self, size_bytes: int) -> int:
        size = max(size_bytes, self.used_bytes(), BASE_BYTES)
        before = self._size_bytes
        try:
            fd = self._io.open(self._path, write=True)
            try:
                before = self._io.size(fd)
                if size < before:
                    self._io.truncate(fd, size)
            finally:
                self._io.close(fd)
        except OSError:
            return before
        self._size_bytes = min(size, before)
        return self._size_bytes

    def load(self) -> tuple[dict[int, Rows], int]:
        found, bad = Collected(), []
        pairs = sorted(self.state.rows.items())
        parts: dict[int, list[Rows]] = {}
        if not parse_rows([value for _, value in pairs], parts):
            for key, value in pairs:
                one: dict[int, list[Rows]] = {}
                if not parse_rows([value], one) or keys_of(next(iter(one.values()))[0]) != [key]:
                    bad.append(key)
        found.add(parts, len(pairs))
        if bad:
            self.commit(Change(removed=bad))
        return found.rows(), len(bad)

    def segments(self) -> dict[int, tuple[int, SegmentState]]:
        return dict(self.state.segments)

    def namespaces(self) -> dict[int, Namespace]:
        return parse_namespaces(self.state.namespaces)

    def used_bytes(self) -> int:
        held = sum(map(len, self.state.rows.values()))
        return -(-(held + len(self.state.rows) * ROW_OVERHEAD_BYTES) // PAGE) * PAGE + BASE_BYTES

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._note_commits()

    def _note_commits(self) -> None:
        """The file's bytes tell one state from another, for the mark of a clean stop."""
        try:
            fd = self._io.open(self._path, write=True)
            try:
                page = bytearray(PAGE)
                self._io.pread(fd, page, 0)
                number = NAME.unpack_from(page)[0]
                self._io.pwrite(fd, NAME.pack(number, self.state.commits), 0)
                self._io.fdatasync(fd)
            finally:
                self._io.close(fd)
        except OSError:
            return


class ModelCatalogues:
    """Makes and keeps them: durable states by the number in their file."""

    def __init__(self, chance: Callable[[str], bool] = lambda name: False) -> None:
        self.states: dict[int, State] = {}
        self.io: FileIo | None = None  # of the last that was opened
        self._chance = chance

    def own(
        self, directory: Path, io: FileIo, *, identity: Identity, size_bytes: int
    ) -> ModelCatalogue:
        self.io = io
        path = directory / DATA_FILE
        if not io.exists(path):
            number = len(self.states) + 1
            fields = (identity.store_id, identity.volume, identity.volumes, identity.segment_bytes)
            self.states[number] = State(IDENTITY.pack(FORMAT, *fields))
            self._make(io, path, number)
        state = self._state_in(io, path)
        if state is None:
            raise StoreError(f"the catalogue in {directory} cannot be opened; move it away")
        refuse_identity(state.identity, identity, directory)
        return ModelCatalogue(directory, io, state, size_bytes, self._chance)

    def walk(self, directory: Path, file_bytes: int) -> Walk:
        assert self.io is not None, "a catalogue is opened before one is walked"
        state = self._state_in(self.io, directory / DATA_FILE)
        return Walk(state is not None and state.readable, state.namespaces if state else {})

    def unreadable(self) -> int:
        """How many could not be walked."""
        return sum(not state.readable for state in self.states.values())

    def _make(self, io: FileIo, path: Path, number: int) -> None:
        try:
            fd = io.open(path, create=True, exclusive=True, write=True)
            try:
                io.pwrite(fd, NAME.pack(number, 0), 0)
                io.fdatasync(fd)
            finally:
                io.close(fd)
        except OSError as error:
            raise StoreError(f"{path} cannot be made ({error}); move it away") from None

    def _state_in(self, io: FileIo, path: Path) -> State | None:
        page = bytearray(NAME.size)
        try:
            fd = io.open(path)
            try:
                whole = io.pread(fd, page, 0) == NAME.size
            finally:
                io.close(fd)
        except OSError:
            return None
        return self.states.get(NAME.unpack(page)[0]) if whole else None


def _parts(change: Change) -> list[Change]:
    """A change as the transactions that the real one makes of it."""
    if (
        len(change.removed) <= ROWS_PER_TXN
        and sum(len(rows) for rows in change.rows) <= ROWS_PER_TXN
    ):
        return [change]
    parts = [Change(segments=change.segments, namespaces=change.namespaces)]
    for first in range(0, len(change.removed), ROWS_PER_TXN):
        parts.append(Change(removed=change.removed[first : first + ROWS_PER_TXN]))
    for rows in change.rows:
        for first in range(0, len(rows), ROWS_PER_TXN):
            parts.append(Change(rows=[rows[first : first + ROWS_PER_TXN]]))
    return parts
