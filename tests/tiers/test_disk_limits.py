"""Never a byte above the capacity; and what is refused at start is left as it was."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.disk_outcomes import Written
from kvstore.tiers.errors import ConfigError, KvstoreError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.segment import FIELDS, VOLUME_FILE
from support.disk_blocks import (
    LONGER,
    MIB,
    SEGMENT,
    SMALL,
    FaultyIo,
    fill,
    found_blocks,
    open_rig,
)

SLOT = RecordFormat.of(SMALL).slot_bytes


def du(path: Path) -> int:
    """Bytes a tree takes, as du counts them."""
    total = 0
    for place in [path, *path.rglob("*")]:
        try:
            total += place.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@pytest.mark.parametrize(("paths", "capacity"), [(1, 2 * MIB), (1, 4 * MIB + 12_345), (3, 3 * MIB)])
def test_du_is_never_above_the_capacity(tmp_path: Path, paths: int, capacity: int) -> None:
    places = [tmp_path / f"d{n}" for n in range(paths)]
    most = 0

    class Watching(FaultyIo):
        def _call(self, name: str) -> None:
            nonlocal most
            if name == "allocate" or len(self.calls) % 16 == 0:
                most = max(most, sum(map(du, places)))
            self.calls.append(name)

    capacity *= paths
    settings = {"capacity_bytes": capacity, "other_bytes": 5000}
    rig = open_rig(places, Watching(), **settings)
    rng = random.Random(1)
    stored = fill(rig)
    fill(rig, LONGER, 5000)
    for number in range(10_000, 10_160, 16):
        victims = rng.sample(sorted(stored), 16)
        rig.tier.remove(np.array([stored.pop(n) for n in victims], np.int64))
        assert rig.tier.flush_removals() is None
        slots, outcome = rig.write(range(number, number + 16))
        assert isinstance(outcome, Written)
        stored.update(zip(range(number, number + 16), slots.tolist(), strict=True))
        assert rig.tier.used_bytes <= rig.tier.allocated_bytes == sum(map(du, places))
    rig.tier.close()
    assert max(most, sum(map(du, places))) + 5000 <= capacity
    assert most > capacity * 0.6
    rig = open_rig(places, **settings)
    assert set(stored.items()) <= set(found_blocks(rig).items())
    rig.tier.close()


def untouched(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else b""
        for p in sorted(root.rglob("*"))
    }


def refused(root: Path, fault: type[KvstoreError], words: str, paths: Any, **settings: Any) -> None:
    before = untouched(root)
    with pytest.raises(fault, match=words) as error:
        open_rig(paths, **settings)
    assert "\n" not in str(error.value)
    assert untouched(root) == before


def test_what_cannot_be_a_disk_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    (tmp_path / "file").write_text("x")
    new = tmp_path / "new"
    refused(tmp_path, StoreError, "is not ours", tmp_path / "notes")
    refused(tmp_path, StoreError, "is a link", tmp_path / "link")
    refused(tmp_path, ConfigError, "choose another", tmp_path / "file")
    refused(tmp_path, ConfigError, "does not exist", tmp_path / "no" / "where")
    refused(tmp_path, StoreError, "is not ours", [new, tmp_path / "notes"])
    refused(tmp_path, ConfigError, "are free", new, capacity_bytes=1 << 50, segment_bytes=1 << 40)
    refused(tmp_path, ConfigError, "at least", new, capacity_bytes=SEGMENT)
    refused(tmp_path, ConfigError, "use larger segments", new, capacity_bytes=4 << 30)
    refused(tmp_path, ConfigError, "multiple", new, segment_bytes=100_000)
    refused(tmp_path, ConfigError, "store id", new, store_id=b"x")


def test_another_stores_volume_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    rig = open_rig(paths)
    rig.write(range(4))
    refused(tmp_path, StoreBusyError, "in use", paths)
    rig.tier.close()
    refused(tmp_path, StoreError, "another store", paths, store_id=bytes(16))
    refused(tmp_path, StoreError, "same order", paths[::-1])
    refused(tmp_path, StoreError, "same paths", paths[:1])
    refused(tmp_path, StoreError, "segment size", paths, segment_bytes=SEGMENT * 2)


def test_a_smaller_capacity_than_what_is_stored_is_refused(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    stored = fill(rig)
    rig.tier.close()
    with pytest.raises(ConfigError, match="raise disk_capacity"):
        open_rig(tmp_path / "d", capacity_bytes=2 * MIB)
    rig = open_rig(tmp_path / "d", capacity_bytes=5 * MIB)
    assert found_blocks(rig) == stored
    assert len(rig.reserve(4)) == 4
    rig.tier.close()


@pytest.mark.parametrize("version", [0, 2, 999])
def test_another_format_is_refused(tmp_path: Path, version: int) -> None:
    open_rig(tmp_path / "d").tier.close()
    header = tmp_path / "d" / VOLUME_FILE
    page = bytearray(header.read_bytes())
    page[8:12] = version.to_bytes(4, "little")
    assert FIELDS.unpack_from(page)[1] == version
    header.write_bytes(page)
    refused(tmp_path, StoreError, "another version", tmp_path / "d")


@pytest.mark.parametrize("page", [b"", bytes(4096), b"KVVOLUM1" + b"\1\0\0\0" + b"x" * 4084])
def test_a_torn_volume_header_is_written_again(tmp_path: Path, page: bytes) -> None:
    rig = open_rig(tmp_path / "d")
    stored = fill(rig)
    rig.tier.close()
    (tmp_path / "d" / VOLUME_FILE).write_bytes(page)
    rig = open_rig(tmp_path / "d")
    assert found_blocks(rig) == stored
    rig.tier.close()
    refused(tmp_path, StoreError, "another store", tmp_path / "d", store_id=bytes(16))


def test_without_o_direct_it_says_so_once_and_works(tmp_path: Path) -> None:
    class NoDirect(FileIo):
        def supports_direct(self, directory: int | str | Path) -> bool:
            return False

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rig = open_rig(tmp_path / "d", NoDirect())
    assert len([w for w in said if "O_DIRECT" in str(w.message)]) == 1
    assert not rig.tier.direct
    slots, _ = rig.write(range(4))
    assert all(rig.good(slot, n) for n, slot in enumerate(slots.tolist()))
    rig.tier.close()
