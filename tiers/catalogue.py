"""The catalogue of one volume: what lies in which slot, in LMDB. The disk tier's journal.

    meta        "identity" -> format, store id, volume, volumes, segment_bytes
    rows        (segment, index) -> a row of catalogue_row.py
    segments    segment -> slot_bytes, state
    namespaces  number -> digest, label, canonical layout

A commit is one transaction and on the device when it returns. The file never grows beyond the map,
and its blocks are written before LMDB needs them: a full disk cannot stop a commit half-way.
"""

import itertools
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kvstore.tiers.catalogue_row import (
    KEY,
    Collected,
    Rows,
    keys_of,
    parse_rows,
    seal,
    values_of,
)
from kvstore.tiers.catalogue_tables import (
    FORMAT,
    IDENTITY,
    NUMBER,
    SEGMENT,
    Identity,
    Namespace,
    SegmentState,
    parse_namespaces,
    refuse_identity,
)
from kvstore.tiers.commit_bytes import commit_bytes
from kvstore.tiers.errors import StoreError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.io import FileIo, is_link, thread_written_bytes

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
LOCK_BYTES = 16 * 1024  # What LMDB's lock file takes for READERS_MAX readers, rounded up.
READERS_MAX = 126
CATALOGUE_ERRORS = (lmdb.Error,)  # What a reader beside the owner meets in a damaged file.
PAGE = 4096
BASE_BYTES = 32 * PAGE  # Meta pages, roots of the tables, and the first list of free pages.
SLACK_BYTES_MAX = 8 << 20  # Pages of the last three commits, which are not yet free again.
ROWS_PER_TXN = 512  # Adds, and removals, in one transaction: what bounds a commit's pages.
LOAD_ROWS = 16384  # Rows parsed at a time, so that they stay in the cache between the steps.
READ_ROWS = 4096  # Rows a reader takes in one transaction: it must not hold up the owner's pages.
ZEROS = bytes(1 << 20)


class CommitFault(StrEnum):
    """Why a commit did not happen. Nothing of it was stored, except perhaps after DEVICE."""

    MAP_FULL = "catalogue_full"  # no page left; the next commit may find some
    DEVICE = "catalogue_device"  # the device or LMDB failed; the catalogue takes no more commits


@dataclass(slots=True)
class Change:
    """One commit. Removals come first, so a slot may be removed and written in one change.

    rows: sealed by the commit, each array of one block_tokens. removed: keys, (segment, index).
    segments: slot_bytes and state of each; slot_bytes 0 for one that is gone.
    """

    rows: list[Rows] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    segments: dict[int, tuple[int, SegmentState]] = field(default_factory=dict)
    namespaces: dict[int, Namespace] = field(default_factory=dict)

    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not (self.rows or self.removed or self.segments or self.namespaces)


