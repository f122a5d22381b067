"""Row 9: a store that this version wrote is read by every later one; another format is refused.

golden_store_v1.tar.gz is a whole store, and beside it the arena of an owner that was killed. A
change that cannot read it changes a format, and needs a new version and a golden file of its own.
`python tests/kvstore/test_09_formats.py` made it; do not make it again for the same version.
"""

import os
import shutil
import struct
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

from kvstore.store import open as open_store
from kvstore.tiers.errors import KvstoreError
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import HEADER, RecordFormat

GOLDEN = Path(__file__).with_name("golden_store_v1.tar.gz")
LAYOUT = Layout(4, (CacheGroup("full", 2, (40, 24), "uint8"),))
RECORD = RecordFormat.of(LAYOUT)
ON_DISK = np.arange(6 * 4 + 1, dtype=np.int32)  # in host memory too
IN_ARENA = np.arange(100, 100 + 6 * 4 + 1, dtype=np.int32)  # there alone
PAGE = 4096


def pages() -> list[np.ndarray]:
    """What was saved: six blocks, each byte of them known."""
    return [
        (np.arange(6 * size, dtype=np.uint16) * 7 % 251).astype(np.uint8).reshape(6, size)
        for size in LAYOUT.run_lengths.tolist()
    ]


def settings(at: Path) -> dict[str, Any]:
    shared = {"persist": True, "arena_directory": at, "dirty_age_s": 3600.0}
    return {"disk": [at / "store"], "host": "4MiB", "disk_capacity": "4MiB", **shared}


def make_golden(at: Path) -> None:
    """Write the file: of an owner at rest, as a kill would leave it."""
    with open_store(**settings(at)) as store:
        space = store.namespace(LAYOUT, model="golden", tenant="t")
        pool = space.pool(pages())
        space.sequence(ON_DISK).save(pool, range(6)).result()
        store.flush()
        space.sequence(IN_ARENA).save(pool, range(6)).result()
        with tarfile.open(GOLDEN, "w:gz") as archive:
            for path in sorted(at.rglob("*")):
                if path.is_file():
                    archive.add(path, path.relative_to(at))


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The golden store, as its owner's user has it."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    for arena in tmp_path.glob("*.arena"):
        arena.rename(tmp_path / f"kvstore-{os.geteuid()}-{arena.name.split('-')[2]}")
    return tmp_path


def served(at: Path) -> tuple[int, int]:
    """Tokens served of each prompt, every byte of them checked."""
    with open_store(**settings(at)) as store:
        space = store.namespace(LAYOUT, model="golden", tenant="t")
        found = []
        for tokens in (ON_DISK, IN_ARENA):
            arrays = [np.zeros_like(array) for array in pages()]
            with space.sequence(tokens).lookup() as ticket:
                blocks = ticket.load(space.pool(arrays), range(6)).result(60).tokens // 4
            for array, wanted in zip(arrays, pages(), strict=True):
                assert (array[:blocks] == wanted[:blocks]).all()
            found.append(blocks)
        return found[0], found[1]


def test_the_golden_store_is_read(golden: Path) -> None:
    assert served(golden) == (6, 6)


def test_without_its_arena_the_disk_answers(golden: Path) -> None:
    next(golden.glob("*.arena")).unlink()
    assert served(golden) == (6, 0)


def test_without_its_catalogue_the_headers_answer(golden: Path) -> None:
    next(golden.glob("*.arena")).unlink()
    shutil.rmtree(golden / "store" / "disk0" / "catalogue")
    assert served(golden) == (6, 0)


def change(path: Path, at: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)


def page_of(path: Path, version: int) -> None:
    """Another version in a file's header, under a right checksum."""
    change(path, 8, struct.pack("<I", version))
    page = path.read_bytes()[: PAGE - 8]
    change(path, PAGE - 8, struct.pack("<Q", xxhash.xxh3_64_intdigest(page)))


def volume(at: Path, version: int) -> None:
    page_of(at / "store" / "disk0" / "volume", version)


def segment(at: Path, version: int) -> None:
    page_of(next((at / "store" / "disk0").glob("*.seg")), version)


def counters(at: Path, version: int) -> None:
    change(at / "store" / "counters", 8, struct.pack("<I", version))


def facts(at: Path, version: int) -> None:
    place = at / "store" / "store.toml"
    place.write_text(place.read_text().replace("format = 1", f"format = {version}"))


def catalogue(at: Path, version: int) -> None:
    environment: Any = lmdb.open(str(at / "store" / "disk0" / "catalogue"), max_dbs=8)
    table = environment.open_db(b"meta")
    with environment.begin(write=True) as txn:
        value = txn.get(b"identity", db=table)
        txn.put(b"identity", struct.pack("<I", version) + value[4:], db=table)
    environment.close()


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("where", [volume, segment, counters, facts, catalogue])
def test_another_format_is_refused_and_said_so(
    golden: Path, where: Callable[[Path, int], None], version: int
) -> None:
    where(golden, version)
    kept = {p: p.read_bytes() for p in golden.rglob("*.seg")}
    with pytest.raises(KvstoreError, match=r"version|format") as refused:
        served(golden)
    assert "\n" not in str(refused.value)
    assert {p: p.read_bytes() for p in golden.rglob("*.seg")} == kept


def seal_again(data: bytearray, at: int, version: int) -> None:
    header = np.frombuffer(data, np.uint8)[None, at : at + RECORD.header_bytes]
    header[:, : HEADER.itemsize].view(HEADER)["version"] = version
    RECORD.seal(header)


@pytest.mark.parametrize("version", [0, 2])
def test_records_of_another_version_are_not_served(golden: Path, version: int) -> None:
    """Counted as misses, on disk; in an arena they are no blocks."""
    arena = next(golden.glob("*.arena"))
    for path, first in ((next(golden.rglob("*.seg")), PAGE), (arena, 0)):
        data = bytearray(path.read_bytes())
        for at in range(first, len(data) - RECORD.header_bytes, PAGE):
            if data[at : at + 8] == b"KVBLOCK1":
                seal_again(data, at, version)
        path.write_bytes(data)
    assert served(golden) == (0, 0)


@pytest.mark.parametrize("version", [0, 2])
def test_an_arena_of_another_version_is_replaced(golden: Path, version: int) -> None:
    arena = next(golden.glob("*.arena"))
    change(arena, 8, struct.pack("<H", version))
    change(arena, 120, struct.pack("<Q", xxhash.xxh3_64_intdigest(arena.read_bytes()[:120])))
    assert served(golden) == (6, 0)


def test_floors_of_another_version_are_said_so(golden: Path) -> None:
    """Which records are void is unknown then: what only headers tell of is not served."""
    place = golden / "store" / "invalidated"
    place.touch(0o600)
    place.write_bytes(b"KVINVAL1" + struct.pack("<II", 2, 0) + bytes(100))
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert served(golden) == (6, 0)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        make_golden(Path(directory))
    warnings.warn(f"{GOLDEN} was made: {GOLDEN.stat().st_size} bytes", stacklevel=1)
