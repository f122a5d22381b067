"""The open segment files of a disk tier: at most OPEN_FILES_MAX that nobody uses at the moment.

    with files.use(segment) as fd: ...

While it is in use a file stays open, under the same descriptor: the kernel tells of a lost write
only through descriptors that were open when it happened, so a group is written and synced in one
use. Opening and closing may wait for the device; no lock is held meanwhile.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from kvstore.tiers.io import FileIo

OPEN_FILES_MAX = 24


class _File:
    """A descriptor and how many use it. gone: it is closed by its last user, and not kept."""

    __slots__ = ("fd", "gone", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.gone = False


class Use:
    """One use of an open file: what `with` needs, and nothing else."""

    __slots__ = ("_file", "_files", "_segment")

    def __init__(self, files: "OpenFiles", segment: int) -> None:
        self._files = files
        self._segment = segment

    def __enter__(self) -> int:
        self._file = self._files._take(self._segment)
        return self._file.fd

    def __exit__(self, *_: object) -> None:
        self._files._give_back(self._segment, self._file)


class OpenFiles:
    """Keeps recently used segment files open. Thread-safe.

    Beyond the limit the least recently used file is closed, never one that is in use: so many
    threads may exceed the limit by the files that they use at once, and never wait for each other.
    """

    def __init__(
        self,
        io: FileIo,
        open_segment: Callable[[int], int],
        open_max: int = OPEN_FILES_MAX,
    ) -> None:
        """open_segment: opens the file of a segment; what it raises, entering a use raises."""
        self.opened = 0  # how often a file was opened
        self._io = io
        self._open_segment = open_segment
        self._open_max = open_max
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _File] = OrderedDict()  # the least recently used first
        self._forgotten = 0  # calls of `forget` so far

    def use(self, segment: int) -> Use:
        """The file of a segment, open until the `with` block ends. Entering raises OSError."""
        return Use(self, segment)

    def forget(self, segment: int) -> None:
        """Close the file of a segment once nobody uses it; who comes later opens it anew."""
        with self._lock:
            self._forgotten += 1
            file = self._files.pop(segment, None)
            if file is None:
                return
            file.gone = True
            unused = file.users == 0
        if unused:
            self._close([file])

    def in_use(self, segment: int) -> bool:
        """Whether somebody uses the file of a segment now."""
        with self._lock:
            file = self._files.get(segment)
            return file is not None and file.users > 0

    def count(self) -> int:
        """How many files are kept open."""
        with self._lock:
            return len(self._files)

    def _take(self, segment: int) -> _File:
        with self._lock:
            file = self._files.get(segment)
            if file is not None:
                file.users += 1
                self._files.move_to_end(segment)
                return file
            before = self._forgotten
        fresh = _File(self._open_segment(segment))
        with self._lock:
            self.opened += 1
            file = self._files.get(segment)
            over: list[_File] = []
            if file is not None:
                over.append(fresh)  # Another thread opened it meanwhile.
                self._files.move_to_end(segment)
            else:
                file = fresh
                if before == self._forgotten:
                    self._files[segment] = file
                else:
                    file.gone = True  # Perhaps of this very file, and it has no name any more.
            file.users += 1
            over += self._above_limit()
        self._close(over)
        return file

    def _give_back(self, segment: int, file: _File) -> None:
        over: list[_File] = []
        with self._lock:
            file.users -= 1
            if file.users == 0:
                over = [file] if file.gone else self._above_limit()
        if over:
            self._close(over)

    def _above_limit(self) -> list[_File]:
        """Take what is too much off the list, the least recently used first. Under the lock."""
        excess = len(self._files) - self._open_max
        if excess <= 0:
            return []
        idle = [segment for segment, file in self._files.items() if file.users == 0][:excess]
        return [self._files.pop(segment) for segment in idle]

    def _close(self, files: list[_File]) -> None:
        for file in files:
            with suppress(OSError):  # Whatever was to be durable was synced before.
                self._io.close(file.fd)
