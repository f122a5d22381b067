"""The pages of a catalogue, looked at before LMDB may commit to them."""

import random
import struct
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.tiers.walk import PAGE, check_pages, walk

TABLES = (b"meta", b"rows", b"segments", b"namespaces")
SIZES = (20, 136, 136, 136, 1500, 2500, 9000, 40_000)


def grow(directory: Path, seed: int, commits: int) -> Path:
    """A catalogue's file after many commits of values of all sizes, and their removals."""
    rng = random.Random(seed)
    environment: Any = lmdb.open(str(directory), map_size=64 << 20, max_dbs=8)
    tables = [environment.open_db(name) for name in TABLES]
    file = directory / "data.mdb"
    for number in range(commits):
        with environment.begin(write=True) as txn:
            for _ in range(rng.choice([1, 5, 64, 300])):
                table = rng.choice([1, 1, 1, 0, 2, 3])
                key = rng.randrange(1000).to_bytes(8 if table == 1 else 4, "big")
                if rng.random() < 0.45:
                    txn.delete(key, db=tables[table])
                else:
                    txn.put(key, bytes(rng.choice(SIZES)), db=tables[table])
        if number % 8 == 0:
            check_pages(file)
    environment.close()
    return file


@pytest.mark.parametrize("seed", range(3))
def test_what_lmdb_wrote_is_sound(tmp_path: Path, seed: int) -> None:
    check_pages(grow(tmp_path, seed, 60))
    assert walk(tmp_path, 1 << 20).sound


def free_lists(data: bytes) -> list[int]:
    """Where in the file lists of free pages lie that have several, in the current tree."""
    meta = max((0, PAGE), key=lambda at: struct.unpack_from("<Q", data, at + 16 + 128)[0])
    root = struct.unpack_from("<Q", data, meta + 16 + 24 + 40)[0]
    _, _, flags, lower, _ = struct.unpack_from("<QHHHH", data, root * PAGE)
    assert flags == 2, "the tree of free pages has one leaf"
    found = []
    for place in struct.unpack_from(f"<{(lower - 16) // 2}H", data, root * PAGE + 16):
        size, _, node_flags, key_bytes = struct.unpack_from("<HHHH", data, root * PAGE + place)
        if not node_flags and size > 16:
            found.append(root * PAGE + place + 8 + key_bytes)
    return found


def test_a_bent_list_of_free_pages_is_found(tmp_path: Path) -> None:
    """A commit that takes such a page ends the process, or overwrites rows."""
    file = grow(tmp_path, seed=1, commits=20)
    whole = file.read_bytes()
    lists = free_lists(whole)
    assert lists
    for at in lists[:2]:
        (first, second) = struct.unpack_from("<QQ", whole, at + 8)
        for value in (second, first + 1, 0, 1, 2, 1 << 40, (1 << 64) - 1):
            file.write_bytes(whole[: at + 8] + struct.pack("<Q", value) + whole[at + 16 :])
            with pytest.raises((ValueError, struct.error)):
                check_pages(file)
    assert not walk(tmp_path, len(whole)).sound
    file.write_bytes(whole)
    check_pages(file)
