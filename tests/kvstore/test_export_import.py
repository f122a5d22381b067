"""From one store to another, whole or in part, and exact by loading."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.archive import ArchiveError
from kvstore.disk_import import Refused
from kvstore.errors import ConfigError, StoreBusyError
from kvstore.exporting import Selection, export_store
from kvstore.inspect import list_blocks
from kvstore.scrub import verify_store
from support.archives import (
    BLOCKS,
    LAYOUT,
    SIZES,
    empty,
    engine_of,
    exported,
    fill,
    hits,
    imported,
    prompts,
)
from support.checks import assert_at_rest
from support.engine import Engine, prompt

GOLDEN = Path(__file__).with_name("golden_export_v1.bin")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("full") / "store")


@pytest.fixture(scope="module")
def archive(full: Path) -> bytes:
    return exported(full)[0]


def test_round_trip(full: Path, archive: bytes, tmp_path: Path) -> None:
    target = empty(tmp_path / "store")
    before = list(list_blocks(full))
    done = imported(target, archive)
    assert (done.imported, done.present, done.refused) == (len(before), 0, {})
    assert done.complete and not done.bad
    assert verify_store(target).bad == []
    labels = {(block.key, block.parent, block.label) for block in before}
    assert {(b.key, b.parent, b.label) for b in list_blocks(target)} == labels
    assert hits(target) == [BLOCKS, BLOCKS, BLOCKS, BLOCKS]
    # Once more: everything is there, and nothing is written over.
    places = {block.key: block.place for block in list_blocks(target)}
    again = imported(target, archive)
    assert (again.imported, again.present, again.refused) == (0, len(before), {})
    assert {block.key: block.place for block in list_blocks(target)} == places
    # What the second store exports is the same, but for the time.
    back, _ = exported(target)
    assert len(back) == len(archive)


def test_an_import_beside_what_is_there(full: Path, archive: bytes, tmp_path: Path) -> None:
    """A store that has the beginning of a prompt gets the rest."""
    target = tmp_path / "store"
    with kvstore.open(target, **SIZES) as store:
        engine_of(store, "a").save(prompts()[0][1][:13])
    done = imported(target, archive)
    assert (done.present, done.refused) == (3, {})
    assert hits(target) == [BLOCKS] * 4


def test_salts_stay(archive: bytes) -> None:
    assert b"a secret" not in archive


def test_a_part_of_a_store(full: Path, tmp_path: Path) -> None:
    data, done = exported(full, tenant="a")
    assert (done.namespaces, done.blocks) == (1, 2 * BLOCKS - 2)
    target = empty(tmp_path / "store")
    imported(target, data)
    assert hits(target) == [BLOCKS, BLOCKS, 0, 0]
    assert exported(full, model="m")[1].namespaces == 2
    assert exported(full, model="no such")[1].blocks == 0
    digest = Selection(namespace="0" * 64)
    assert export_store(full, io.BytesIO().write, digest).blocks == 0
    for wrong in ({"namespace": "abc"}, {"prefix": "12"}, {"namespace": "g" * 64}):
        with pytest.raises(ConfigError, match="hex digits"):
            Selection(**wrong)


def test_a_prefix(full: Path, tmp_path: Path) -> None:
    """The third block of the first prompt: what is before it, and what is below it."""
    with kvstore.open(full, **SIZES) as store:
        keys = engine_of(store, "a").space.sequence(prompts()[0][1]).keys
        third = keys[2].tobytes().hex()
    data, done = exported(full, prefix=third)
    assert done.blocks == BLOCKS
    target = empty(tmp_path / "store")
    imported(target, data)
    assert hits(target) == [BLOCKS, 2, 0, 0]
    with pytest.raises(ConfigError, match="no block on disk"):
        exported(full, prefix="00" * 16)


def test_a_bad_block_is_left_out_with_all_below(full: Path, tmp_path: Path) -> None:
    target = fill(tmp_path / "store")
    with kvstore.open(target, **SIZES) as store:
        key = engine_of(store, "b").space.sequence(prompts()[2][1]).keys[5].tobytes().hex()
    (place,) = (block.place for block in list_blocks(target) if block.key == key)
    path, _, at = place.rpartition(":")
    with open(path, "r+b") as file:
        file.seek(int(at) + 4100)
        file.write(b"????")
    data, done = exported(target)
    assert (done.bad, done.below, done.gone) == (1, BLOCKS - 6, 0)
    other = empty(tmp_path / "other")
    assert imported(other, data).refused == {}
    assert hits(other) == [BLOCKS, BLOCKS, 5, BLOCKS]


def test_other_hashes_and_stores_in_use(full: Path, archive: bytes, tmp_path: Path) -> None:
    other = tmp_path / "sha"
    kvstore.open(other, hash="sha256", **SIZES).close()
    with pytest.raises(ArchiveError, match="xxh3-128"):
        imported(other, archive)
    busy = tmp_path / "busy"
    with (
        kvstore.open(busy, **SIZES),
        pytest.raises(StoreBusyError, match="stop its owner"),
    ):
        imported(busy, archive)
    with pytest.raises(ConfigError, match="not a store"):
        imported(tmp_path / "nothing", archive)


def test_export_beside_an_owner(full: Path, tmp_path: Path) -> None:
    target = empty(tmp_path / "store")
    with kvstore.open(full, **SIZES):
        command = [sys.executable, "-m", "kvstore.cli"]
        export = subprocess.run(
            [*command, "export", "-", "--store", str(full)], capture_output=True, check=False
        )
    assert export.returncode == 0
    assert export.stderr.startswith(b"30 blocks of 2 namespaces")
    ran = subprocess.run(
        [*command, "import", "-", "--store", str(target), "--json"],
        input=export.stdout,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0
    assert b"copying the archive" in ran.stderr
    assert json.loads(ran.stdout)["imported"] == 30
    assert hits(target) == [BLOCKS] * 4


def test_a_store_that_is_too_small(tmp_path: Path) -> None:
    """It takes the shallow blocks first and evicts nothing for the rest."""
    large: dict[str, Any] = {"host": "8MiB", "disk_capacity": "32MiB"}
    with kvstore.open(tmp_path / "large", **large) as store:
        for seed in range(40):
            engine = Engine(store.namespace(LAYOUT, model="m"), 64)
            engine.save(prompt(4 * 50 + 1, seed=100 + seed))
            store.flush()
    data, done = exported(tmp_path / "large")
    assert done.blocks == 2000
    target = tmp_path / "small"
    own = prompt(4 * 30 + 1, seed=7)
    with kvstore.open(target, **SIZES) as store:
        Engine(store.namespace(LAYOUT, model="own"), 32).save(own)
    found = imported(target, data)
    assert found.imported + found.refused[Refused.NO_ROOM] == 2000
    assert 100 < found.imported < 2000
    assert not found.bad
    assert verify_store(target).bad == []
    with kvstore.open(target, **SIZES) as store:
        assert Engine(store.namespace(LAYOUT, model="own"), 32).ask(own).tokens == 120
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        shares = [engine.ask(prompt(201, seed=100 + seed)).tokens for seed in range(40)]
        assert max(shares) - min(shares) <= 8
        assert_at_rest(store)


def test_the_golden_export(tmp_path: Path) -> None:
    """A file that this version, and every later one, must be able to import."""
    target = empty(tmp_path / "store")
    done = imported(target, GOLDEN.read_bytes())
    assert (done.imported, done.refused, done.complete) == (2, {}, True)
    with kvstore.open(target, **SIZES) as store:
        engine = Engine(store.namespace(LAYOUT, model="golden", tenant="t"), 4)
        assert engine.ask(np.arange(9, dtype=np.int32)).tokens == 8
