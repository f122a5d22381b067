"""The catalogue: rows come back or are known to be damaged, and its file never outgrows its map."""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore.native import build
from kvstore.tiers.catalogue import (
    DATA_FILE,
    Catalogue,
    Change,
    CommitFault,
    map_bytes,
)
from kvstore.tiers.catalogue_row import (
    HEAD_BYTES,
    KEY,
    Rows,
    keys_of,
    row_dtype,
    rows_of,
    slots_of_rows,
    worst_row_bytes,
)
from kvstore.tiers.catalogue_tables import IDENTITY, Identity, Namespace, SegmentState
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import RecordFormat
from support.disk_blocks import SMALL, block

IDENT = Identity(bytes(16), 0, 1, 1 << 20)
PER = 128


def opened(path: Path, size: int = 4 << 20, **settings: Any) -> Catalogue:
    path.mkdir(exist_ok=True)
    catalogue = Catalogue(path, FileIo(), **{"identity": IDENT, "size_bytes": size, **settings})
    if not settings.get("readonly"):
        assert catalogue.grow(size) is None
    return catalogue


def rows_at(slots: list[int], tokens: int = 16, seed: int = 0) -> Rows:
    rng = np.random.default_rng([seed, *slots[:1]])
    rows = np.zeros(len(slots), row_dtype(tokens))
    rows["key"] = np.frombuffer(rng.bytes(16 * len(slots)), "V16")
    rows["generation"] = rng.integers(0, 1 << 40, len(slots))
    rows["tokens"] = rng.integers(0, 1 << 30, (len(slots), tokens))
    rows["segment"], rows["index"] = np.divmod(slots, PER)
    rows["slot_pages"] = 2
    return rows


def by_slot(rows: dict[int, Rows]) -> dict[int, bytes]:
    return {
        int(slot): row.tobytes()
        for part in rows.values()
        for slot, row in zip(slots_of_rows(part, PER), part, strict=True)
    }


def tampered(path: Path, name: bytes) -> Any:
    env: Any = lmdb.open(str(path), max_dbs=8, map_size=4 << 20)
    return env, env.open_db(name)


