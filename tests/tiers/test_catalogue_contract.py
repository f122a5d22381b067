"""What a volume relies on in its catalogue: the same for the real one and for the tests' model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore.tiers.catalogue import (
    BASE_BYTES,
    DATA_FILE,
    ROWS_PER_TXN,
    Change,
    CommitFault,
    map_bytes,
)
from kvstore.tiers.catalogue_row import (
    KEY,
    Rows,
    keys_of,
    row_dtype,
    slots_of_rows,
    sound,
    worst_row_bytes,
)
from kvstore.tiers.catalogue_tables import NUMBER, Identity, Namespace, SegmentState
from kvstore.tiers.catalogues import Catalogues, LmdbCatalogues, OwnedCatalogue
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo
from support.model_catalogue import ModelCatalogues

IDENTITY = Identity(bytes(range(16)), 0, 1, 1 << 20)
PER = 128
SIZE = 4 << 20


class NoOpenIo(FileIo):
    """Refuses to open files, when told to."""

    def __init__(self) -> None:
        self.failing = False

    def open(self, path: str | Path, **options: Any) -> int:
        if self.failing:
            raise OSError(5, "Input/output error")
        return super().open(path, **options)


@dataclass
class Kind:
    """One implementation in a directory. damage: flips a bit of a value of a table, by its key."""

    directory: Path
    catalogues: Catalogues
    damage: Callable[[str, bytes, int], None]
    io: NoOpenIo = field(default_factory=NoOpenIo)

    def own(self, size: int = SIZE, identity: Identity = IDENTITY) -> OwnedCatalogue:
        catalogue = self.catalogues.own(self.directory, self.io, identity=identity, size_bytes=size)
        assert catalogue.grow(size) is None
        return catalogue

    def walked(self) -> Any:
        return self.catalogues.walk(self.directory, (self.directory / DATA_FILE).stat().st_size)


@pytest.fixture(params=["lmdb", "model"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "model":
        catalogues = ModelCatalogues()

        def flip_model(table: str, key: bytes, bit: int) -> None:
            state = next(reversed(catalogues.states.values()))
            where: dict[Any, bytes] = state.rows if table == "rows" else state.namespaces  # type: ignore[assignment]
            place: Any = key if table == "rows" else NUMBER.unpack(key)[0]
            where[place] = _flipped(where[place], bit)

        return Kind(tmp_path, catalogues, flip_model)

    def flip_lmdb(table: str, key: bytes, bit: int) -> None:
        env: Any = lmdb.open(str(tmp_path), max_dbs=8, map_size=SIZE)
        opened = env.open_db(table.encode())
        with env.begin(write=True) as txn:
            txn.put(key, _flipped(txn.get(key, db=opened), bit), db=opened)
        env.close()

    return Kind(tmp_path, LmdbCatalogues(), flip_lmdb)


def _flipped(value: bytes, bit: int) -> bytes:
    changed = bytearray(value)
    changed[bit // 8 % len(value)] ^= 1 << bit % 8
    return bytes(changed)


def rows_at(slots: list[int], tokens: int = 16, seed: int = 0) -> Rows:
    rng = np.random.default_rng([seed, *slots[:1]])
    rows = np.zeros(len(slots), row_dtype(tokens))
    rows["key"] = np.frombuffer(rng.bytes(16 * len(slots)), "V16")
    rows["tokens"] = rng.integers(0, 1 << 30, (len(slots), tokens))
    rows["segment"], rows["index"] = np.divmod(slots, PER)
    rows["slot_pages"] = 2
    return rows


def loaded(catalogue: OwnedCatalogue) -> dict[int, bytes]:
    """The rows of a sound catalogue by their slots."""
    rows, damaged = catalogue.load()
    assert damaged == 0
    assert all(sound(part).all() for part in rows.values())
    for tokens, part in rows.items():
        assert part.dtype == row_dtype(tokens)
        assert slots_of_rows(part, PER).tolist() == sorted(slots_of_rows(part, PER).tolist())
    return {
        int(slot): row.tobytes()
        for part in rows.values()
        for slot, row in zip(slots_of_rows(part, PER), part, strict=True)
    }


def test_what_was_committed_is_there_after_reopening_and_nothing_else(kind: Kind) -> None:
    catalogue = kind.own()
    assert loaded(catalogue) == {} and catalogue.segments() == catalogue.namespaces() == {}
    small, large = rows_at([3, 200, 1]), rows_at([900], tokens=600)
    assert catalogue.commit(Change(rows=[small, large])) is None
    assert catalogue.commit(Change()) is None
    wanted = {
        int(slot): row.tobytes()
        for part in (small, large)
        for slot, row in zip(slots_of_rows(part, PER), part, strict=True)
    }
    assert loaded(catalogue) == wanted
    catalogue.close()
    assert catalogue.closed
    assert loaded(kind.own()) == wanted


def test_a_slot_is_removed_and_written_in_one_change(kind: Kind) -> None:
    catalogue = kind.own()
    old, new = rows_at([5, 6, 7]), rows_at([5, 6], seed=1)
    assert catalogue.commit(Change(rows=[old])) is None
    assert catalogue.commit(Change(rows=[new], removed=keys_of(old))) is None
    assert loaded(catalogue) == {5: new[0].tobytes(), 6: new[1].tobytes()}
    assert catalogue.commit(Change(removed=[KEY.pack(9, 9)])) is None, "no such row: nothing to do"


def test_a_large_change_is_made_in_parts_removals_first(kind: Kind) -> None:
    catalogue = kind.own(8 << 20)
    many = rows_at(list(range(2 * ROWS_PER_TXN + 1)))
    assert catalogue.commit(Change(rows=[many])) is None
    again = rows_at(list(range(2 * ROWS_PER_TXN + 1)), seed=1)
    assert catalogue.commit(Change(rows=[again], removed=keys_of(many))) is None
    assert loaded(catalogue) == {n: row.tobytes() for n, row in enumerate(again)}


def test_segments_and_namespaces_are_replaced_by_their_number(kind: Kind) -> None:
    catalogue = kind.own()
    first = Namespace(bytes(32), b"", "")
    full = Namespace(bytes(32), b"[layout]", "a model")
    segments = {4: (8192, SegmentState.USABLE), 7: (1 << 20, SegmentState.QUARANTINED)}
    assert catalogue.commit(Change(segments=segments, namespaces={1: first, 9: first})) is None
    again = {4: (8192, SegmentState.QUARANTINED)}
    assert catalogue.commit(Change(segments=again, namespaces={1: full})) is None
    catalogue.close()
    catalogue = kind.own()
    assert catalogue.segments() == {**segments, **again}
    assert catalogue.namespaces() == {1: full, 9: first}


def test_damaged_rows_are_counted_and_removed(kind: Kind) -> None:
    catalogue = kind.own()
    rows = rows_at(list(range(40)))
    assert catalogue.commit(Change(rows=[rows])) is None
    catalogue.close()
    for slot in range(0, 40, 4):
        kind.damage("rows", KEY.pack(*divmod(slot, PER)), 37 * slot)
    catalogue = kind.own()
    found, damaged = catalogue.load()
    assert damaged == 10
    assert slots_of_rows(found[16], PER).tolist() == [n for n in range(40) if n % 4]
    assert sorted(loaded(catalogue)) == [n for n in range(40) if n % 4]


def test_a_damaged_namespace_is_left_out(kind: Kind) -> None:
    catalogue = kind.own()
    spaces = {n: Namespace(bytes([n]) * 32, b"x", "m") for n in (1, 2)}
    assert catalogue.commit(Change(namespaces=spaces)) is None
    catalogue.close()
    kind.damage("namespaces", NUMBER.pack(1), 100)
    catalogue = kind.own()
    assert catalogue.namespaces() == {2: spaces[2]}


@pytest.mark.parametrize(
    "other",
    [Identity(bytes(16), 0, 1, 1 << 20), Identity(bytes(range(16)), 1, 2, 1 << 20)],
    ids=["store", "volume"],
)
def test_another_owners_catalogue_is_refused(kind: Kind, other: Identity) -> None:
    kind.own().close()
    with pytest.raises(StoreError, match="another store"):
        kind.own(identity=other)


def test_a_full_map_refuses_whole_commits_and_removals_or_growth_make_room(kind: Kind) -> None:
    size = map_bytes(200 * worst_row_bytes(16), 0)
    catalogue = kind.own(size)
    kept: list[int] = []
    fault = None
    for first in range(0, 1 << 16, 64):
        slots = list(range(first, first + 64))
        fault = catalogue.commit(Change(rows=[rows_at(slots)]))
        if fault is not None:
            break
        kept += slots
    assert fault is CommitFault.MAP_FULL
    assert len(kept) >= 200, "the map holds the rows that it was made for"
    assert sorted(loaded(catalogue)) == kept
    for first in range(0, 256, 64):
        gone = rows_at(list(range(first, first + 64)))
        assert catalogue.commit(Change(removed=keys_of(gone))) is None
    assert catalogue.commit(Change(rows=[rows_at([1 << 18])])) is None
    assert sorted(loaded(catalogue)) == [*kept[256:], 1 << 18]
    assert catalogue.grow(4 * size) is None
    more = rows_at(list(range(1 << 19, (1 << 19) + 500)))
    assert catalogue.commit(Change(rows=[more])) is None


def test_shrinking_gives_room_back_and_keeps_what_is_there(kind: Kind) -> None:
    catalogue = kind.own(4 << 20)
    file = kind.directory / DATA_FILE
    rows = rows_at(list(range(200)))
    assert catalogue.commit(Change(rows=[rows])) is None
    kind.io.failing = True
    assert catalogue.shrink(2 << 20) == 4 << 20 == file.stat().st_size
    kind.io.failing = False
    assert catalogue.shrink(2 << 20) == 2 << 20 == file.stat().st_size
    least = catalogue.shrink(0)
    assert catalogue.used_bytes() <= least == file.stat().st_size < 1 << 20
    assert sorted(loaded(catalogue)) == list(range(200))
    assert catalogue.shrink(1 << 20) == least, "it never grows"
    assert catalogue.grow(1 << 20) is None
    assert catalogue.commit(Change(rows=[rows_at([900])])) is None
    assert catalogue.written_bytes > 0


def test_growing_takes_the_room_at_once_and_does_not_shrink(kind: Kind) -> None:
    catalogue = kind.own(BASE_BYTES)
    file = kind.directory / DATA_FILE
    assert catalogue.grow(1 << 20) is None
    assert file.stat().st_size == 1 << 20 and file.stat().st_blocks * 512 >= 1 << 20
    assert catalogue.grow(1 << 16) is None
    assert file.stat().st_size == 1 << 20
    catalogue.commit(Change(rows=[rows_at(list(range(100)))]))
    assert 0 < catalogue.used_bytes() <= 1 << 20
    kind.io.failing = True
    assert catalogue.grow(2 << 20) is CommitFault.DEVICE
    kind.io.failing = False
    assert catalogue.grow(2 << 20) is None
    assert len(loaded(catalogue)) == 100


def test_a_closed_catalogue_takes_no_commit_and_keeps_what_it_has(kind: Kind) -> None:
    catalogue = kind.own()
    catalogue.commit(Change(rows=[rows_at([1])]))
    catalogue.close()
    catalogue.close()
    assert catalogue.commit(Change(rows=[rows_at([2])])) is CommitFault.DEVICE
    assert list(loaded(kind.own())) == [1]


def test_a_walk_of_a_sound_catalogue_says_so(kind: Kind) -> None:
    catalogue = kind.own()
    space = Namespace(bytes(32), b"x", "m")
    catalogue.commit(Change(rows=[rows_at([1])], namespaces={3: space}))
    walked = kind.walked()
    assert walked.sound and walked.namespaces == {3: space.pack()}


def test_a_new_file_is_a_new_catalogue(kind: Kind) -> None:
    catalogue = kind.own()
    catalogue.commit(Change(rows=[rows_at([1])]))
    catalogue.close()
    for file in kind.directory.iterdir():
        file.unlink()
    assert loaded(kind.own()) == {}
