"""What a scrub found bad is dropped, with or without an owner, and the next save heals it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.control import call
from kvstore.errors import StoreError
from kvstore.inspect import list_blocks
from kvstore.repair import Suspect
from kvstore.scrub import verify_store
from kvstore.scrub_repair import repair_store
from kvstore.tiers.record import RecordFormat
from support.checks import assert_at_rest
from support.engine import Engine
from support.stored import BLOCKS, LAYOUT, prompt, run, run_here

SIZES: dict[str, Any] = {"host": "4MiB", "disk_capacity": "64MiB"}


def engine_of(store: kvstore.Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="m", tenant="t"), 2 * BLOCKS)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed store that holds two prompts which share their first five blocks."""
    with kvstore.open(tmp_path / "store", **SIZES) as store:
        for tokens in prompts():
            engine_of(store).save(tokens)
    return tmp_path / "store"


def prompts() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    first = prompt(BLOCKS)
    other = np.concatenate([first[: 5 * 16], prompt(BLOCKS - 5, seed=9)])
    return [first, other]


def places_of(directory: Path) -> dict[str, tuple[Path, int]]:
    """File and byte offset of every block's record, by its key."""
    places = {block.key: block.place.rpartition(":") for block in list_blocks(directory)}
    return {key: (Path(path), int(at)) for key, (path, _, at) in places.items()}


def flip(path: Path, at: int) -> None:
    """Flip a bit of a block's payload."""
    with open(path, "r+b") as file:
        file.seek(at + 5000)
        byte = file.read(1)[0] ^ 1
        file.seek(at + 5000)
        file.write(bytes([byte]))


def suspect_of(key: str, path: Path, at: int) -> Suspect:
    """The block as one suspects it."""
    index = (at - 4096) // RecordFormat.of(LAYOUT).slot_bytes
    return Suspect(int(path.stem, 16), index, bytes.fromhex(key))


def keys_of(directory: Path) -> list[str]:
    """Keys of the first prompt's blocks, in order."""
    with kvstore.open(directory, **SIZES) as store:
        sequence = engine_of(store).space.sequence(prompts()[0])
        return [key.tobytes().hex() for key in sequence.keys]


def assert_heals(directory: Path, left: int) -> None:
    """The prefix before the bad block is served, a save brings the rest, a restart keeps it."""
    with kvstore.open(directory, **SIZES) as store:
        engine = engine_of(store)
        assert engine.ask(prompts()[0]).tokens == left * 16
        assert engine.ask(prompts()[1]).tokens == BLOCKS * 16  # its own blocks were not touched
        engine.save(prompts()[0])
        assert engine.ask(prompts()[0]).tokens == BLOCKS * 16
        assert_at_rest(store)
    assert verify_store(directory).bad == []
    with kvstore.open(directory, **SIZES) as store:
        assert engine_of(store).ask(prompts()[0]).tokens == BLOCKS * 16


def test_without_an_owner(directory: Path) -> None:
    keys, places = keys_of(directory), places_of(directory)
    flip(*places[keys[7]])
    flip(*places[keys[12]])
    ran = run_here("verify", "--store", directory, "--repair", "--json")
    assert ran.code == 0
    assert {bad["key"] for bad in ran.document["bad"]} == {keys[7], keys[12]}
    # The second lay below the first, and went with it.
    assert ran.document["repair"] == {"dropped": 1, "descendants": BLOCKS - 8, "left": []}
    assert_heals(directory, 7)


def test_with_an_owner(directory: Path) -> None:
    keys, places = keys_of(directory), places_of(directory)
    flip(*places[keys[9]])
    with kvstore.open(directory, **SIZES) as store:
        ran = run("verify", "--store", directory, "--repair")
        assert ran.code == 0, ran.err
        assert f"1 bad blocks dropped, and {BLOCKS - 10} that" in ran.out
        assert "All is whole now." in ran.out
        assert store.counters()["bad_blocks.disk"] == 1
        assert_at_rest(store)
    assert_heals(directory, 9)


def test_what_host_memory_has_is_written_again(directory: Path) -> None:
    keys, places = keys_of(directory), places_of(directory)
    with kvstore.open(directory, **SIZES) as store:
        assert engine_of(store).ask(prompts()[0]).tokens == BLOCKS * 16  # now in host memory too
        flip(*places[keys[3]])
        done = store.drop_bad_blocks([suspect_of(keys[3], *places[keys[3]])])
        assert (done.dropped, done.descendants) == (1, 2 * BLOCKS - 5 - 4)
        assert_at_rest(store)
    found = verify_store(directory)
    assert (found.blocks, found.bad) == (BLOCKS, [])


def test_only_what_is_bad_is_dropped(directory: Path) -> None:
    """Whole blocks, blocks that left, and slots of others: whatever is claimed of them."""
    key = keys_of(directory)[7]
    whole = suspect_of(key, *places_of(directory)[key])
    with kvstore.open(directory, **SIZES) as store:
        suspects = [
            whole,
            replace(whole, index=whole.index + 1),
            replace(whole, key=bytes(16)),
            replace(whole, segment=900_000, index=1 << 31),
        ]
        done = store.drop_bad_blocks(suspects)
        assert (done.dropped, done.whole, done.gone, done.descendants) == (0, 1, 3, 0)
        assert engine_of(store).ask(prompts()[0]).tokens == BLOCKS * 16
        assert_at_rest(store)
        with pytest.raises(ValueError, match="at most 512"):
            store.drop_bad_blocks(suspects * 200)
        for wrong in ([[1, 2]], [[1, 2, "zz"]], [[1, 2, "00"]], [None], "x"):
            with pytest.raises(StoreError):
                call(directory, "drop_bad_blocks", {"blocks": wrong})


def test_a_damaged_catalogue_is_rebuilt(directory: Path) -> None:
    keys, places = keys_of(directory), places_of(directory)
    flip(*places[keys[11]])
    data = directory / "disk0" / "catalogue" / "data.mdb"
    data.write_bytes(b"\xa5" * data.stat().st_size)
    found = verify_store(directory)
    assert [bad.reason for bad in found.bad] == ["catalogue"]
    # The rebuilt one lost the layout, so the bad payload is found when an engine asks for it.
    assert repair_store(directory, found.bad).left == []
    with kvstore.open(directory, **SIZES) as store:
        engine = engine_of(store)
        assert engine.ask(prompts()[0]).tokens == 11 * 16
        engine.save(prompts()[0])
        assert engine.ask(prompts()[0]).tokens == BLOCKS * 16
    assert verify_store(directory).bad == []


def test_beside_an_owner_a_catalogue_fault_is_left(directory: Path) -> None:
    """A segment's damaged header is mended by the next start, and by nobody before."""
    segment = min((directory / "disk0").glob("*.seg"))
    with kvstore.open(directory, **SIZES):
        with open(segment, "r+b") as file:
            file.seek(50)
            file.write(b"\xff")
        ran = run("verify", "--store", directory, "--repair", "--json")
        assert ran.code == 1
        assert [bad["reason"] for bad in ran.document["repair"]["left"]] == ["segment_header"]
    found = verify_store(directory)
    assert [bad.reason for bad in found.bad] == ["segment_header"]
    assert repair_store(directory, found.bad).left == []
