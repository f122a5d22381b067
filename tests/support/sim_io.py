"""File calls of a simulated machine, with faults by chance and somebody who interferes.

Nothing is on a disk and no clock runs: calls work on a SimDisk. `before` is called ahead of every
call that moves or syncs bytes: there the simulation lets others run, or takes the power away.
"""

import ctypes
import errno
import mmap
import os
import random
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvstore.tiers.io import Buffer, FileIo
from support.sim_disk import PAGE, Descriptor, Directory, Node, SimDisk

UID = os.geteuid()


class PowerLoss(BaseException):
    """The moment at which the process, or the machine, ends."""


@dataclass
class Faults:
    """Chances, of each call. The last two are the catalogue's."""

    read_error: float = 0.0
    short_read: float = 0.0
    write_error: float = 0.0
    no_space: float = 0.0
    sync_error: float = 0.0
    slow: float = 0.0
    map_full: float = 0.0
    device: float = 0.0

    def clear(self) -> None:
        """No more faults."""
        for one in fields(self):
            setattr(self, one.name, 0.0)


class SimIo(FileIo):
    """The calls of one process. `dead`: it was killed; what it still calls has no effect."""

    def __init__(
        self,
        disk: SimDisk,
        rng: random.Random,
        faults: Faults,
        before: Callable[[str], None] = lambda call: None,
        slow_down: Callable[[], None] = lambda: None,
    ) -> None:
        self.disk, self.faults, self.before = disk, faults, before
        self.dead = False
        self.hits: dict[str, int] = {}  # faults that happened
        self._rng, self._slow_down = rng, slow_down

    def chance(self, name: str) -> bool:
        """Whether a fault happens now; it is counted."""
        rate = getattr(self.faults, name)
        if not rate or self._rng.random() >= rate:
            return False
        self.hits[name] = self.hits.get(name, 0) + 1
        return True

    def _data_call(self, call: str) -> None:
        self._refuse_dead()
        self.before(call)
        self._refuse_dead()
        if self.chance("slow"):
            self._slow_down()

    def _refuse_dead(self) -> None:
        if self.dead:
            raise PowerLoss

    # --- names

    def _directory(self, path: str | Path | int) -> Directory:
        self._refuse_dead()
        entry = self.disk.open[path].node if isinstance(path, int) else self._find(path)
        if not isinstance(entry, Directory):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return entry

    def _find(self, path: str | Path, directory: int | None = None) -> Node | Directory:
        self._refuse_dead()
        parent, name = self._split(path, directory)
        entry = parent.names.get(name) if name else parent
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return entry

    def _split(self, path: str | Path, directory: int | None) -> tuple[Directory, str]:
        parts = [part for part in str(path).split("/") if part]
        here = self.disk.root if directory is None else self._directory(directory)
        for part in parts[:-1]:
            entry = here.names.get(part)
            if not isinstance(entry, Directory):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            here = entry
        return here, parts[-1] if parts else ""

    def open(
        self,
        path: str | Path,
        *,
        create: bool = False,
        write: bool = False,
        direct: bool = False,
        exclusive: bool = False,
        directory: int | None = None,
    ) -> int:
        self._refuse_dead()
        parent, name = self._split(path, directory)
        entry = parent.names.get(name)
        if entry is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            entry = Node(self.disk.number(), stat.S_IFREG | 0o600, volatile=parent.volatile)
            parent.put((name, entry))
        elif exclusive:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        if isinstance(entry, Directory):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return self._opened(Descriptor(entry, write, direct))

    def _opened(self, descriptor: Descriptor) -> int:
        fd = self.disk.number()
        self.disk.open[fd] = descriptor
        return fd

    def open_directory(self, path: str | Path) -> int:
        return self._opened(Descriptor(self._directory(path)))

    def make_directory(self, path: str | Path) -> None:
        self._refuse_dead()
        parent, name = self._split(path, None)
        parent.put((name, Directory(self.disk.number(), parent.volatile)))

    def remove_directory(self, path: str | Path) -> None:
        self.unlink(path)

    def unlink(self, path: str | Path, *, directory: int | None = None) -> None:
        entry = self._find(path, directory)
        parent, name = self._split(path, directory)
        parent.put((name, None))
        if isinstance(entry, Node):
            entry.links = 0

    def rename(self, old: str | Path, new: str | Path, *, directory: int | None = None) -> None:
        entry = self._find(old, directory)
        parent, name = self._split(old, directory)
        target, target_name = self._split(new, directory)
        assert parent is target, "nothing moves files between directories"
        parent.put((name, None), (target_name, entry))

    def list_names(self, directory: int | str | Path) -> list[str]:
        return sorted(self._directory(directory).names)

    def exists(self, path: str | Path, *, directory: int | None = None) -> bool:
        try:
            self._find(path, directory)
        except FileNotFoundError:
            return False
        return True

    def status(self, path: str | Path, *, directory: int | None = None) -> os.stat_result:
        return _status(self._find(path, directory))

    def writable(self, path: str | Path) -> bool:
        return True

    def close(self, fd: int) -> None:
        self._refuse_dead()
        node = self.disk.open.pop(fd).node
        if isinstance(node, Node) and node.holder == fd:
            node.holder = None

    # --- bytes

    def _file(self, fd: int) -> Node:
        self._refuse_dead()
        if fd not in self.disk.open:
            raise OSError(errno.EBADF, "Bad file descriptor")
        node = self.disk.open[fd].node
        assert isinstance(node, Node)
        return node

    def preadv(self, fd: int, buffer: bytearray | memoryview | mmap.mmap, offset: int) -> int:
        self._data_call("read")
        self._refuse_unaligned(fd, buffer, offset)
        node = self._file(fd)
        if self.chance("read_error"):
            raise OSError(errno.EIO, "Input/output error")
        size = min(len(buffer), max(0, node.size - offset))
        if size > 1 and self.chance("short_read"):
            size = self._rng.randrange(1, size)
            size = size // PAGE * PAGE or size if self._rng.random() < 0.75 else size
        memoryview(buffer)[:size] = node.read(offset, size)
        return size

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        self._data_call("write")
        node = self._file(fd)
        if not self.disk.open[fd].write:
            raise OSError(errno.EBADF, "Bad file descriptor")
        fault = 0
        if self.chance("write_error"):
            fault = errno.EIO
        elif self.chance("no_space") or not self._has_room(node, buffers, offset):
            fault = errno.ENOSPC
        end = self._rng.randrange(len(buffers) + 1) if fault else len(buffers)
        for number, buffer in enumerate(buffers):
            if number == 0:
                self._refuse_unaligned(fd, buffer, offset)
            if number == end:
                if fault == errno.EIO:
                    node.write(offset, memoryview(buffer)[: len(buffer) // 2])
                break
            node.write(offset, buffer)
            offset += len(buffer)
        if fault:
            raise OSError(fault, os.strerror(fault))

    def _has_room(self, node: Node, buffers: Sequence[Buffer], offset: int) -> bool:
        end = offset + sum(map(len, buffers))
        return self._fits(node, range(offset // PAGE, -(-end // PAGE)))

    def _fits(self, node: Node, pages: range) -> bool:
        if not self.disk.tight or node.volatile or node.pages.issuperset(pages):
            return True
        new = sum(page not in node.pages for page in pages)
        return self.disk.taken_bytes() + new * PAGE <= self.disk.capacity_bytes

    def _refuse_unaligned(self, fd: int, buffer: Buffer, offset: int) -> None:
        if self.disk.open[fd].direct:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            if offset % PAGE or len(buffer) % PAGE or address % PAGE:
                raise OSError(errno.EINVAL, "Invalid argument")

    def fdatasync(self, fd: int) -> None:
        self._data_call("sync")
        node = self._file(fd)
        if self.chance("sync_error"):
            node.fail_sync()
            raise OSError(errno.EIO, "Input/output error")
        node.sync()

    def fsync(self, fd: int) -> None:
        self._refuse_dead()
        node = self.disk.open[fd].node
        if isinstance(node, Node):
            self.fdatasync(fd)
        else:
            self._data_call("sync")
            node.unsynced.clear()

    # --- room

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        node = self._file(fd)
        pages = range(offset // PAGE, -(-(offset + size) // PAGE))
        if self.chance("no_space") or not self._fits(node, pages):
            raise OSError(errno.ENOSPC, "No space left on device")
        if offset + size > node.size:
            node.resize(offset + size)
        node.pages.update(pages)

    def truncate(self, fd: int, size: int) -> None:
        self._file(fd).resize(size)

    def size(self, fd: int) -> int:
        return self._file(fd).size

    def stat(self, fd: int) -> os.stat_result:
        self._refuse_dead()
        return _status(self.disk.open[fd].node)

    def allocated_bytes(self, fd: int) -> int:
        return len(self._file(fd).pages) * PAGE

    def free_bytes(self, place: int | str | Path) -> int:
        return self.disk.capacity_bytes - self.disk.taken_bytes()

    # --- the rest

    def map(self, fd: int, size: int) -> mmap.mmap:
        return self._file(fd).map(size)

    def lock(self, fd: int) -> bool:
        node = self._file(fd)
        if node.holder not in (None, fd):
            return False
        node.holder = fd
        return True

    def memfd(self, name: str) -> int:
        self._refuse_dead()
        node = Node(self.disk.number(), stat.S_IFREG | 0o600, volatile=True, links=0)
        return self._opened(Descriptor(node, write=True))

    def supports_direct(self, directory: int | str | Path) -> bool:
        return True


def _status(node: Node | Directory) -> os.stat_result:
    blocks = len(node.pages) * (PAGE // 512) if isinstance(node, Node) else PAGE // 512
    links = node.links if isinstance(node, Node) else 2
    head: tuple[Any, ...] = (node.mode, node.number, 1, links, UID, UID, node.size, 0, 0, 0)
    return os.stat_result(head, {"st_blocks": blocks})
