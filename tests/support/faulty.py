"""File calls that count, or fail on purpose: what `open(io=...)` is for."""

import errno
import threading
from collections import Counter
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
