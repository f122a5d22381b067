"""A store's directory: `lock`, `store.toml` and other small files, and the disk tier's `disk0`.

store.toml is written atomically when the store is made, and when it is resized: format, store id,
hash, capacity and segment size. What it says counts over a configuration that differs, or the store
is refused.
"""

import errno
import json
import os
import secrets
import socket
import stat
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.tiers.errors import ConfigError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo, open_own_directory

FORMAT = 1
STORE_FILE = "store.toml"
LOCK_FILE = "lock"
COUNTERS_FILE = "counters"
CONTROL_SOCKET = "control"
INVALIDATED_FILE = "invalidated"
PINS_FILE = "pins"
STORE_FILE_MAX_BYTES = 65_536
STORE_ID_BYTES = 16
OWN_NAMES = {
    *(STORE_FILE, LOCK_FILE, COUNTERS_FILE, CONTROL_SOCKET, INVALIDATED_FILE),
    *(PINS_FILE, "scrub", "disk0", "lost+found"),
}
LOCK_TRIES = 5
LOCK_PAUSE_S = 0.02
OVERHEAD_BYTES = 64 << 10  # What lock, store.toml, counters and the directories take, rounded up.


@dataclass(frozen=True)
class StoreFacts:
    """What store.toml says. Sizes in bytes.

    paths: the directories of the disk tier, the home first.
    """

    store_id: bytes
    hash: str
    disk_capacity_bytes: int
    disk_segment_bytes: int
    paths: tuple[Path, ...]


class Home:
    """The directory of a store that this process owns. `close` gives the ownership back."""

    def __init__(self, path: Path, io: FileIo) -> None:
        """Open or make the directory and take its lock.

        Raises StoreBusyError when another process owns it, StoreError or ConfigError when it is not
        a place for a store. Nothing is written to a directory that is refused.
        """
        self.path = path
        self._io = io
        self._directory = open_own_directory(io, path, "store directory")
        self._lock_fd = -1
        try:
            refuse_foreign(io, path)
            read_facts(path, io)  # What is damaged, or another's, is refused with its lock intact.
            with sentence(path / LOCK_FILE):
                self._take_lock()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        io = self._io
        self._lock_fd = io.open(LOCK_FILE, create=True, write=True, directory=self._directory)
        if not _lock(io, self._lock_fd):
            raise StoreBusyError(
                f"{self.path} is in use by process {_owner(io, self._lock_fd)}; "
                "stop it, or read beside it with `kvstore stats`"
            )
        io.fsync(self._directory)  # What a killed owner made is relied on from now on.
        io.truncate(self._lock_fd, 0)
        io.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def read(self, name: str, bytes_max: int) -> bytes | None:
        """A small file, up to one byte more than `bytes_max`; None where there is none.

        Raises StoreError for one that cannot be read.
        """
        with sentence(self.path / name):
            if not self._io.exists(name, directory=self._directory):
                return None
            fd = self._io.open(name, directory=self._directory)
            try:
                data = bytearray(min(self._io.size(fd), bytes_max + 1))
                return bytes(data[: self._io.pread(fd, data, 0)])
            finally:
                self._io.close(fd)

    def listen(self, listener: socket.socket) -> None:
        """Bind a unix socket to the name `control`; one that a dead owner left is removed.

        Raises OSError, also where something else has that name.
        """
        io = self._io
        if io.exists(CONTROL_SOCKET, directory=self._directory):
            if not stat.S_ISSOCK(io.status(CONTROL_SOCKET, directory=self._directory).st_mode):
                raise FileExistsError(errno.EEXIST, "not a socket", CONTROL_SOCKET)
            io.unlink(CONTROL_SOCKET, directory=self._directory)
        io.bind(listener, CONTROL_SOCKET, directory=self._directory)

    def end_listening(self) -> None:
        """Remove the name `control`. Raises OSError."""
        self._io.unlink(CONTROL_SOCKET, directory=self._directory)

    @property
    def counters_path(self) -> Path:
        """Where the counters lie."""
        return self.path / COUNTERS_FILE

    def facts(self) -> StoreFacts | None:
        """What store.toml says, or None in a directory that is new."""
        return read_facts(self.path, self._io)

    def write_facts(self, facts: StoreFacts) -> None:
        """Write store.toml: whole or not at all, durable when this returns."""
        text = (
            f"# A kvstore. Written by kvstore; do not edit.\nformat = {FORMAT}\n"
            f'id = "{facts.store_id.hex()}"\nhash = "{facts.hash}"\n'
            f"disk_capacity_bytes = {facts.disk_capacity_bytes}\n"
            f"disk_segment_bytes = {facts.disk_segment_bytes}\n"
            f"paths = {json.dumps([str(path) for path in facts.paths])}\n"
        )
        with sentence(self.path / STORE_FILE):
            self.replace(STORE_FILE, text.encode())

    def forget_unless(self, made: Path) -> None:
        """Remove store.toml again, as that of a store that was refused, unless `made` exists."""
        with suppress(OSError):
            if not self._io.exists(made):
                self._io.unlink(STORE_FILE, directory=self._directory)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file: whole or not at all, durable when this returns. Raises OSError."""
        temporary = name + ".new"
        fd = self._io.open(temporary, create=True, write=True, directory=self._directory)
        try:
            self._io.truncate(fd, 0)
            self._io.pwrite(fd, data, 0)
            self._io.fdatasync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(temporary, name, directory=self._directory)
        self._io.fsync(self._directory)

    def close(self) -> None:
        """Give up the lock. The directory stays."""
        for fd in (self._lock_fd, self._directory):
            if fd >= 0:
                self._io.close(fd)
        self._lock_fd = self._directory = -1


@contextmanager
def sentence(place: Path) -> Iterator[None]:
    """What the system says about a file of the store becomes a StoreError that names the file."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{place} cannot be used ({error.strerror or error}); move it away or free some space"
        ) from None


