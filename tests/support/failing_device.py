"""A device under segment files that fails, fills up, slows down or stalls, by plan or chance."""

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.tiers.io import Buffer, FileIo

READS = ("preadv",)
WRITES = ("allocate", "pwrite", "pwritev", "fdatasync")


class FailingDevice(FileIo):
    """Calls on segment files, and writes that make a catalogue grow, go through `fault`.

    fault: given a call's name, the errno that it fails with, or 0. calls, injected: how many there
    were, and how many failed, by name. short: one read in so many ends early (0: none). late_s: one
    call in 64 takes so much longer. stalled: while it is set calls of these names wait for its end.
    """

    def __init__(self, fault: Callable[[str], int] = lambda name: 0, seed: int = 0) -> None:
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.short = 0
        self.late_s = 0.0
        self.stalled: tuple[str, ...] = ()
        self.waiting = 0
        self._go = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._ours: set[int] = set()

    def one_in(self, count: int, names: Sequence[str] = (*READS, *WRITES)) -> None:
        """From now on calls of these names fail with EIO, one in `count`."""
        chance = random.Random(count)
        self.fault = lambda name: errno.EIO if name in names and chance.random() * count < 1 else 0

    def stall(self, *names: str) -> None:
        """Calls of these names take for ever from now on; without names what waits goes on."""
        self.stalled = names
        if names:
            self._go.clear()
        else:
            self._go.set()

    @property
    def operations(self) -> int:
        """Calls so far."""
        return sum(self.calls.values())

    def _call(self, fd: int, name: str) -> None:
        if fd not in self._ours:
            return
        with self._lock:
            self.calls[name] += 1
            number = self.fault(name)
            self.injected[name] += number != 0
            late = bool(self.late_s) and self._random.randrange(64) == 0
            self.injected["late"] += late
        if late:
            time.sleep(self.late_s)
        if name in self.stalled:
            self.waiting += 1
            self._go.wait(60)
            self.waiting -= 1
        if number:
            raise OSError(number, errno.errorcode[number])

    def open(self, path: str | Path, **options: Any) -> int:
        fd = super().open(path, **options)
        with self._lock:
            ours = str(path).endswith((".seg", "data.mdb"))
            (self._ours.add if ours else self._ours.discard)(fd)
        return fd

    def preadv(self, fd: int, buffer: Any, offset: int) -> int:
        self._call(fd, "preadv")
        if self.short and fd in self._ours and len(buffer) > 4096:
            with self._lock:
                early = self._random.randrange(self.short) == 0
                self.injected["short"] += early
            if early:
                return super().preadv(fd, memoryview(buffer)[: len(buffer) // 8192 * 4096], offset)
        return super().preadv(fd, buffer, offset)

    def pwrite(self, fd: int, buffer: Buffer, offset: int) -> None:
        self._call(fd, "pwrite")
        FileIo.pwritev(self, fd, [buffer], offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        try:
            self._call(fd, "pwritev")
        except OSError:
            super().pwritev(fd, buffers[: len(buffers) // 2], offset)  # a part of it got there
            raise
        super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._call(fd, "fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        self._call(fd, "allocate")
        super().allocate(fd, size, offset)
