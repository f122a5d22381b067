"""Finding, locking or making the file of a persistent arena, in a directory others write to too.

The name is predictable and /dev/shm is open to all, so nothing found there is trusted: a link,
another user's file or one that is in use is refused, and one of ours that does not fit is removed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore.tiers.arena_sweep import sweep_arenas
from kvstore.tiers.errors import ConfigError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo

HEAD_BYTES = 128
TRIES_MAX = 8  # A name that others keep replacing is given up after as many looks.

Suits = Callable[[bytes], int | None]


class ArenaStart(StrEnum):
    """What was found at start."""

    NEW = "new"  # nothing
    TAKEN_OVER = "taken_over"  # the arena of an owner that died, or that kept it
    REPLACED = "replaced"  # one of ours with another id, other sizes or a damaged header; removed


@dataclass(frozen=True)
class ArenaFile:
    """Open descriptors. `fd` may be given to others; `lock` never: the lock goes with it.

    head: what the file began with when it was taken over; b"" for a new one.
    """

    directory: int
    lock: int
    fd: int
    start: ArenaStart
    head: bytes


def arena_path(directory: Path, store_id: bytes) -> Path:
    """Where a store's arena lies: named for the user and the store id, so it is only ever ours."""
    return directory / f"kvstore-{os.geteuid()}-{store_id.hex()}.arena"


def open_arena_file(
    io: FileIo, path: Path, suits: Suits, *, file_bytes: int, capacity_bytes: int
) -> ArenaFile:
    """The locked file under `path`: an old one that suits, or a new one.

    suits: told the first HEAD_BYTES of an old one, says how large it must be, or None for one to be
    replaced. A new one has `file_bytes`, all zero, and takes no memory yet; `capacity_bytes` of it
    will be used. Raises ConfigError (no such directory, capacity above what is free), StoreError (a
    link, or not ours), StoreBusyError.
    """
    directory = _open_directory(io, path.parent)
    start = ArenaStart.NEW
    try:
        for _ in range(TRIES_MAX):
            lock = _open_found(io, path, directory)
            made = lock < 0
            if made:
                _make_room(io, path, directory, capacity_bytes)
                lock = _make(io, path, directory)
                if lock < 0:
                    continue  # Another process made it first: look at that one.
            try:
                head = _settle(io, path, directory, lock, file_bytes if made else suits)
                if head is not None:
                    start = start if made else ArenaStart.TAKEN_OVER
                    fd = io.open(path.name, write=True, directory=directory)
                    return ArenaFile(directory, lock, fd, start, head)
            except BaseException:
                io.close(lock)
                raise
            io.close(lock)
            start = ArenaStart.REPLACED
        raise StoreBusyError(f"{path} keeps being replaced; start this store once")
    except BaseException:
        io.close(directory)
        raise


def remove_arena_file(io: FileIo, path: Path, file: ArenaFile) -> None:
    """Take the name away, if it still names this file."""
    if _names(io, path, file.directory, file.lock):
        io.unlink(path.name, directory=file.directory)


def refuse_above(free_bytes: int, wanted_bytes: int, place: str, why: str = "") -> None:
    """Raise ConfigError when a capacity does not fit into what is free."""
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"host capacity of {wanted_bytes} bytes does not fit: {place} has {free_bytes} free"
            f"{why}; lower the host capacity or make room there"
        )


def _make_room(io: FileIo, path: Path, directory: int, capacity_bytes: int) -> None:
    """Raise ConfigError where a new arena does not fit, even without those that nobody owns."""
    if io.free_bytes(directory) >= capacity_bytes:
        return
    swept = sweep_arenas(io, path.parent, until_free_bytes=capacity_bytes, keep=path.name)
    why = f" and {len(swept.in_use)} arenas of running stores" if swept.in_use else ""
    refuse_above(io.free_bytes(directory), capacity_bytes, str(path.parent), why)


def _open_directory(io: FileIo, path: Path) -> int:
    try:
        return io.open_directory(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot hold shared memory ({error.strerror}); name a tmpfs, such as /dev/shm"
        ) from None


def _open_found(io: FileIo, path: Path, directory: int) -> int:
    try:
        return io.open(path.name, write=True, directory=directory)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise StoreError(
            f"{path} is a link, not a file or not ours ({error.strerror}); remove it, or choose "
            "another directory for shared memory"
        ) from None


def _make(io: FileIo, path: Path, directory: int) -> int:
    try:
        return io.open(path.name, create=True, exclusive=True, write=True, directory=directory)
    except FileExistsError:
        return -1
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made ({error.strerror}); choose a directory you may write to"
        ) from None


def _settle(io: FileIo, path: Path, directory: int, lock: int, wanted: int | Suits) -> bytes | None:
    """Lock what was opened; size it (wanted: the bytes of a new file) or check it.

    Returns: how an old file begins, b"" for a new one; None when it was removed or replaced: look
    again. Raises for another user's file, or one that is in use.
    """
    state = io.stat(lock)
    if state.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {state.st_uid}; remove it, or choose another directory for "
            "shared memory"
        )
    if not io.lock(lock):
        raise StoreBusyError(f"{path} is in use by another process; end that one first")
    if not _names(io, path, directory, lock):
        return None
    if isinstance(wanted, int):
        io.truncate(lock, wanted)
        return b""
    head = bytearray(HEAD_BYTES)
    io.pread(lock, head, 0)
    # Others that may write it, or reach it by a second name, could change bytes at any time.
    alone = state.st_nlink == 1 and not state.st_mode & 0o077
    size = wanted(bytes(head))
    if alone and size is not None and io.size(lock) == size:
        return bytes(head)
    io.unlink(path.name, directory=directory)
    return None


def _names(io: FileIo, path: Path, directory: int, fd: int) -> bool:
    """Whether the name still leads to the open file."""
    state = io.stat(fd)
    try:
        named = io.status(path.name, directory=directory)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (state.st_dev, state.st_ino)