def new_store_id() -> bytes:
    """16 random bytes."""
    return secrets.token_bytes(STORE_ID_BYTES)


def refuse_foreign(io: FileIo, path: Path) -> None:
    """Raise StoreError for a directory that holds something and is not a store."""
    names = set(io.list_names(path))
    if STORE_FILE not in names and names - OWN_NAMES - {STORE_FILE + ".new"}:
        raise StoreError(f"{path} holds other files and is not a store; choose an empty directory")


def read_facts(path: Path, io: FileIo) -> StoreFacts | None:
    """What a store's store.toml says; None where there is none. Needs no lock.

    Raises StoreError for a file that is damaged, or of another format.
    """
    place = path / STORE_FILE
    if not io.exists(place):
        return None
    with sentence(place):
        fd = io.open(place)
        try:
            data = bytearray(min(io.size(fd), STORE_FILE_MAX_BYTES))
            io.pread(fd, data, 0)
        finally:
            io.close(fd)
    try:
        document: dict[str, Any] = tomllib.loads(data.decode())
        version = document["format"]
        if version != FORMAT:
            raise StoreError(
                f"{path} has store format {version}, this version reads {FORMAT}; "
                "use the kvstore that wrote it, or another directory"
            )
        facts = StoreFacts(
            store_id=bytes.fromhex(document["id"]),
            hash=str(document["hash"]),
            disk_capacity_bytes=int(document["disk_capacity_bytes"]),
            disk_segment_bytes=int(document["disk_segment_bytes"]),
            # The home is where the file lies: a store that was moved or copied must not open
            # the blocks at its old place.
            paths=(path.resolve(), *(Path(p) for p in document["paths"][1:])),
        )
        if (
            len(facts.store_id) != STORE_ID_BYTES
            or not document["paths"]
            or not 0 < facts.disk_segment_bytes < facts.disk_capacity_bytes
        ):
            raise ValueError("a value is out of range")
        return facts
    except (KeyError, ValueError, TypeError, UnicodeDecodeError) as error:
        raise StoreError(f"{place} is damaged ({error}); remove the store and start anew") from None


def require_store(path: Path, io: FileIo) -> StoreFacts:
    """The facts of an existing store. Raises ConfigError where there is none."""
    facts = read_facts(path, io) if io.exists(path) else None
    if facts is None:
        raise ConfigError(f"{path} is not a store; give the first disk path of a store, its home")
    return facts


def owner_alive(path: Path, io: FileIo) -> bool:
    """Whether some process owns the store in `path` now."""
    place = path / LOCK_FILE
    if not io.exists(place):
        return False
    with sentence(place):
        fd = io.open(place)
        try:
            return not io.lock(fd)
        finally:
            io.close(fd)


def _lock(io: FileIo, fd: int) -> bool:
    # A reader that asks whether the store has an owner holds the lock for an instant.
    for _ in range(LOCK_TRIES):
        if io.lock(fd):
            return True
        time.sleep(LOCK_PAUSE_S)
    return False


def _owner(io: FileIo, fd: int) -> str:
    data = bytearray(32)
    io.pread(fd, data, 0)
    text = bytes(data).split(b"\n")[0].decode(errors="replace").strip("\0 ")
    return text if text.isdigit() else "?"
