"""File calls that write down what they do, in one order with what LMDB does (shim.c's log)."""

import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.tiers.io import Buffer, FileIo
from support.shim import Event, Log


class RecordingIo(FileIo):
    """Logs every change below `root`. What the shim sees itself, on data.mdb, it leaves to it.

    A sync is logged when it is done, all else before or with the call, and one at a time: an entry
    never says that something is durable before it was.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._log = Log()
        self._lock = threading.RLock()

    def open(
        self, path: str | Path, *, create: bool = False, directory: int | None = None, **rest: Any
    ) -> int:
        with self._lock:
            new = create and not self.exists(path, directory=directory)
            fd = super().open(path, create=create, directory=directory, **rest)
            if new:
                self._add(Event.MADE, self._path(path, directory))
        return fd

    def make_directory(self, path: str | Path) -> None:
        with self._lock:
            super().make_directory(path)
            self._add(Event.MADE_DIRECTORY, str(path))

    def unlink(self, path: str | Path, *, directory: int | None = None) -> None:
        with self._lock:
            name = self._path(path, directory)
            super().unlink(path, directory=directory)
            self._add(Event.REMOVED, name)

    def rename(self, old: str | Path, new: str | Path, *, directory: int | None = None) -> None:
        with self._lock:
            super().rename(old, new, directory=directory)
            target = self._path(new, directory).encode()
            self._add(Event.RENAMED, self._path(old, directory), data=target)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        name = _name_of(fd)
        with self._lock:
            if not _is_seen_by_shim(name):
                self._add(Event.WRITE, name, offset, b"".join(bytes(part) for part in buffers))
            super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._sync(fd, super().fdatasync)

    def fsync(self, fd: int) -> None:
        self._sync(fd, super().fsync)

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        with self._lock:
            self._add(Event.ALLOCATE, _name_of(fd), offset + size)
            super().allocate(fd, size, offset)

    def truncate(self, fd: int, size: int) -> None:
        name = _name_of(fd)
        with self._lock:
            if not _is_seen_by_shim(name):
                self._add(Event.TRUNCATE, name, size)
            super().truncate(fd, size)

    def _sync(self, fd: int, call: Any) -> None:
        name = _name_of(fd)
        with self._lock:
            call(fd)
            if not _is_seen_by_shim(name):
                directory = stat.S_ISDIR(os.fstat(fd).st_mode)
                self._add(Event.SYNC_DIRECTORY if directory else Event.SYNC, name)

    def _add(self, event: Event, name: str, offset: int = 0, data: bytes = b"") -> None:
        if name.startswith(self._root):
            self._log.add(event, name, offset, data)

    @staticmethod
    def _path(path: str | Path, directory: int | None) -> str:
        return str(path) if directory is None else os.path.join(_name_of(directory), path)


def _name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _is_seen_by_shim(name: str) -> bool:
    return name.endswith("/data.mdb")
