"""File calls that count, or fail on purpose: what `open(io=...)` is for."""

import errno
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvstore.tiers.io import Buffer, FileIo


class CountingIo(FileIo):
    """Counts reads of segment files by (file, offset). `gate`: reads wait until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[int, int]] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self._segments: dict[int, str] = {}
        self._lock = threading.Lock()

    def open(self, path: str | Path, **options: object) -> int:
        fd = super().open(path, **options)  # type: ignore[arg-type]
        with self._lock:
            self._segments.pop(fd, None)
            if str(path).endswith(".seg"):
                self._segments[fd] = str(path)
        return fd

    def pread(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:  # type: ignore[override]
        if fd in self._segments and offset > 0:
            self.gate.wait(60)
            with self._lock:
                self.reads[fd, offset] += 1
        return super().pread(fd, buffer, offset)


class FailingIo(CountingIo):
    """Reads of segment files fail by plan.

    fail_reads: how many more reads fail.  error: raised by them; None means a short read.
    flip: reads deliver one wrong bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fail_reads = 0
        self.error: Exception | None = OSError(errno.EIO, "Input/output error")
        self.flip_at: int | None = None

    def pread(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:  # type: ignore[override]
        done = super().pread(fd, buffer, offset)
        if fd not in self._segments or offset == 0:
            return done
        with self._lock:
            failing = self.fail_reads > 0
            self.fail_reads -= failing
        if failing and self.error is not None:
            raise self.error
        if failing:
            return done // 2
        if self.flip_at is not None:
            memoryview(buffer)[self.flip_at] ^= 1
        return done


class NoDirectIo(FileIo):
    """A filesystem without O_DIRECT."""

    def open(self, path: str | Path, *, direct: bool = False, **options: object) -> int:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return super().open(path, **options)  # type: ignore[arg-type]

    def supports_direct(self, directory: int | str | Path) -> bool:
        return False


class FullIo(FileIo):
    """A filesystem that has no room left, while `full` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False

    def _refuse(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def pwrite(self, fd: int, buffer: Buffer, offset: int) -> None:
        self._refuse()
        super().pwrite(fd, buffer, offset)

    def pwritev(self, fd: int, buffers: object, offset: int) -> None:
        self._refuse()
        super().pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        self._refuse()
        super().allocate(fd, size, offset)


class WrittenIo(FileIo):
    """Counts the bytes of writes: `segments` (whole files' writes), `records` of them, `others`."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()
        self._segments: set[int] = set()
        self._lock = threading.Lock()

    @staticmethod
    def process_bytes() -> int:
        """Bytes that this process has handed to write calls so far, LMDB's included."""
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))

    def open(self, path: str | Path, **options: object) -> int:
        fd = super().open(path, **options)  # type: ignore[arg-type]
        with self._lock:
            self._segments.discard(fd)
            if str(path).endswith(".seg"):
                self._segments.add(fd)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        super().pwritev(fd, buffers, offset)
        size = sum(len(buffer) for buffer in buffers)
        with self._lock:
            segment = fd in self._segments
            self.written["segments" if segment else "others"] += size
            self.written["records"] += size if segment and offset > 0 else 0
