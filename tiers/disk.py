"""The disk tier: records in the slots of segment files, on one or several devices.

A block is on disk when its row is in the catalogue, and its row gets there last:

    write header and payload  ->  fdatasync of the segment  ->  commit of the row

Freeing goes the other way: the removal of the row is committed, then the slot can be reserved
again. So at whatever instant the power goes, the catalogue names only whole records. Segments are
numbered over all volumes: a segment's volume is its number modulo the number of volumes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.tiers.catalogue import CommitFault
from kvstore.tiers.catalogue_repair import reopen
from kvstore.tiers.catalogue_row import Rows, place
from kvstore.tiers.catalogue_tables import NAMESPACES_MAX, Namespace
from kvstore.tiers.catalogues import Catalogues
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_outcomes import (
    NO_SLOTS,
    BadRun,
    IoFault,
    Slots,
    WriteFailed,
    WriteFault,
    Written,
)
from kvstore.tiers.disk_room import Room
from kvstore.tiers.disk_sizing import DiskSizing
from kvstore.tiers.disk_start import Loaded, load_volumes, open_volumes
from kvstore.tiers.failpoints import reach
from kvstore.tiers.group_write import GroupWriter, Piece, Submit, refuse_bad_group
from kvstore.tiers.guard import Monotonic
from kvstore.tiers.guarded_reads import GuardedReads
from kvstore.tiers.io import FileIo
from kvstore.tiers.namespaces import Namespaces, refuse_too_long
from kvstore.tiers.record import HeaderFault
from kvstore.tiers.record_read import RecordCheck
from kvstore.tiers.removals import Removals
from kvstore.tiers.upkeep import Upkeep
from kvstore.tiers.volume import Volume


class DiskTier:
    """Records on disk. Thread-safe; after `load` nothing here raises but for misuse.

    The capacity holds at every instant: segments, their extents, the catalogue, and `other_bytes`,
    what the store's own files take. `direct` says whether the page cache is avoided.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        capacity_bytes: int,
        segment_bytes: int,
        io: FileIo,
        *,
        store_id: bytes,
        submit: Submit | None = None,
        threads: int = 8,
        direct: bool = True,
        other_bytes: int = 0,
        monotonic: Monotonic = time.monotonic,
        catalogues: Catalogues | None = None,
    ) -> None:
        """Look at all paths, then make or open the volumes. Slow work is left to `load`.

        paths: the volumes' directories, always in the same order; only the last part may be
        missing. submit: runs a call on another thread, as an executor's does; without it one thread
        does all. monotonic: seconds, for back-offs. Raises ConfigError, StoreError or
        StoreBusyError, before anything was touched.
        """
        self._opened = open_volumes(
            io,
            paths,
            capacity_bytes=capacity_bytes - other_bytes,
            segment_bytes=segment_bytes,
            store_id=store_id,
            direct=direct,
            released=self._removed,
            monotonic=monotonic,
            catalogues=catalogues,
        )
        self.capacity_bytes = capacity_bytes
        self.direct = self._opened.direct
        self.slab = self._opened.slab
        self.per = self.slab.slots_per_segment_max
        self._io = io
        self._volumes = self._opened.volumes
        self._files = self._opened.files
        self._writer = GroupWriter(
            io,
            self._files,
            submit=submit,
            threads=threads,
            abandon=self._abandon,
            is_abandoned=self.slab.is_quarantined,
        )
        self._lock = threading.RLock()
        self._loaded = False
        self._uncommitted: set[int] = set()
        self._removals = Removals(self.slab, self._volumes, self._lock, self._uncommitted)
        self._names = Namespaces()
        self.health = Health(self._volumes, monotonic)
        self.room = Room(self.slab, self._volumes, self._lock, self._uncommitted)
        self.sizing = DiskSizing(
            io, self.slab, self._volumes, self._lock, self.room.growing, other_bytes
        )
        self._reads = GuardedReads(io, self._files, self.slab, self._volumes, self._lock)
        self._upkeep = self._make_upkeep()

    def load(self, void_below: Callable[[bytes], int] = lambda digest: 0) -> Loaded:
        """Read the catalogues, or rebuild damaged ones. Once, before anything is reserved.

        void_below: the generation below which records of a namespace are left out of a rebuild.
        Raises StoreError for a catalogue of another store or format.
        """
        loaded = load_volumes(self._io, self._opened, self._names, void_below)
        with self._lock:
            self._loaded = True
        return loaded

    # --- namespaces

    def namespace_number(self, digest: bytes, layout: bytes, label: str) -> int | None:
        """The number rows use for a namespace; it is committed with the first of them.

        digest: 32 bytes. layout: Layout.canonical(). Raises ValueError for one that is too large.

        Returns: the number | None (NAMESPACES_MAX are in use).
        """
        namespace = Namespace(digest, layout, label)
        refuse_too_long(namespace)
        with self._lock:
            return self._names.number(namespace, NAMESPACES_MAX)

    def namespaces(self) -> dict[int, Namespace]:
        """All known namespaces by number."""
        with self._lock:
            return dict(self._names.by_number)

    # --- slots

    def reserve(
        self, slot_bytes: int, count: int, *, near: int | None = None, block_tokens: int = 16
    ) -> Slots:
        """Up to `count` free slots of a class: int64 [<= count]. Adds segments while they fit.

        near: a slot of the chain, whose device is preferred. block_tokens: of the rows to come. A
        slot ends in `write_group` or `cancel`. Fewer: remove blocks, `flush_removals`, ask again.
        """
        if not self._loaded or not self.slab.fits(slot_bytes):
            return NO_SLOTS
        with self.health.writing():  # It may make a segment.
            taken = self.room.reserve(slot_bytes, count, near, block_tokens)
        reach("disk.reuse")
        return taken

    def cancel(self, slots: Slots) -> None:
        """Give back reserved slots that were not written."""
        with self._lock:
            self.slab.release(slots)
            self._uncommitted.difference_update(slots.tolist())

    def remove(self, slots: Slots) -> None:
        """Remove blocks. The slots become free with the next commit to their volume.

        A slot that holds no committed block, or is being removed already, is passed over.
        """
        self._removals.remove(slots)

    def unlist(self, slots: Slots) -> None:
        """Remove the rows of blocks with the next commit; the slots stay taken until `remove`."""
        self._removals.unlist(slots)

    def flush_removals(self) -> WriteFault | None:
        """Commit all pending removals. Returns: None | CATALOGUE_FULL | CATALOGUE_DEVICE."""
        with self.health.writing():
            return self._removals.flush()

    def removing(self) -> int:
        """How many slots wait for the commit of their removal."""
        return sum(len(volume.journal.removing()) for volume in self._volumes)

    def free(self, slot_bytes: int) -> int:
        """How many slots of a class can be reserved now, without another segment."""
        with self._lock:
            return self.slab.free(slot_bytes) if self._loaded else 0

    def has_room(self, slot_bytes: int) -> bool:
        """Whether another segment could be added for a class."""
        with self._lock:
            return self.room.has_room(slot_bytes)

    def reassign(self, segment: int, slot_bytes: int) -> bool:
        """Give a segment to another class: class stealing. All its blocks must be gone by a commit.

        Returns: whether it could; False also while a block of it is left.
        """
        with self.health.writing():
            return self.slab.fits(slot_bytes) and self.room.reassign(segment, slot_bytes)

    # --- bytes

    def write_group(
        self, slots: Slots, records: Sequence[memoryview], rows: Rows, remove: Slots = NO_SLOTS
    ) -> Written | WriteFailed:
        """Write records to reserved slots of one class; they are on disk when this returns.

        records: each slot_bytes long and on a page (host slots are). rows: one for each record, in
        the same order, of one block_tokens; where they lie is filled in. remove: slots whose blocks
        give way; their removal rides on the same commit, or on a later one if this one fails.
        Several threads may write groups: one is written while another is committed.

        Returns: Written | WriteFailed. All or nothing.
        """
        with self._lock:
            slot_bytes = refuse_bad_group(self.slab, self._uncommitted, slots, records, rows)
            self.room.record_bytes += len(slots) * slot_bytes
        self.remove(remove)
        place(rows, slots, slot_bytes, self.per)
        reach("disk.write")
        with self.health.writing():
            failed = self._writer.write(self._pieces(slots, records))
            if failed is None:
                reach("disk.synced")
                return self._commit(slots, rows, slot_bytes, remove)
            self.cancel(slots)
            for number in np.unique(self._volumes_of(slots)).tolist():
                self._volumes[number].writes.failure()
                if failed.reason is WriteFault.SYNC_FAILED:
                    self._volumes[number].commit(None)  # That segments are abandoned.
            return failed

    def read_into(self, slot: int, buffer: memoryview) -> IoFault | None:
        """Read a record, or its first part, into page-aligned memory: one call to the device.

        Nothing is verified here, and the caller sees to it that the slot still holds its block. An
        error is tried once more.

        Returns: None | IoFault.
        """
        return self._reads.read_into(slot, buffer)

    def read_record(
        self, slot: int, buffer: memoryview, check: RecordCheck
    ) -> IoFault | HeaderFault | BadRun | None:
        """As read_into, of a whole record; its header and every run are checked in the same call.

        Returns: None | IoFault | HeaderFault | BadRun.
        """
        return self._reads.read_record(slot, buffer, check)

    def readable(self, slots: Slots) -> int:
        """How many leading slots lie in volumes that are not off."""
        return self._reads.readable(slots)

    def tend(self) -> Slots:
        """Bring failed devices back where due; waits for them. Returns: slots of lost blocks."""
        return self._upkeep.run() if self._loaded else NO_SLOTS

    # --- sums and end

    @property
    def used_bytes(self) -> int:
        """Bytes of all occupied slots."""
        with self._lock:
            return self.slab.used_bytes()

    @property
    def blocks(self) -> int:
        """How many slots are occupied."""
        with self._lock:
            return self.slab.occupied()

    @property
    def allocated_bytes(self) -> int:
        """Bytes the volumes take on their devices now, as du counts them; at most the capacity."""
        return sum(volume.allocated_bytes() for volume in self._volumes)

    def check_integrity(self) -> None:
        """AssertionError if slab and sums disagree."""
        with self._lock:
            self.slab.check_integrity()
            reserved = np.array(sorted(self._uncommitted), np.int64)
            assert self.slab.is_occupied(reserved).all(), "a reserved slot is not occupied"
        assert self.allocated_bytes <= self.capacity_bytes, "the tier takes more than its capacity"

    def close(self) -> None:
        """Commit pending removals and close. A second call does nothing. Reads must have ended."""
        for volume in self._volumes:
            volume.close()

    # --- inside

    def _make_upkeep(self) -> Upkeep:
        reopen_catalogue = partial(
            reopen,
            io=self._io,
            slab=self.slab,
            names=self._names,
            lock=self._lock,
            uncommitted=self._uncommitted,
            unlisted=self._removals.unlisted,
        )
        places = (self._volumes, self.slab, self._files, self.room, self._reads)
        return Upkeep(*places, lock=self._lock, reopen_catalogue=reopen_catalogue)

    def _volume_of(self, segment: int) -> Volume:
        return self._volumes[segment % len(self._volumes)]

    def _volumes_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        return self.slab.segments_of(slots) % len(self._volumes)

    def _pieces(self, slots: Slots, records: Sequence[memoryview]) -> list[Piece]:
        segments = self.slab.segments_of(slots).tolist()
        offsets = self.slab.offsets_of(slots).tolist()
        return [
            Piece(segment, offset, record)
            for segment, offset, record in zip(segments, offsets, records, strict=True)
        ]

    def abandoned(self, slots: Slots) -> bool:
        """Whether a segment of these slots was abandoned."""
        segments = np.unique(self.slab.segments_of(slots)).tolist()
        with self._lock:
            return any(self.slab.is_quarantined(segment) for segment in segments)

    def _removed(self, slots: list[int]) -> None:
        self._removals.committed(slots)

    def _abandon(self, segment: int) -> list[int]:
        """Quarantine a segment. Returns: the slots of its committed blocks."""
        volume = self._volume_of(segment)
        with self._lock:
            if self.slab.is_quarantined(segment):
                return []
            self.slab.quarantine(segment)
            volume.set_quarantined(segment)
            others = self._uncommitted | volume.journal.removing() | self._removals.unlisted.slots()
            return [s for s in self.slab.slots_of(segment).tolist() if s not in others]

    def _commit(
        self, slots: Slots, rows: Rows, slot_bytes: int, remove: Slots
    ) -> Written | WriteFailed:
        volumes = self._volumes_of(slots)
        names = set(rows["namespace"].tolist())
        done: list[int] = []
        for number in np.unique(volumes).tolist():
            volume = self._volumes[number]
            for name in names & self._names.by_number.keys():
                volume.journal.set_namespace(name, self._names.by_number[name])
            fault = volume.commit(rows[volumes == number])
            if fault is not None:
                return self._undo(slots, volumes, done, number, fault)
            done.append(number)
        with self._lock:
            self._uncommitted.difference_update(slots.tolist())
        for number in done:
            self._volumes[number].writes.success()
        # Of volumes that got nothing of this group: no commit to ride on.
        for number in set(self._volumes_of(remove).tolist()) - set(done):
            self._volumes[number].commit(None)
        if self.abandoned(slots):  # By another group's sync, which did not know of these blocks.
            self.remove(slots)
            return WriteFailed(WriteFault.SYNC_FAILED)
        return Written(len(slots), len(slots) * slot_bytes)

    def _undo(
        self,
        slots: Slots,
        volumes: npt.NDArray[np.int64],
        done: list[int],
        failed: int,
        fault: CommitFault,
    ) -> WriteFailed:
        """Take back a group whose commit failed in one volume and was made in others."""
        committed = np.isin(volumes, done)
        # Whether rows reached a device that failed is unknown: their slots are free when a later
        # commit says that there is no such row.
        unknown = (volumes == failed) & (fault is CommitFault.DEVICE)
        with self._lock:
            self._uncommitted.difference_update(slots.tolist())
            self.slab.release(slots[~committed & ~unknown])
        self.remove(slots[committed | unknown])
        self._volumes[failed].writes.failure()
        return WriteFailed(WriteFault(fault))
