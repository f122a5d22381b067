"""Read a whole catalogue in a process of its own, before the store trusts it.

A broken LMDB file can kill its reader with a signal, or keep it in a circle. So after an unclean
stop this file is run as a script first; the store opens the catalogue only if that went well. What
the script could read of the namespaces is kept even if it did not.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

TIMEOUT_MIN_S = 30.0
BYTES_PER_S_MIN = 20_000_000  # A slower walk of a damaged file is taken for a circle.
MAP_BYTES = 1 << 40  # Address space only; a reader's map must not be smaller than the file.
DATABASES = (b"namespaces", b"segments", b"meta", b"rows")


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
    # A compacting copy also reads the list of free pages and refuses a file that leaks or shares
    # pages; a commit to such a file could overwrite rows. The copy goes nowhere: see stderr= above.
    env.copyfd(sys.stderr.fileno(), compact=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    walk_all(sys.argv[1])