def map_bytes(row_bytes: int, namespace_bytes: int) -> int:
    """Bytes of a catalogue that can hold rows that take `row_bytes` at worst, and its own copies.

    LMDB never overwrites a page that the last durable commit uses, so up to three commits' pages
    lie beside the tree.
    """
    tree = row_bytes + namespace_bytes
    total = BASE_BYTES + tree + min(3 * tree, SLACK_BYTES_MAX)
    return -(-total // PAGE) * PAGE


class Catalogue:
    """One volume's LMDB file, opened by its one owner or, with `readonly`, beside it.

    Thread-safe. The constructor raises StoreError for a catalogue that is another's, of another
    format, or broken; what happens later is an outcome.
    """

    def __init__(
        self,
        directory: Path,
        io: FileIo,
        *,
        identity: Identity | None = None,
        size_bytes: int = 0,
        readonly: bool = False,
    ) -> None:
        """directory: of its two files. identity: what it must be, and is made as.

        size_bytes: of the map; a file that is already larger keeps its size.
        """
        self.directory = directory
        self._io = io
        self._lock = threading.Lock()
        self._readonly = readonly
        self._broken = False
        self.written_bytes = 0  # to its file, by this object; whole pages
        self.closed = False
        for name in (DATA_FILE, LOCK_FILE):
            if is_link(io, directory / name):
                raise StoreError(
                    f"{directory / name} is a link; remove it and open the store again"
                )
        try:
            self._env: Any = lmdb.open(
                str(directory),
                map_size=max(size_bytes, BASE_BYTES),
                max_dbs=8,
                max_readers=READERS_MAX,
                mode=0o600,
                readonly=readonly,
                create=not readonly,
                readahead=True,
            )
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"the catalogue in {directory} cannot be opened ({error}); move it away to have it "
                "rebuilt"
            ) from None
        try:
            self._open_tables(identity)
        except BaseException:
            self._env.close()
            raise

    # --- the owner's side

    def commit(self, change: Change) -> CommitFault | None:
        """Make a change durable: whole, or beyond ROWS_PER_TXN rows in parts, removals first.

        Returns: None | MAP_FULL | DEVICE.
        """
        parts = [Change(segments=change.segments, namespaces=change.namespaces)]
        for first in range(0, len(change.removed), ROWS_PER_TXN):
            parts.append(Change(removed=change.removed[first : first + ROWS_PER_TXN]))
        for rows in change.rows:
            seal(rows)
            parts += [
                Change(rows=[rows[first : first + ROWS_PER_TXN]])
                for first in range(0, len(rows), ROWS_PER_TXN)
            ]
        small = len(change.removed) <= ROWS_PER_TXN
        if small and sum(len(rows) for rows in change.rows) <= ROWS_PER_TXN:
            parts = [change]
        with self._lock:
            for part in parts:
                before = thread_written_bytes()
                fault = self._commit_part(part)
                row_bytes = sum(rows.nbytes for rows in part.rows)
                self.written_bytes += commit_bytes(before, row_bytes, len(part.removed))
                if fault is not None:
                    return fault
        return None

    def grow(self, size_bytes: int) -> CommitFault | None:
        """Let the file have `size_bytes`, and write them, so that commits find their blocks.

        Never shrinks it. Returns: None | DEVICE.
        """
        with self._lock:
            try:
                fd = self._io.open(self.directory / DATA_FILE, write=True)
                try:
                    at = self._io.size(fd)
                    while at < size_bytes:
                        part = memoryview(ZEROS)[: min(len(ZEROS), size_bytes - at)]
                        self._io.pwrite(fd, part, at)
                        at += len(part)
                        self.written_bytes += len(part)
                    self._io.fdatasync(fd)
                finally:
                    self._io.close(fd)
                if size_bytes > self._env.info()["map_size"]:
                    self._env.set_mapsize(size_bytes)
            except (lmdb.Error, OSError):
                return CommitFault.DEVICE
        return None

    def shrink(self, size_bytes: int) -> int:
        """Let the file have no more than `size_bytes`, or than LMDB uses of it.

        Returns: the file's size now.
        """
        with self._lock:
            size = max(size_bytes, self.used_bytes(), BASE_BYTES)
            before = int(self._env.info()["map_size"])
            try:
                fd = self._io.open(self.directory / DATA_FILE, write=True)
                try:
                    before = self._io.size(fd)
                    if size < before:
                        self._env.set_mapsize(size)
                        self._io.truncate(fd, size)
                finally:
                    self._io.close(fd)
            except (lmdb.Error, OSError):
                return before
        return min(size, before)

    def load(self) -> tuple[dict[int, Rows], int]:
        """All sound rows by block_tokens, in the order of their slots; damaged ones are removed.

        Returns: (rows by block_tokens, how many damaged rows were removed).
        """
        found = Collected()
        whole = True
        with self._lock, self._env.begin() as txn:
            left = int(txn.stat(self._rows)["entries"])
            values = txn.cursor(db=self._rows).iternext(keys=False, values=True)
            while chunk := list(itertools.islice(values, LOAD_ROWS)):
                parts: dict[int, list[Rows]] = {}
                whole &= parse_rows(chunk, parts)
                found.add(parts, left)
                left -= len(chunk)
            bad = [] if whole else self._damaged(txn)
        if bad:
            self.commit(Change(removed=bad))
        return found.rows(), len(bad)

    def used_bytes(self) -> int:
        """Bytes from the file's start that LMDB has used so far."""
        return int((self._env.info()["last_pgno"] + 1) * PAGE)

    def close(self) -> None:
        """Close. A second call does nothing; a commit afterwards gives DEVICE."""
        with self._lock:
            self.closed = True
            self._env.close()

    # --- what both sides read

    def count(self) -> int:
        """How many rows there are."""
        with self._begin() as txn:
            return int(txn.stat(self._rows)["entries"])

    def batches(self) -> Iterator[tuple[dict[int, Rows], int]]:
        """All rows, READ_ROWS at a time in a transaction each: (rows by block_tokens, damaged)."""
        after = b""
        while True:
            with self._begin() as txn:
                cursor = txn.cursor(db=self._rows)
                if not cursor.set_range(after):
                    return
                pairs = list(itertools.islice(cursor.iternext(), READ_ROWS))
            found: dict[int, list[Rows]] = {}
            sound_rows = 0
            parse_rows([value for _, value in pairs], found)
            for parts in found.values():
                sound_rows += sum(len(rows) for rows in parts)
            yield (
                {tokens: np.concatenate(parts) for tokens, parts in found.items()},
                len(pairs) - sound_rows,
            )
            after = pairs[-1][0] + b"\0"

    def row(self, segment: int, index: int) -> Rows | None:
        """The row of one slot, as an array [1]; None when it has none, or a damaged one."""
        with self._begin() as txn:
            value = txn.get(KEY.pack(segment, index), db=self._rows)
        found: dict[int, list[Rows]] = {}
        if value is not None:
            parse_rows([value], found)
        return next((parts[0] for parts in found.values()), None)

    def segments(self) -> dict[int, tuple[int, SegmentState]]:
        """The segments: slot_bytes and state."""
        result = {}
        with self._begin() as txn:
            for key, value in txn.cursor(db=self._segments):
                if len(key) == NUMBER.size and len(value) == SEGMENT.size:
                    slot_bytes, bad = SEGMENT.unpack(value)
                    state = SegmentState.QUARANTINED if bad else SegmentState.USABLE
                    result[NUMBER.unpack(key)[0]] = (slot_bytes, state)
        return result

    def namespaces(self) -> dict[int, Namespace]:
        """The namespaces by their number; damaged ones are left out."""
        with self._begin() as txn:
            pairs = list(txn.cursor(db=self._namespaces))
        sound = [pair for pair in pairs if len(pair[0]) == NUMBER.size]
        return parse_namespaces({NUMBER.unpack(key)[0]: value for key, value in sound})

    def identity(self) -> Identity | None:
        """Which volume this is; None when it is damaged."""
        with self._begin() as txn:
            value = txn.get(b"identity", db=self._meta)
        if value is None or len(value) != IDENTITY.size:
            return None
        return Identity(*IDENTITY.unpack(value)[1:])

    # --- inside

    def _open_tables(self, identity: Identity | None) -> None:
        try:
            self._env.reader_check()  # Readers that died would keep their pages for ever.
            tables = [
                self._env.open_db(name, create=not self._readonly)
                for name in (b"meta", b"rows", b"segments", b"namespaces")
            ]
            self._meta, self._rows, self._segments, self._namespaces = tables
            with self._begin() as txn:
                value = txn.get(b"identity", db=self._meta)
            if value is None and identity is not None and not self._readonly:
                wanted = (identity.store_id, identity.volume, identity.volumes)
                value = IDENTITY.pack(FORMAT, *wanted, identity.segment_bytes)
                with self._env.begin(write=True) as txn:
                    txn.put(b"identity", value, db=self._meta)
        except (lmdb.Error, OSError, struct.error) as error:
            raise StoreError(
                f"the catalogue in {self.directory} is damaged ({error}); open the store for "
                "writing once to have it rebuilt"
            ) from None
        refuse_identity(value, identity, self.directory)

    def _begin(self) -> Any:
        try:
            return self._env.begin()
        except lmdb.ReadersFullError:
            self._env.reader_check()
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)  # The owner's map grew: take over its size.
        return self._env.begin()

    def _commit_part(self, change: Change) -> CommitFault | None:
        if self._broken:
            return CommitFault.DEVICE
        for last in (False, True):
            try:
                with self._env.begin(write=True) as txn:
                    self._apply(txn, change)
                    reach("catalogue.commit")
                reach("catalogue.committed")
            except (lmdb.MapFullError, lmdb.TxnFullError):
                # A reader that died keeps old pages; without it there may be room.
                if last or not self._env.reader_check():
                    return CommitFault.MAP_FULL
            except (lmdb.Error, OSError):
                # Whether the commit reached the device is unknown, so nothing may build on it.
                self._broken = True
                return CommitFault.DEVICE
            else:
                return None
        return CommitFault.MAP_FULL

    def _apply(self, txn: Any, change: Change) -> None:
        for number, namespace in change.namespaces.items():
            txn.put(NUMBER.pack(number), namespace.pack(), db=self._namespaces)
        for segment, (slot_bytes, state) in change.segments.items():
            if not slot_bytes:
                txn.delete(NUMBER.pack(segment), db=self._segments)
                continue
            value = SEGMENT.pack(slot_bytes, int(state is SegmentState.QUARANTINED))
            txn.put(NUMBER.pack(segment), value, db=self._segments)
        for key in change.removed:
            txn.delete(key, db=self._rows)
        for rows in change.rows:
            pairs = zip(keys_of(rows), values_of(rows), strict=True)
            txn.cursor(db=self._rows).putmulti(list(pairs))

    def _damaged(self, txn: Any) -> list[bytes]:
        """The keys of rows that fail their check or lie under another row's key. One by one."""
        bad = []
        for key, value in txn.cursor(db=self._rows):
            found: dict[int, list[Rows]] = {}
            if not parse_rows([value], found) or keys_of(next(iter(found.values()))[0]) != [key]:
                bad.append(bytes(key))
        return bad
