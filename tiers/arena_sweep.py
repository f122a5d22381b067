"""Arenas that dead owners of other stores left behind: removed when memory is short, and only then.

A store that was killed finds its arena again at its next start, so one is not removed for its age
alone. When a store cannot start for want of shared memory, the oldest go first. An arena that a
living process has locked stays, and so does what is another user's, a link or no arena by its name.
"""

import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from kvstore.tiers.io import FileIo

LOG = logging.getLogger(__name__)
NAME = re.compile(r"kvstore-(\d+)-[0-9a-f]{32}\.arena")


@dataclass(frozen=True)
class Swept:
    """What a sweep did. removed: names. in_use: names of arenas of this user that are locked."""

    removed: tuple[str, ...]
    in_use: tuple[str, ...]


def sweep_arenas(io: FileIo, place: Path, *, until_free_bytes: int, keep: str = "") -> Swept:
    """Remove arenas without an owner in `place` until so many bytes are free there, oldest first.

    keep: a name that stays whatever it is. Blocks that only such an arena had are lost; nothing
    else is, and each removal is one line in the log. Never raises.

    Returns: a Swept.
    """
    removed: list[str] = []
    in_use: list[str] = []
    try:
        directory = io.open_directory(place)
    except OSError:
        return Swept((), ())
    try:
        for name in _oldest_first(io, directory):
            if name == keep:
                continue
            if io.free_bytes(directory) >= until_free_bytes:
                break
            freed = _remove(io, directory, name)
            if freed is None:
                in_use.append(name)
                continue
            removed.append(name)
            LOG.warning(
                "removed %s, %d bytes that no process owned: shared memory was short",
                place / name,
                freed,
            )
    except OSError as error:
        LOG.warning("%s could not be swept: %s", place, error)
    finally:
        io.close(directory)
    return Swept(tuple(removed), tuple(in_use))


def _oldest_first(io: FileIo, directory: int) -> list[str]:
    found = []
    for name in io.list_names(directory):
        match = NAME.fullmatch(name)
        if match is None or int(match[1]) != os.geteuid():
            continue
        try:
            state = io.status(name, directory=directory)
        except OSError:
            continue  # It went meanwhile.
        if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
            found.append((state.st_mtime_ns, name))
    return [name for _, name in sorted(found)]


def _remove(io: FileIo, directory: int, name: str) -> int | None:
    """Remove an arena without an owner. Returns: bytes that it took; None where it stays."""
    try:
        fd = io.open(name, write=True, directory=directory)
    except OSError:
        return None
    try:
        # An owner that opened it before this lock, and locks it after, finds the name gone.
        if io.stat(fd).st_uid != os.geteuid() or not io.lock(fd):
            return None
        size = io.allocated_bytes(fd)
        io.unlink(name, directory=directory)
        return size
    except OSError:
        return None
    finally:
        io.close(fd)
