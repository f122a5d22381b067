"""Read a whole catalogue in a process of its own, before the store trusts it.

A broken LMDB file can kill its reader with a signal, or keep it in a circle. So after an unclean
stop this file is run as a script first; the store opens the catalogue only if that went well. What
the script could read of the namespaces is kept even if it did not.

Reading is not enough: a commit takes pages off the list of free ones, and LMDB ends the process
when a page is there twice, or is in use. So the pages are looked at one by one too, as they lie in
the file: each belongs to one tree, once, or is free. The script imports nothing of this package,
whose import takes longer than a usual walk.
"""

import json
import mmap
import resource
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb

TIMEOUT_MIN_S = 30.0
BYTES_PER_S_MIN = 20_000_000  # A slower walk of a damaged file is taken for a circle.
MAP_BYTES = 1 << 40  # Address space only; a reader's map must not be smaller than the file.
DATABASES = (b"namespaces", b"segments", b"meta", b"rows")

# The file as LMDB 0.9 writes it on a 64-bit machine: lmdb's own mdb.c says what the fields are.
PAGE = 4096
PAGE_HEADER = struct.Struct("<QHHHH")  # number, -, flags, lower, upper
NODE = struct.Struct("<HHHH")  # low and high half of a size or page number, flags, key size
WORD = struct.Struct("<Q")
TREE = struct.Struct("<IHHQQQQQ")  # -, flags, depth, branches, leaves, overflows, entries, root
META = struct.Struct("<IIQQ48s48sQQ")  # magic, version, -, map, free, main, last page, transaction
META_MAGIC = 0xBEEFC0DE
BRANCH, LEAF, OVERFLOW = 1, 2, 4
BIG, SUBTREE = 1, 2
NO_PAGE = (1 << 64) - 1
DEPTH_MAX = 32  # Of LMDB's cursors.


@dataclass(frozen=True)
class Walk:
    """What a walk found. sound: all could be read. namespaces: the rows that could be read."""

    sound: bool
    namespaces: dict[int, bytes]


def walk(directory: Path, file_bytes: int) -> Walk:
    """Walk the catalogue in `directory` in a child process. Never raises; at worst unsound."""
    timeout_s = TIMEOUT_MIN_S + file_bytes / BYTES_PER_S_MIN
    # -P: this file's folder must not be searched for modules; it has an io.py.
    command = [sys.executable, "-P", __file__, str(directory)]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return Walk(False, {})
    return walk_of(child.stdout.splitlines(), sound=child.returncode == 0)


def walk_of(lines: Iterable[bytes], *, sound: bool) -> Walk:
    """What a walk printed, and whether it came to its end."""
    namespaces = {}
    for line in lines:
        try:
            number, value = json.loads(line)
            namespaces[int(number)] = bytes.fromhex(value)
        except (ValueError, TypeError):
            return Walk(False, namespaces)
    return Walk(sound, namespaces)


def walk_all(directory: str) -> None:
    """Read everything in this process, which a broken file may kill; prints the namespaces."""
    env: Any = lmdb.open(
        directory, map_size=MAP_BYTES, max_dbs=8, readonly=True, lock=False, create=False
    )
    with env.begin() as txn:
        tables = {name: env.open_db(name, txn=txn, create=False) for name in DATABASES}
        for key, value in txn.cursor(db=tables[b"namespaces"]):
            print(json.dumps([int.from_bytes(key, "big"), value.hex()]), flush=True)
        for table in tables.values():
            count = sum(1 for _ in txn.cursor(db=table).iternext(keys=True, values=True))
            if count != txn.stat(table)["entries"]:
                raise SystemExit(1)
    check_pages(Path(directory) / "data.mdb")


