"""File calls: every one the store makes goes through a `FileIo`: one place to inject faults.

LMDB makes its own calls; it is the one exception. Nothing here knows what the bytes mean.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.tiers.errors import ConfigError, StoreError
from kvstore.tiers.failpoints import planted

ALIGN = 4096  # What O_DIRECT asks of offsets, lengths and addresses, on every device we know.
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
IOV_MAX = 1024  # Buffers in one preadv or pwritev; Linux takes no more.
KEEP_SIZE, PUNCH_HOLE = 1, 2  # Of fallocate, which Python's os has not with these.
LINKS_OFF = os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

Buffer = bytes | bytearray | memoryview | mmap.mmap


def aligned_buffer(size: int) -> memoryview:
    """Writable memory of `size` bytes that starts on a page: fit for O_DIRECT. Zeroed, private."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def read_text(path: Path) -> str:
    """A small text file of the system, such as /proc/meminfo; "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def thread_written_bytes() -> int | None:
    """Bytes that this thread has handed to write calls so far; None where the system won't say."""
    for line in read_text(Path("/proc/thread-self/io")).splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return None


class FileIo:
    """The file calls. Thread-safe: it has no state. Tests pass an instance that fails on purpose.

    Names are opened without following a link in their last part, closed on exec, mode 0600. With
    `directory` (a descriptor) a name is relative to it. Every method raises OSError and nothing
    else unless it says so.
    """

    @property
    def plain(self) -> bool:
        """Whether compiled code may make these calls itself: not for one that fails on purpose."""
        return type(self) is FileIo

    # --- names

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
        """A descriptor of a regular file. `direct`: O_DIRECT, around the page cache.

        `exclusive`: the name must not exist yet. Raises OSError, also for what is no regular file.
        """
        flags = LINKS_OFF | (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK
        flags |= os.O_CREAT if create else 0
        flags |= os.O_EXCL if exclusive else 0
        flags |= os.O_DIRECT if direct else 0
        fd = os.open(path, flags, FILE_MODE, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(22, "not a regular file", str(path))
        return fd

    def open_directory(self, path: str | Path) -> int:
        """A descriptor of a directory, to open names in it and to sync it."""
        return os.open(path, LINKS_OFF | os.O_RDONLY | os.O_DIRECTORY)

    def make_directory(self, path: str | Path) -> None:
        """A new directory, mode 0700."""
        os.mkdir(path, DIRECTORY_MODE)

    def remove_directory(self, path: str | Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def unlink(self, path: str | Path, *, directory: int | None = None) -> None:
        """Remove a name."""
        os.unlink(path, dir_fd=directory)

    def rename(self, old: str | Path, new: str | Path, *, directory: int | None = None) -> None:
        """Give a file a new name, atomically; what had that name is replaced."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def list_names(self, directory: int | str | Path) -> list[str]:
        """The names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def exists(self, path: str | Path, *, directory: int | None = None) -> bool:
        """Whether a name exists; a dangling link does."""
        try:
            os.stat(path, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def status(self, path: str | Path, *, directory: int | None = None) -> os.stat_result:
        """What lies under a name, a link not followed."""
        return os.stat(path, dir_fd=directory, follow_symlinks=False)

    def writable(self, path: str | Path) -> bool:
        """Whether this process may make and remove names in a directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    # --- bytes

    def pread(self, fd: int, buffer: bytearray | memoryview | mmap.mmap, offset: int) -> int:
        """Fill `buffer` from `offset` on; asks again after a short read.

        Returns: bytes read; fewer than the buffer holds only at the end of the file.
        """
        size = len(buffer)
        done = self.preadv(fd, buffer, offset)
        if done in (0, size):
            return done
        if planted("ignore_short_read"):
            return size
        view = memoryview(buffer)
        while done < size:
            # An O_DIRECT read that ended in the middle of a page has met the end of the file.
            got = self.preadv(fd, view[done:], offset + done) if done % ALIGN == 0 else 0
            if got == 0:
                break
            done += got
        return done

    def preadv(self, fd: int, buffer: bytearray | memoryview | mmap.mmap, offset: int) -> int:
        """One read as the system does it, perhaps a short one. Returns: bytes read."""
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: Buffer, offset: int) -> None:
        """Write all of `buffer` at `offset`; goes on after a short write."""
        self.pwritev(fd, [buffer], offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers, one after the other, at `offset`; goes on after a short write."""
        for first in range(0, len(buffers), IOV_MAX):
            part = buffers[first : first + IOV_MAX]
            size = sum(len(buffer) for buffer in part)
            done = os.pwritev(fd, part, offset)
            while done < size:
                more = os.pwritev(fd, _after(part, done), offset + done)
                if more == 0:
                    raise OSError(5, "a write moved no byte")
                done += more
            offset += size

    def fdatasync(self, fd: int) -> None:
        """Bytes of the file, and its size, are on the device when this returns."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """As fdatasync; of a directory: its names are on the device."""
        os.fsync(fd)

    # --- room

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        """Give the file blocks for `size` bytes from `offset` on: writes there will find room."""
        os.posix_fallocate(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def stat(self, fd: int) -> os.stat_result:
        """What an open descriptor is."""
        return os.fstat(fd)

    def allocated_bytes(self, fd: int) -> int:
        """Bytes an open file takes on its device, as du counts them."""
        return os.fstat(fd).st_blocks * 512

    def free_bytes(self, place: int | str | Path) -> int:
        """Bytes an ordinary user can still allocate on the filesystem of a path or a descriptor."""
        state = os.statvfs(place)
        return state.f_bavail * state.f_frsize

    def punch(self, fd: int, offset: int, size: int) -> None:
        """Give the blocks, or the memory, of a part of a file back; it reads as zeros then."""
        if _libc.fallocate(fd, PUNCH_HOLE | KEEP_SIZE, offset, size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    # --- the rest

    def map(self, fd: int, size: int) -> mmap.mmap:
        """The first `size` bytes of a file as memory, shared with whoever else maps it."""
        return mmap.mmap(fd, size)

    def lock(self, fd: int) -> bool:
        """Take the file's one exclusive lock, without waiting. It ends with the descriptor.

        Returns: True, or False when another open file has it.
        """
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def bind(self, listener: socket.socket, name: str, *, directory: int) -> None:
        """Give a unix socket a name in a directory, mode 0600 from its first instant."""
        os.fchmod(listener.fileno(), FILE_MODE)
        # The path of a unix socket has at most 107 bytes; this one is short wherever it leads.
        listener.bind(f"/proc/self/fd/{directory}/{name}")

    def connect(self, client: socket.socket, name: str, *, directory: int) -> None:
        """Connect to the unix socket that has this name."""
        client.connect(f"/proc/self/fd/{directory}/{name}")

    def memfd(self, name: str) -> int:
        """A file in memory without a name in any directory."""
        return os.memfd_create(name, os.MFD_CLOEXEC)

    def supports_direct(self, directory: int | str | Path) -> bool:
        """Whether files in a directory can be opened around the page cache. Leaves nothing."""
        place = f"/proc/self/fd/{directory}" if isinstance(directory, int) else directory
        for flag in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
            try:
                os.close(os.open(place, flag | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
            except OSError:
                continue
            return bool(flag & os.O_DIRECT)
        return self._direct_by_name(place)

    def _direct_by_name(self, place: str | Path) -> bool:
        """The same by a named file, where the filesystem has no nameless ones."""
        name = os.path.join(place, f"probe-{os.getpid()}")
        flags = LINKS_OFF | os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        try:
            fd = os.open(name, flags, FILE_MODE)
        except OSError:
            direct = False
        else:
            os.close(fd)
            direct = True
        # A refused O_DIRECT open may have made the name all the same.
        if os.path.lexists(name):
            os.unlink(name)
        return direct


def check_own_directory(io: FileIo, path: Path, what: str) -> bool:
    """Refuse a path that cannot be, or become, a directory of ours. Changes nothing.

    what: the word for it in an error, such as "disk path". Raises ConfigError or StoreError, in one
    sentence that says what to do.

    Returns: True, it exists and is ours | False, it can be made in its parent.
    """
    try:
        io.list_names(path)
        fd = io.open_directory(path)
    except FileNotFoundError:
        _refuse_parent(io, path, what)
        return False
    except PermissionError:
        raise ConfigError(f"{path} is not yours to read; choose a {what} of your own") from None
    except OSError as error:
        if is_link(io, path):
            raise StoreError(f"{path} is a link; give the directory it points to") from None
        raise ConfigError(f"{path} cannot be a {what}: {error.strerror}; choose another") from None
    try:
        _refuse_foreign(io.stat(fd), path, what)
    finally:
        io.close(fd)
    if not io.writable(path):
        raise ConfigError(f"{path} is not writable; choose a {what} that you may write to")
    return True


def open_own_directory(io: FileIo, path: Path, what: str) -> int:
    """A descriptor of a directory that is ours; made, 0700, if only its last part is missing.

    Refuses as check_own_directory does, before anything was made.
    """
    try:
        if not check_own_directory(io, path, what):
            io.make_directory(path)
        # Also of one that is there: whoever made it may have been killed before this.
        with suppress(PermissionError):  # Its parent may be written to, but not opened.
            sync_directory(io, path.parent)
        return io.open_directory(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be a {what}: {error.strerror}; choose another") from None


def sync_directory(io: FileIo, path: Path) -> None:
    """The names in a directory are on the device when this returns. Raises OSError."""
    fd = io.open_directory(path)
    try:
        io.fsync(fd)
    finally:
        io.close(fd)


def is_link(io: FileIo, path: str | Path, *, directory: int | None = None) -> bool:
    """Whether a name is a symbolic link."""
    try:
        return stat.S_ISLNK(io.status(path, directory=directory).st_mode)
    except OSError:
        return False


def _refuse_parent(io: FileIo, path: Path, what: str) -> None:
    if is_link(io, path):
        raise StoreError(f"{path} is a link to nothing; give a directory")
    if not io.exists(path.parent):
        raise ConfigError(f"{path.parent} does not exist; make it, or choose another {what}")
    if not io.writable(path.parent):
        raise ConfigError(f"{path.parent} is not writable; choose a {what} that you may write to")


def _refuse_foreign(state: os.stat_result, path: Path, what: str) -> None:
    if state.st_uid != os.geteuid():
        raise StoreError(f"{path} belongs to user {state.st_uid}; choose a {what} of your own")
    if state.st_mode & 0o022:
        raise StoreError(f"others may write to {path}; run `chmod go-w` on it or choose another")


def _after(buffers: Sequence[Buffer], done: int) -> list[Buffer]:
    """What is left of buffers after `done` bytes of them were written."""
    left: list[Buffer] = []
    for buffer in buffers:
        size = len(buffer)
        if done < size:
            left.append(memoryview(buffer)[done:] if done else buffer)
        done = max(0, done - size)
    return left