def test_rows_say_what_their_headers_say() -> None:
    record, one = RecordFormat.of(SMALL), block(7)
    row = rows_of(record, one.header[None], np.array([300], np.int64), 5, PER)[0]
    assert bytes(row["key"]) == (7).to_bytes(16, "little")
    assert bytes(row["parent"]) == (6).to_bytes(16, "little")
    assert (row["segment"], row["index"], row["slot_pages"]) == (2, 44, record.slot_bytes // 4096)
    assert (row["namespace"], row["depth"], row["generation"]) == (5, 7, 7)
    assert row["tokens"].tolist() == record.tokens(one.header[None])[0].tolist()


def test_rows_of_several_block_sizes_come_back(tmp_path: Path) -> None:
    groups = {1: [0, 1, 2], 16: list(range(130, 700)), 40: [900], 600: [1000, 1001]}
    catalogue = opened(tmp_path / "c")
    rows = {tokens: rows_at(slots, tokens) for tokens, slots in groups.items()}
    assert catalogue.commit(Change(rows=list(rows.values()))) is None
    catalogue.close()
    catalogue = opened(tmp_path / "c")
    found, damaged = catalogue.load()
    assert damaged == 0
    assert by_slot(found) == by_slot(rows)  # the commit sealed them in place
    assert {tokens: slots_of_rows(part, PER).tolist() for tokens, part in found.items()} == groups
    catalogue.close()


def test_both_forms_of_the_checksum_read_the_same_rows(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "c")
    catalogue.commit(Change(rows=[rows_at([1, 2, 3])]))
    with build.forced_fallback():
        assert len(catalogue.load()[0][16]) == 3
        catalogue.commit(Change(rows=[rows_at([4])]))
    assert len(catalogue.load()[0][16]) == 4
    catalogue.close()


def test_a_slot_may_be_removed_and_written_in_one_commit(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "c")
    old, new = rows_at([5, 6]), rows_at([5], seed=1)
    catalogue.commit(Change(rows=[old]))
    catalogue.commit(Change(rows=[new], removed=keys_of(old)))
    assert by_slot(catalogue.load()[0]) == {5: new[0].tobytes()}
    one = catalogue.row(0, 5)
    assert one is not None and one[0].tobytes() == new[0].tobytes()
    assert catalogue.row(0, 6) is None
    catalogue.close()


def test_every_flipped_bit_of_a_row_is_found_and_the_row_removed(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "c")
    rows = rows_at(list(range(HEAD_BYTES + 64)))
    catalogue.commit(Change(rows=[rows]))
    catalogue.close()
    env, table = tampered(tmp_path / "c", b"rows")
    with env.begin(write=True) as txn:
        for slot in range(0, len(rows), 2):
            value = bytearray(txn.get(KEY.pack(*divmod(slot, PER)), db=table))
            value[slot] ^= 1 << slot % 8
            txn.put(KEY.pack(*divmod(slot, PER)), bytes(value), db=table)
        txn.put(KEY.pack(3, 3), b"short", db=table)
    env.close()
    catalogue = opened(tmp_path / "c")
    found, damaged = catalogue.load()
    assert damaged == len(rows) // 2 + 1
    assert sorted(by_slot(found)) == list(range(1, len(rows), 2))
    assert catalogue.load() is not None and catalogue.load()[1] == 0
    catalogue.close()


def test_a_full_map_is_an_outcome_and_removals_make_room(tmp_path: Path) -> None:
    size = map_bytes(200 * worst_row_bytes(16), 0)
    catalogue = opened(tmp_path / "c", size)
    kept: list[int] = []
    for first in range(0, 1 << 20, 64):
        slots = list(range(first, first + 64))
        fault = catalogue.commit(Change(rows=[rows_at(slots)]))
        if fault is not None:
            break
        kept += slots
    assert fault is CommitFault.MAP_FULL
    assert sorted(by_slot(catalogue.load()[0])) == kept
    for first in range(0, 256, 64):
        gone = rows_at(list(range(first, first + 64)))
        assert catalogue.commit(Change(removed=keys_of(gone))) is None
    assert catalogue.commit(Change(rows=[rows_at([1 << 21])])) is None
    assert (tmp_path / "c" / DATA_FILE).stat().st_size <= size
    catalogue.close()


@pytest.mark.parametrize("tokens", [1, 16, 100, 250, 480, 700, 4096])
def test_the_worst_case_of_a_row_holds(tmp_path: Path, tokens: int) -> None:
    """Slots come and go in the orders that leave pages emptiest; the map never fills."""
    slots = 600
    size = map_bytes(slots * worst_row_bytes(tokens), 0)
    catalogue = opened(tmp_path / "c", size)
    rng = np.random.default_rng(tokens)
    full = rows_at(list(range(slots)), tokens)

    def put(chosen: Any) -> None:
        for first in range(0, len(chosen), 64):
            rows = full[chosen[first : first + 64]]
            assert catalogue.commit(Change(rows=[rows])) is None

    def drop(chosen: Any) -> None:
        for first in range(0, len(chosen), 64):
            keys = keys_of(full[chosen[first : first + 64]])
            assert catalogue.commit(Change(removed=keys)) is None

    everything = np.arange(slots)
    put(rng.permutation(slots))
    for step in (2, 3, 5, 9):
        thinned = everything[everything % step != 0]
        drop(thinned)
        put(rng.permutation(thinned))
        drop(everything[everything % step == 0])
        put(everything[everything % step == 0][::-1])
    for _ in range(15):
        chosen = rng.permutation(slots)[:200]
        drop(chosen)
        put(rng.permutation(chosen))
    assert len(catalogue.load()[0][tokens]) == slots
    assert catalogue.used_bytes() <= size
    assert (tmp_path / "c" / DATA_FILE).stat().st_size == size
    catalogue.close()


def test_segments_and_namespaces_come_back(tmp_path: Path) -> None:
    spaces = {1: Namespace(bytes(32), b"", ""), 9: Namespace(b"\1" * 32, b"[layout]", "a model é")}
    segments = {
        0: (8192, SegmentState.USABLE),
        7: (1 << 20, SegmentState.QUARANTINED),
    }
    catalogue = opened(tmp_path / "c")
    catalogue.commit(Change(segments=segments, namespaces=spaces))
    catalogue.close()
    env, table = tampered(tmp_path / "c", b"namespaces")
    with env.begin(write=True) as txn:
        txn.put(struct.pack(">I", 3), b"x" * 60, db=table)
    env.close()
    catalogue = opened(tmp_path / "c")
    assert catalogue.segments() == segments
    assert catalogue.namespaces() == spaces
    assert catalogue.identity() == IDENT
    catalogue.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (IDENTITY.pack(2, bytes(16), 0, 1, 1 << 20), "newer kvstore"),
        (IDENTITY.pack(0, bytes(16), 0, 1, 1 << 20), "older kvstore"),
        (IDENTITY.pack(1, b"\1" * 16, 0, 1, 1 << 20), "another store"),
        (b"", "damaged"),
    ],
)
def test_a_catalogue_that_is_not_ours_is_refused(tmp_path: Path, value: bytes, words: str) -> None:
    opened(tmp_path / "c").close()
    env, table = tampered(tmp_path / "c", b"meta")
    with env.begin(write=True) as txn:
        txn.put(b"identity", value, db=table)
    env.close()
    with pytest.raises(StoreError, match=words):
        opened(tmp_path / "c")


READER = """
import sys
from pathlib import Path
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.io import FileIo
catalogue = Catalogue(Path(sys.argv[1]), FileIo(), readonly=True)
for line in sys.stdin:
    rows = sum(len(part) for batch, bad in catalogue.batches() for part in batch.values())
    print(rows, catalogue.count(), catalogue.row(0, 1) is not None, flush=True)
"""


def test_a_reader_beside_the_owner_sees_each_commit(tmp_path: Path) -> None:
    catalogue = opened(tmp_path / "c", 1 << 20)
    catalogue.commit(Change(rows=[rows_at([1])]))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "c")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None and reader.stdout is not None

    def ask() -> str:
        assert reader.stdin is not None and reader.stdout is not None
        print("look", file=reader.stdin, flush=True)
        return reader.stdout.readline().strip()

    try:
        assert ask() == "1 1 True"
        assert catalogue.grow(8 << 20) is None  # the owner's map grows under the reader
        many = rows_at(list(range(2, 9002)))
        assert catalogue.commit(Change(rows=[many], removed=[KEY.pack(0, 1)])) is None
        assert ask() == "9000 9000 False"
    finally:
        reader.stdin.close()
        assert reader.wait(20) == 0
    catalogue.close()