class Pages:
    """The pages of a file. `check` raises ValueError or struct.error if any is wrong."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        metas = [META.unpack_from(data, at + PAGE_HEADER.size) for at in (0, PAGE)]
        meta = max(metas, key=lambda fields: int(fields[-1]))
        _need(meta[0] == META_MAGIC, "no meta page")
        self._free, self._main, self._last = meta[4], meta[5], meta[6]
        _need((self._last + 1) * PAGE <= len(data), "the file is too short")
        self._taken = bytearray(self._last + 1)
        self._taken[:2] = b"\1\1"

    def check(self) -> None:
        """Each page is in one place, once."""
        for _ in self._tree(self._main):
            pass
        for value in self._tree(self._free):
            (count,) = WORD.unpack_from(value)
            numbers = struct.unpack_from(f"<{count}Q", value, WORD.size)
            _need(all(a > b for a, b in pairwise(numbers)), "a list of free pages has no order")
            for number in numbers:
                self._take(number, 1)
        _need(all(self._taken), "a page is nowhere")

    def _take(self, number: int, count: int) -> int:
        """Note pages as used. Returns: where they start in the file."""
        _need(number >= 2 and number + count - 1 <= self._last, "a page is outside the file")
        _need(not any(self._taken[number : number + count]), "a page is used twice")
        self._taken[number : number + count] = b"\1" * count
        return number * PAGE

    def _tree(self, record: bytes) -> Iterator[bytes]:
        """The values of a tree, and all pages of those below it."""
        _, _, depth, *sums, root = TREE.unpack(record)
        seen = [0, 0, 0, 0]  # branches, leaves, overflows, entries
        if root != NO_PAGE:
            yield from self._below(root, depth, seen)
        _need(seen == sums and depth <= DEPTH_MAX, "a tree is not as large as it says")

    def _below(self, number: int, depth: int, seen: list[int]) -> Iterator[bytes]:
        at = self._take(number, 1)
        own, _, flags, lower, upper = PAGE_HEADER.unpack_from(self._data, at)
        kind = LEAF if depth == 1 else BRANCH
        _need(own == number and flags == kind and depth > 0, "a page is not what it should be")
        _need(PAGE_HEADER.size <= lower <= upper <= PAGE, "a page is torn")
        seen[kind - 1] += 1
        places = struct.unpack_from(f"<{(lower - PAGE_HEADER.size) // 2}H", self._data, at + 16)
        _need(not places or (min(places) >= upper and max(places) <= PAGE - 8), "a node is lost")
        for place in places:
            low, high, flags, key_bytes = NODE.unpack_from(self._data, at + place)
            if kind == BRANCH:
                yield from self._below(low | high << 16 | flags << 32, depth - 1, seen)
                continue
            seen[3] += 1
            start, size = place + NODE.size + key_bytes, low | high << 16
            if flags & BIG:
                yield self._overflow(at + start, size, seen)
                continue
            _need(start + size <= PAGE, "a node is longer than its page")
            value = self._data[at + start : at + start + size]
            if flags & SUBTREE:
                for _ in self._tree(value):
                    pass
            yield value

    def _overflow(self, at: int, size: int, seen: list[int]) -> bytes:
        """The value in pages of its own that a node names."""
        (number,) = WORD.unpack_from(self._data, at)
        start = self._take(number, 1)
        own, _, flags, low, high = PAGE_HEADER.unpack_from(self._data, start)
        count = low | high << 16  # A value that became shorter keeps its pages.
        _need((own, flags) == (number, OVERFLOW), "a long value is lost")
        _need(count * PAGE >= PAGE_HEADER.size + size, "a long value is longer than its pages")
        if count > 1:
            self._take(number + 1, count - 1)
        seen[2] += count
        return self._data[start + PAGE_HEADER.size : start + PAGE_HEADER.size + size]


def check_pages(file: Path) -> None:
    """ValueError or struct.error if a page of an LMDB file is not where it should be."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        Pages(data).check()


def _need(right: bool, text: str) -> None:
    if not right:
        raise ValueError(text)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    walk_all(sys.argv[1])
