"""One mapping of shared memory for the host tier: a memfd, or a tmpfs file that outlives a crash.

Memory is taken when a segment is committed, never before, so running out is an outcome of `commit`
and not a signal (SIGBUS) in the middle of a copy. What lies in the segments is tiers/host.py's.
"""

import ctypes
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.tiers import arena_header
from kvstore.tiers.arena_file import (
    ArenaFile,
    ArenaStart,
    arena_path,
    open_arena_file,
    refuse_above,
    remove_arena_file,
)
from kvstore.tiers.arena_header import (
    BOOT_AT,
    CLASSES_AT,
    CLEAN_AT,
    STORE_ID_BYTES,
    WORD_MAX,
    header_bytes_of,
    open_word,
    seal_word,
    segments_in,
)
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import ALIGN
from kvstore.tiers.slab import SLOT_BYTES_MIN

SHARED_MEMORY = Path("/dev/shm")
POPULATE_STEP_BYTES = 16 << 20  # What is still done after `close` asked to stop.
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """Shared memory of at most `capacity_bytes`, header included, in segments of `segment_bytes`.

    Address space is reserved for `most_bytes`, so that the capacity can grow to it without a new
    mapping. An arena that is taken over keeps its own segments, if they can give this capacity.

    persist: False is a memfd, gone with its owner. True is a file in `directory`, mode 0600 and
    locked while its owner lives; the next owner takes it over unless it was closed with keep=False.
    start, was_clean, boot: what was found, whether its owner had stopped cleanly, and this owner's
    number, 1 for the first. buffer, address, fd: the whole mapping, from the header on.

    Raises ConfigError (does not fit), StoreError (not ours), StoreBusyError (another owner).
    """

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        store_id: bytes,
        persist: bool,
        directory: Path = SHARED_MEMORY,
        io: FileIo | None = None,
        most_bytes: int = 0,
    ) -> None:
        if len(store_id) != STORE_ID_BYTES:
            raise ConfigError(f"a store id has {STORE_ID_BYTES} bytes; got {len(store_id)}")
        if segment_bytes < SLOT_BYTES_MIN or segment_bytes % ALIGN:
            raise ConfigError(
                f"host segments of {segment_bytes} bytes are refused; use a multiple of {ALIGN}, "
                f"at least {SLOT_BYTES_MIN}"
            )
        self.store_id = store_id
        self._set_sizes(segments_in(max(capacity_bytes, most_bytes), segment_bytes), segment_bytes)
        if not self.segments_within(capacity_bytes):
            raise ConfigError(
                f"host capacity of {capacity_bytes} bytes is too small for one segment; "
                f"give at least {segment_bytes + header_bytes_of(max(self.segments, 1))}"
            )
        self.persist = persist
        self.path = arena_path(directory, store_id)
        self.closed = False
        self._io = io or FileIo()
        self._file: ArenaFile | None = None
        self._stop = threading.Event()
        self._populating = threading.Lock()
        self._open(capacity_bytes)
        self._committed = np.zeros(self.segments, np.bool_)

    def segments_within(self, capacity_bytes: int) -> int:
        """How many segments fit a capacity beside the header, of those that are reserved."""
        return max(0, min(self.segments, (capacity_bytes - self.segments_at) // self.segment_bytes))

    def refuse(self, capacity_bytes: int) -> None:
        """Raise ConfigError, in one sentence, for a capacity that cannot be from now on."""
        least = self.segments_at + self.segment_bytes
        if not least <= capacity_bytes < self.file_bytes + self.segment_bytes:
            raise ConfigError(
                f"host capacity can be {least} to {self.file_bytes} bytes while the store is in "
                "use; for more, open it anew with that capacity"
            )
        needed = self.segments_at + self.segments_within(capacity_bytes) * self.segment_bytes
        if self._file is None:
            refuse_above(_memory_bytes(), needed, "this machine")
        else:
            taken = self._io.allocated_bytes(self.fd)
            free = self._io.free_bytes(self._file.directory) + taken
            refuse_above(free, needed, str(self.path.parent))

    def classes(self) -> npt.NDArray[np.int64]:
        """The slot_bytes of every segment, 0 for one without a class: int64 [segments]."""
        words = self._words[CLASSES_AT // 8 :][: self.segments].tolist()
        values = [
            open_word(self.store_id, CLASSES_AT + 8 * at, word) for at, word in enumerate(words)
        ]
        return np.array(values, np.int64) * ALIGN

    def set_class(self, segment: int, slot_bytes: int) -> None:
        """Write the class of a segment into the header: one atomic store."""
        self._put(CLASSES_AT + 8 * segment, slot_bytes // ALIGN)

    def commit(self, segment: int) -> bool:
        """Take the memory of a segment, so that no later write to it can fail.

        Returns: True, or False when there is no memory left for it.
        """
        if not self._committed[segment]:
            at = self.segments_at + segment * self.segment_bytes
            try:
                self._io.allocate(self.fd, self.segment_bytes, at)
            except OSError:
                return False
            self._committed[segment] = True
        return True

    def release(self, segment: int) -> bool:
        """Give the memory of a segment back; it reads as zeros then. Waits for who touches it.

        Returns: True, or False where the system does not take it.
        """
        with self._populating:
            self._committed[segment] = False
            at = self.segments_at + segment * self.segment_bytes
            try:
                self._io.punch(self.fd, at, self.segment_bytes)
            except OSError:
                return False
        return True

    def populate(self, threads: int = 1) -> bool:
        """Touch all pages now, in parallel, so that no save pays for it later.

        Blocks, with the GIL released: call it from a thread to have it in the background. `close`
        ends it early. Never changes a byte.

        Returns: True when every page is there, False when memory ran out or the arena closed.
        """
        done: list[int] = []
        with self._populating:
            workers = [
                threading.Thread(target=self._touch, args=(first, threads, done), daemon=True)
                for first in range(threads)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        return sum(done) == self.segments

    def populate_segment(self, segment: int, threads: int = 1) -> bool:
        """Take a segment's memory and touch its pages. Blocks, with the GIL released.

        Returns: True, or False when memory ran out or the arena is closing.
        """
        with self._populating:
            if self._stop.is_set() or not self.commit(segment):
                return False
            if threads == 1:
                return self._touch_one(segment)
            with ThreadPoolExecutor(threads) as pool:
                parts = pool.map(lambda n: self._touch_one(segment, n, threads), range(threads))
                return all(list(parts))

    def close(self, keep: bool) -> None:
        """End the ownership. keep: leave a persistent arena to the next owner, marked as clean.

        Without keep its file is removed. Views that others still hold stay readable until they let
        go of them. A second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        self._stop.set()
        with self._populating:
            if keep and self.persist:
                self._put(CLEAN_AT, 1)
            elif self._file is not None:
                remove_arena_file(self._io, self.path, self._file)
            del self._words
            with suppress(BufferError):  # A view still looks into it: it ends with the last one.
                self.buffer.release()
                self._mapping.close()
        self._close_files()

    def _set_sizes(self, segments: int, segment_bytes: int) -> None:
        self.segments = segments
        self.segment_bytes = segment_bytes
        self.segments_at = header_bytes_of(segments)
        self.file_bytes = self.segments_at + segments * segment_bytes

    def _suits(self, head: bytes, capacity_bytes: int) -> int | None:
        """The size of an arena that begins so, if all but a segment of the capacity can be had."""
        found = arena_header.parse_fixed(head, self.store_id)
        if found is None:
            return None
        segments, size = found
        file_bytes = header_bytes_of(segments) + segments * size
        suits = header_bytes_of(segments) + size <= capacity_bytes < file_bytes + size
        return file_bytes if suits else None

    def _open(self, capacity_bytes: int) -> None:
        needed = self.segments_at + self.segments_within(capacity_bytes) * self.segment_bytes
        if self.persist:
            self._file = open_arena_file(
                self._io,
                self.path,
                lambda head: self._suits(head, capacity_bytes),
                file_bytes=self.file_bytes,
                capacity_bytes=needed,
            )
            self.fd, self.start = self._file.fd, self._file.start
            found = arena_header.parse_fixed(self._file.head, self.store_id)
            if found is not None:
                self._set_sizes(*found)
        else:
            refuse_above(_memory_bytes(), needed, "this machine")
            self.fd, self.start = self._io.memfd(self.path.stem), ArenaStart.NEW
        try:
            if not self.persist:
                self._io.truncate(self.fd, self.file_bytes)
            # The header's pages first, for the same reason as those of a segment.
            self._io.allocate(self.fd, self.segments_at)
            self._mapping = self._io.map(self.fd, self.file_bytes)
        except OSError as error:
            self._close_files()
            raise ConfigError(
                f"host capacity of {self.file_bytes} bytes cannot be mapped ({error.strerror}); "
                "lower the host capacity"
            ) from None
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self.buffer = memoryview(self._mapping)
        self._words = np.frombuffer(self._mapping, np.uint64)
        self.address = int(self._words.ctypes.data)
        if self.start is not ArenaStart.TAKEN_OVER:
            fixed = arena_header.fixed_part(self.store_id, self.segments, self.segment_bytes)
            self.buffer[: len(fixed)] = fixed
        self.was_clean = bool(self._get(CLEAN_AT))
        self.boot = min(self._get(BOOT_AT) + 1, WORD_MAX)
        self._put(CLEAN_AT, 0)
        self._put(BOOT_AT, self.boot)

    def _get(self, place: int) -> int:
        return open_word(self.store_id, place, int(self._words[place // 8]))

    def _put(self, place: int, value: int) -> None:
        self._words[place // 8] = seal_word(self.store_id, place, value)

    def _touch(self, first: int, stride: int, done: list[int]) -> None:
        """Populate every stride-th segment; adds how many are complete to `done`."""
        whole = 0
        for segment in range(first, self.segments, stride):
            if not self._touch_one(segment):
                break
            whole += 1
        done.append(whole)

    def _touch_one(self, segment: int, nth: int = 0, parts: int = 1) -> bool:
        """Populate a segment, or every parts-th step of it, from the nth on."""
        start = self.address + self.segments_at + segment * self.segment_bytes
        step = POPULATE_STEP_BYTES
        for at in range(nth * step, self.segment_bytes, parts * step):
            size = min(POPULATE_STEP_BYTES, self.segment_bytes - at)
            if self._stop.is_set() or _libc.madvise(start + at, size, MADV_POPULATE_WRITE):
                return False
        return True

    def _close_files(self) -> None:
        self._io.close(self.fd)
        if self._file is not None:
            self._io.close(self._file.lock)
            self._io.close(self._file.directory)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
