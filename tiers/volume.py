"""One directory of the disk tier: its segment files, its catalogue, and its share of the capacity.

Everything a volume takes on its device is counted before it is made:

    directories and small files  +  segments with their extents' blocks  +  the catalogue's map

The map is sized for the rows that the existing segments can hold (worst_row_bytes each), so a
segment is only added when it and its rows fit the budget. The slab and its lock are the tier's.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.tiers.catalogue import CommitFault
from kvstore.tiers.catalogue import map_bytes as catalogue_bytes
from kvstore.tiers.catalogue_row import Rows, worst_row_bytes
from kvstore.tiers.catalogue_tables import Identity, SegmentState
from kvstore.tiers.catalogues import Catalogues, LmdbCatalogues, OwnedCatalogue
from kvstore.tiers.clean_mark import take_mark, write_mark
from kvstore.tiers.errors import StoreBusyError, StoreError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.guard import Monotonic, growth_guard, read_guard, write_guard
from kvstore.tiers.io import FileIo, open_own_directory, sync_directory
from kvstore.tiers.journal import Journal
from kvstore.tiers.open_files import OpenFiles
from kvstore.tiers.segment import (
    HEADER_BYTES,
    VOLUME_FILE,
    VOLUME_MAGIC,
    FileHeader,
    segment_name,
)
from kvstore.tiers.segment_header import read_segment_header, write_segment_header
from kvstore.tiers.survey import CATALOGUE_DIRECTORY, CLEAN_FILE, Survey, catalogue_files
from kvstore.tiers.volume_cost import (
    FIXED_BYTES,
    PAGE,
    SEGMENT_ROW_BYTES,
    namespace_cost,
    segment_cost,
)


class Volume:
    """The files of one path, owned by this process.

    Thread-safe, but segments are added and changed under the tier's lock only. Nothing here raises
    after `open_files`, except for misuse.
    """

    def __init__(
        self,
        path: Path,
        io: FileIo,
        identity: Identity,
        *,
        budget_bytes: int,
        per: int,
        direct: bool,
        released: Callable[[list[int]], None],
        files: OpenFiles,
        monotonic: Monotonic,
        catalogues: Catalogues | None = None,
    ) -> None:
        """per: slots_per_segment_max. released: called with slots whose removal was committed.
        files: of all volumes, which open what they need by `open_segment`. monotonic: the time."""
        self.catalogues = catalogues or LmdbCatalogues()
        self.path = path
        self.identity = identity
        self.budget_bytes = budget_bytes
        self.direct = direct
        self.files = files
        self.segments: set[int] = set()  # that have a file
        self.classes: dict[int, int] = {}  # segment -> slot_bytes
        self.row_tokens: dict[int, int] = {}  # slot_bytes -> the most block_tokens of its rows
        self.catalogue: OwnedCatalogue | None = None
        self.catalogue_failed = False  # Its device did, and it was not opened anew since.
        self.writes = write_guard(monotonic)
        self.growth = growth_guard(monotonic)
        self.reads = read_guard(monotonic)
        self._header_bytes = 0  # written so far
        self.catalogue_bytes = 0  # of its file
        self._earlier_bytes = 0  # written to catalogues that were replaced
        self._io = io
        self._directory = -1
        self._header_fd = -1
        self.journal = Journal(per, released)

    @property
    def writable(self) -> bool:
        """Whether blocks may be written now, be it as a probe."""
        return not self.catalogue_failed and self.writes.allows()

    # --- start and end

    def open_files(self, found: Survey) -> dict[int, FileHeader]:
        """Make or open the directory, take the volume's lock, read every segment's header.

        Returns the headers of the segments; one whose header is damaged has none. Raises
        StoreError, StoreBusyError or ConfigError.
        """
        self._directory = open_own_directory(self._io, self.path, "disk path")
        try:
            # What a killed owner made is relied on from now on.
            self._io.fsync(self._directory)
            headers: dict[int, FileHeader] = {}
            for segment in found.segments:
                self.segments.add(segment)
                with self.files.use(segment) as fd:
                    header = read_segment_header(self._io, fd, self.identity, segment, self.path)
                if header is not None:
                    headers[segment] = header
            self.write_own_header(self.budget_bytes)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be opened: {error.strerror}; check that device"
            ) from None
        return headers

    def take_clean_mark(self) -> bool:
        """Whether the catalogue is as a clean stop left it; the mark is removed."""
        data, _ = catalogue_files(self.path)
        return take_mark(self._io, self._directory, data, self.identity.store_id)

    def drop_clean_mark(self) -> None:
        """Remove the mark of a clean stop, where there is one: its catalogue is gone."""
        if self._io.exists(CLEAN_FILE, directory=self._directory):
            self._io.unlink(CLEAN_FILE, directory=self._directory)

    @property
    def catalogue_directory(self) -> Path:
        """Where the catalogue's files lie."""
        return self.path / CATALOGUE_DIRECTORY

    def open_catalogue(self, *, fresh: bool, keep_bytes: int = 0) -> OwnedCatalogue:
        """Open the catalogue, or make a new one in the place of what is there.

        keep_bytes: what its file has already; the map is at least as large.
        """
        catalogue = self.make_catalogue(fresh=fresh, keep_bytes=keep_bytes)
        self.use_catalogue(catalogue)
        return catalogue

    def make_catalogue(self, *, fresh: bool, keep_bytes: int = 0) -> OwnedCatalogue:
        """As open_catalogue, but nothing is committed to it yet. Raises StoreError or OSError."""
        data, lock = catalogue_files(self.path)
        fd = open_own_directory(self._io, self.path / CATALOGUE_DIRECTORY, "catalogue directory")
        self._io.close(fd)
        if fresh:
            for file in (data, lock):
                if self._io.exists(file):
                    self._io.unlink(file)
        size = max(self.map_bytes({}), keep_bytes // PAGE * PAGE)
        own, identity = self.catalogues.own, self.identity
        catalogue = own(data.parent, self._io, identity=identity, size_bytes=size)
        sync_directory(self._io, data.parent)
        self.catalogue_bytes = size
        if catalogue.grow(size) is not None:
            catalogue.close()
            raise StoreError(f"{self.path} has no room for its catalogue; free some space there")
        return catalogue

    def use_catalogue(self, catalogue: OwnedCatalogue) -> None:
        """Commit to this catalogue from now on."""
        if self.catalogue is not None:
            self._earlier_bytes += self.catalogue.written_bytes
        self.catalogue = catalogue
        self.journal.open(catalogue)
        self.catalogue_failed = False

    def commit(self, rows: Rows | None) -> CommitFault | None:
        """Commit rows, with all that is pending: see Journal.commit.

        A device that fails makes the volume read-only until its catalogue was made anew.
        """
        fault = self.journal.commit(rows)
        if fault is CommitFault.DEVICE:
            self.catalogue_failed = True
            self.writes.failure(final=True)
        return fault

    def remove_segment(self, segment: int) -> None:
        """Remove the file of a segment whose blocks nobody needs. Raises OSError."""
        self.files.forget(segment)
        self._io.unlink(segment_name(segment), directory=self._directory)
        self.segments.discard(segment)
        self.classes.pop(segment, None)

    def sync_names(self) -> None:
        """Which segments there are is on the device when this returns. Raises OSError."""
        self._io.fsync(self._directory)

    def close(self) -> None:
        """Commit what is pending, mark the stop as clean if it is, and close all files."""
        clean = False
        if self.catalogue is not None and not self.catalogue.closed:
            clean = self.journal.commit(None) is None
            used = self.catalogue.used_bytes()
            self.catalogue.close()
            if clean:
                reach("stop.mark")
                data, _ = catalogue_files(self.path)
                write_mark(self._io, self._directory, data, used, self.identity.store_id)
        for segment in self.segments:
            self.files.forget(segment)
        for fd in (self._header_fd, self._directory):
            if fd >= 0:
                self._io.close(fd)
        self.segments.clear()
        self._header_fd = self._directory = -1

    # --- segments

    def open_segment(self, segment: int) -> int:
        """A new descriptor of a segment's file, for `files`. Raises OSError."""
        name = segment_name(segment)
        return self._io.open(name, write=True, direct=self.direct, directory=self._directory)

    def restore_segment(self, segment: int, slot_bytes: int) -> None:
        """At start: a segment of this class exists. Its file gets its full size if it lost it."""
        self.classes[segment] = slot_bytes
        with self.files.use(segment) as fd:
            if self._io.size(fd) != self.identity.segment_bytes:
                self._io.truncate(fd, self.identity.segment_bytes)
                self._io.allocate(fd, self.identity.segment_bytes)

    def knows_rows(self, slot_bytes: int, block_tokens: int) -> bool:
        """Whether the map has room for rows of so many tokens, for all slots of the class."""
        return block_tokens <= self.row_tokens.get(slot_bytes, 0)

    def room_for_rows(self, slot_bytes: int, block_tokens: int) -> bool:
        """As knows_rows; grows the map where it is too small."""
        known = self.row_tokens.get(slot_bytes, 0)
        if block_tokens <= known:
            return True
        if not self.growth.allows():
            return False
        self.row_tokens[slot_bytes] = block_tokens
        if self.need_bytes({}) <= self.budget_bytes:
            if self._grow_map({}):
                return True
            self.growth.failure()
        self.row_tokens[slot_bytes] = known
        return False

    def has_room(self, slot_bytes: int) -> bool:
        """Whether another segment of this class fits the budget."""
        return self.need_bytes({-1: slot_bytes}) <= self.budget_bytes

    def add_segment(self, segment: int, slot_bytes: int) -> bool:
        """Make a segment file, with all its blocks. Returns: whether it could be made."""
        if not self.has_room(slot_bytes):
            return False
        try:
            if not self._grow_map({segment: slot_bytes}):
                raise OSError("the catalogue cannot grow")
            self._make_segment(segment, slot_bytes)
        except OSError:
            self.growth.failure()
            return False
        self.growth.success()
        reach("disk.add_segment")
        self._set_class(segment, slot_bytes)
        return True

    def change_class(self, segment: int, slot_bytes: int) -> bool:
        """Give a segment without blocks to another class. Returns: whether its rows have room."""
        if self.need_bytes({segment: slot_bytes}) > self.budget_bytes:
            return False
        if not self._grow_map({segment: slot_bytes}):
            return False
        try:
            self.rewrite_header(segment, slot_bytes)
        except OSError:
            with suppress(OSError):  # Which class the file says now is unknown.
                self.rewrite_header(segment, self.classes[segment])
            return False
        self._set_class(segment, slot_bytes)
        return True

    def set_quarantined(self, segment: int) -> None:
        """Note for the next commit that a segment was abandoned."""
        self.journal.set_segment(segment, self.classes[segment], SegmentState.QUARANTINED)

    def rewrite_header(self, segment: int, slot_bytes: int) -> None:
        """Write a segment's header again. Raises OSError."""
        with self.files.use(segment) as fd:
            self._write_segment_header(fd, segment, slot_bytes)

    # --- sums

    def allocated_bytes(self) -> int:
        """Bytes the volume takes on its device now, as du counts them."""
        total = 0
        places = [self.path, self.path / CATALOGUE_DIRECTORY, *catalogue_files(self.path)]
        places += [self.path / VOLUME_FILE, self.path / CLEAN_FILE]
        places += [self.path / segment_name(segment) for segment in list(self.segments)]
        for place in places:
            try:
                total += self._io.status(place).st_blocks * 512
            except OSError:
                continue  # Not made yet, or gone.
        return total

    @property
    def written_bytes(self) -> int:
        """Bytes written to headers of segments and to the catalogue since this was opened."""
        catalogue = self.catalogue
        before = self._header_bytes + self._earlier_bytes
        return before + (catalogue.written_bytes if catalogue is not None else 0)

    def need_bytes(self, new: dict[int, int]) -> int:
        """Bytes this may take at most, with `new` segments (or classes of some) beside it."""
        classes = {**self.classes, **new}
        size = self.identity.segment_bytes
        segments = sum(segment_cost(size, slot_bytes) for slot_bytes in classes.values())
        return FIXED_BYTES + segments + max(self.map_bytes(new), self.catalogue_bytes)

    # --- inside

    def map_bytes(self, new: dict[int, int]) -> int:
        """Bytes of a catalogue with room for all rows that the segments can have."""
        rows = 0
        for slot_bytes in {**self.classes, **new}.values():
            slots = (self.identity.segment_bytes - HEADER_BYTES) // slot_bytes
            rows += slots * worst_row_bytes(max(1, self.row_tokens.get(slot_bytes, 1)))
            rows += SEGMENT_ROW_BYTES
        return catalogue_bytes(rows, sum(map(namespace_cost, self.journal.namespaces.values())))

    def _grow_map(self, new: dict[int, int]) -> bool:
        size = max(self.map_bytes(new), self.catalogue_bytes)
        self.catalogue_bytes = size
        return self.catalogue is not None and self.catalogue.grow(size) is None

    def _make_segment(self, segment: int, slot_bytes: int) -> None:
        """Make a file with all its blocks and its header, durably. Raises OSError."""
        name, directory = segment_name(segment), self._directory
        if segment in self.segments:  # What a failure left, and could not remove either.
            self._io.unlink(name, directory=directory)
            self.segments.discard(segment)
        fd = self._io.open(
            name, create=True, exclusive=True, write=True, direct=self.direct, directory=directory
        )
        self.segments.add(segment)
        try:
            self._io.allocate(fd, self.identity.segment_bytes)
            self._write_segment_header(fd, segment, slot_bytes)
            self._io.fsync(directory)
        except OSError:
            with suppress(OSError):
                self._io.unlink(name, directory=directory)
                self.segments.discard(segment)
            raise
        finally:
            with suppress(OSError):
                self._io.close(fd)

    def _set_class(self, segment: int, slot_bytes: int) -> None:
        self.classes[segment] = slot_bytes
        self.journal.set_segment(segment, slot_bytes, SegmentState.USABLE)

    def write_own_header(self, share_bytes: int) -> None:
        """Write who this is and its share of the capacity, under its lock. Raises OSError."""
        header = FileHeader(
            VOLUME_MAGIC,
            self.identity.store_id,
            self.identity.volume,
            self.identity.volumes,
            self.identity.segment_bytes,
            capacity_bytes=share_bytes,
        )
        old = self._header_fd
        if old < 0:
            old = self._io.open(VOLUME_FILE, create=True, write=True, directory=self._directory)
        if not self._io.lock(old):
            self._io.close(old)
            raise StoreBusyError(f"{self.path} is in use by another store; stop that one first")
        self._header_fd = old
        page = bytearray(HEADER_BYTES)
        if self._io.pread(old, page, 0) == HEADER_BYTES and bytes(page) == header.pack():
            return
        self._io.pwrite(old, header.pack(), 0)
        self._io.fdatasync(old)
        self._io.fsync(self._directory)

    def _write_segment_header(self, fd: int, segment: int, slot_bytes: int) -> None:
        self._header_bytes += HEADER_BYTES
        write_segment_header(self._io, fd, self.identity, segment, slot_bytes)
