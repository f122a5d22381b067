"""The preloaded library of shim.c, from Python: built once, then a plan of faults or a log.

    control = Control.make(path)                        # in the test
    env = environment(control=path)                     # of the child
    control.fail(Kind.SYNC, errno.EIO)                  # every sync of the catalogue, until
    control.clear(Kind.SYNC)
    control.fail(Kind.PAGES, errno.ENOSPC, at=3, count=1)

Test and child may both map one control file. What the kinds and the log's entries are is told at
the head of shim.c.
"""

import ctypes
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
TESTS = Path(__file__).resolve().parents[1]
BUILT = TESTS.parent / "build" / "shim"
CONTROL_BYTES = 4096
WORD = struct.Struct("<Q")
ENTRY = struct.Struct("<QIIQQ")
ALWAYS = (1 << 64) - 1


class Kind(IntEnum):
    """The calls on data.mdb that can be made to fail."""

    PAGES = 0
    META = 1
    SYNC = 2
    TRUNCATE = 3


class Event(IntEnum):
    """What an entry of the log says. The first five are the shim's, the others Python's."""

    WRITE = 1
    DURABLE_WRITE = 2
    SYNC = 3
    TRUNCATE = 4
    MADE = 5
    ALLOCATE = 6  # offset: the end of what was allocated
    MADE_DIRECTORY = 7
    REMOVED = 8
    RENAMED = 9  # data: the new name
    SYNC_DIRECTORY = 10
    REMOVED_DIRECTORY = 11
    MARK = 12  # name: what the workload says has happened


@dataclass(frozen=True)
class Entry:
    """One entry of a log."""

    sequence: int
    event: Event
    name: str
    offset: int
    data: memoryview


def library() -> Path:
    """The compiled shim; compiles it where that was not done yet for this source."""
    target = BUILT / f"shim-{sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(part), str(SOURCE), "-lpthread"]
        subprocess.run(command, check=True, timeout=120)
        part.rename(target)
    return target


def environment(*, control: Path | None = None, log: Path | None = None) -> dict[str, str]:
    """The variables of a child that has the shim preloaded, and finds `support`."""
    made = {**os.environ, "LD_PRELOAD": str(library())}
    if control is not None:
        made["KVSTORE_SHIM_CONTROL"] = str(control)
    if log is not None:
        made["KVSTORE_SHIM_LOG"] = str(log)
    return made


class Control:
    """A plan of faults, in a file that test and child both map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), CONTROL_BYTES)

    @classmethod
    def make(cls, path: Path) -> "Control":
        """A new control file without any fault in its plan."""
        path.write_bytes(bytes(CONTROL_BYTES))
        return cls(path)

    def fail(
        self, kind: Kind, error: int, *, at: int = 0, count: int = ALWAYS, short_bytes: int = 0
    ) -> None:
        """Fail `count` calls of a kind with this errno, from the `at`-th from now on (1: the next).

        at=0 is the next one too. short_bytes: such writes succeed instead, and move so many bytes.
        """
        self.clear(kind)
        self._put(kind, 1, self.calls(kind) + max(at, 1))
        self._put(kind, 3, error)
        self._put(kind, 4, short_bytes)
        self._put(kind, 2, count)

    def clear(self, kind: Kind) -> None:
        """Fail no more calls of a kind."""
        self._put(kind, 2, 0)

    def calls(self, kind: Kind) -> int:
        """How many calls of a kind were made."""
        return self._get(kind, 0)

    def failed(self, kind: Kind) -> int:
        """How many of them failed or moved less."""
        return self._get(kind, 5)

    def _get(self, kind: Kind, word: int) -> int:
        return int(WORD.unpack_from(self._map, 64 * kind + 8 * word)[0])

    def _put(self, kind: Kind, word: int, value: int) -> None:
        WORD.pack_into(self._map, 64 * kind + 8 * word, value)


class Log:
    """In a child that has the shim: adds entries to its log."""

    def __init__(self) -> None:
        self._log = ctypes.CDLL(None).kvstore_shim_log
        self._log.argtypes = (
            *(ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64),
        )
        self._log.restype = None

    def add(self, event: Event, name: str, offset: int = 0, data: bytes = b"") -> None:
        """Add one entry."""
        self._log(int(event), name.encode(), offset, data, len(data))


def entries(path: Path) -> Iterator[Entry]:
    """The entries of a log, in their order; a torn last one is left out."""
    view = memoryview(path.read_bytes())
    at = 0
    while at + ENTRY.size <= len(view):
        sequence, kind, name_bytes, offset, size = ENTRY.unpack_from(view, at)
        name_at = at + ENTRY.size
        at = name_at + name_bytes + size
        if at > len(view):
            return
        name = bytes(view[name_at : name_at + name_bytes]).decode()
        yield Entry(sequence, Event(kind), name, offset, view[name_at + name_bytes : at])


def run_python(code: str, *arguments: str, env: dict[str, str]) -> str:
    """Run a program in a child in whose path `support` is. Returns: what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(
        command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
