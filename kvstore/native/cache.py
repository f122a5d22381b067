"""The cache of compiled code: one directory that is ours alone, files that are whole or not there.

What lies in it is code, so a directory or a file that another user could have written is refused.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FILES_KEPT = 8  # of each name and kind; older ones are removed when a new one is made


def cache_directory() -> Path | None:
    """The first directory of the usual places that we can make and that is ours alone."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    shared = Path(tempfile.gettempdir()) / f"kvstore-{os.geteuid()}"
    for directory in (home / "kvstore", shared):
        if not directory.is_absolute():
            continue
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if ours_alone(directory, stat.S_ISDIR) and os.access(directory, os.W_OK | os.X_OK):
                return directory
    return None


def ours_alone(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether path is of that kind (never a link), is ours, and nobody else can write it.

    Raises PermissionError for a file that exists and is not: it is refused, never replaced.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return True
    raise PermissionError(f"{path} could have been written by others; remove it and start again")


def prune(directory: Path, name: str, keep: Path) -> None:
    """Remove all but the newest files of this name and kind, so that the cache stays bounded."""
    with suppress(OSError):  # Another process prunes too; what is left over goes next time.
        found = [path for path in directory.glob(f"{name}-*{keep.suffix}") if path != keep]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[FILES_KEPT - 1 :]:
            path.unlink()


def read(path: Path) -> bytes | None:
    """What lies in a cached file; None where there is none, or an empty one."""
    if not ours_alone(path, stat.S_ISREG):
        return None
    return path.read_bytes() or None


def publish(path: Path, content: bytes) -> None:
    """Write a cached file. Others see the whole of it or nothing."""
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
