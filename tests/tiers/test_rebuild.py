"""A damaged catalogue never ends the process and never lies: it is made anew from the headers."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.catalogue_row import slots_of_rows
from kvstore.tiers.catalogue_tables import NAMESPACES_MAX, Namespace, parse_namespaces
from kvstore.tiers.disk_outcomes import Written
from kvstore.tiers.errors import StoreError
from kvstore.tiers.failpoints import armed
from kvstore.tiers.io import FileIo
from kvstore.tiers.namespaces import Namespaces
from kvstore.tiers.rebuild import newest, scan_segment
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.walk import walk
from support.disk_blocks import (
    LARGE,
    LONGER,
    MIB,
    NAMESPACE,
    SEGMENT,
    SMALL,
    Rig,
    block,
    found_blocks,
    open_rig,
)

Damage = Callable[[bytearray], bytes]
SLOT = RecordFormat.of(SMALL).slot_bytes
LAYOUTS = {SMALL: range(0, 40), LONGER: range(100, 111), LARGE: range(200, 205)}


def data_of(path: Path) -> Path:
    return path / "catalogue" / "data.mdb"


def stored(path: Path) -> dict[int, int]:
    """A closed tier with blocks of all layouts. Returns: number -> slot."""
    rig = open_rig(path)
    slots: dict[int, int] = {}
    for layout, numbers in LAYOUTS.items():
        taken, outcome = rig.write(list(numbers), layout)
        assert isinstance(outcome, Written)
        slots.update(zip(numbers, taken.tolist(), strict=True))
    rig.tier.close()
    return slots


def all_good(rig: Rig, blocks: dict[int, int]) -> bool:
    return all(
        rig.good(slot, number, layout)
        for layout, numbers in LAYOUTS.items()
        for number, slot in blocks.items()
        if number in numbers
    )


def flipped(data: bytearray) -> bytes:
    rng = random.Random(4)
    for _ in range(300):
        data[rng.randrange(8192, len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: bytes(data[:5000]),
        lambda data: bytes(data[: len(data) // 8 // 4096 * 4096]),
        lambda data: bytes(len(data)),
        lambda data: random.Random(1).randbytes(len(data)),
        lambda data: bytes(data[:8192]) + bytes(len(data) - 8192),
        flipped,
    ],
    ids=["empty", "torn", "short", "zeros", "noise", "zeroed-pages", "flips"],
)
def test_blocks_outlive_their_catalogue(tmp_path: Path, damage: Damage, clean: bool) -> None:
    path = tmp_path / "d"
    blocks = stored(path)
    data = data_of(path)
    data.write_bytes(damage(bytearray(data.read_bytes())))
    if not clean:
        (path / "clean").unlink()
    rig = open_rig(path)
    assert rig.loaded.rebuilt == (0,)
    assert found_blocks(rig) == blocks
    assert all_good(rig, blocks)
    # It is a catalogue like any other: it takes commits, and is there at the next start.
    more, outcome = rig.write([500, 501])
    assert isinstance(outcome, Written)
    rig.tier.check_integrity()
    rig.tier.close()
    rig = open_rig(path)
    assert rig.loaded.rebuilt == ()
    assert found_blocks(rig) == blocks | dict(zip([500, 501], more.tolist(), strict=True))
    rig.tier.close()


def test_a_missing_catalogue_is_made_anew(tmp_path: Path) -> None:
    blocks = stored(tmp_path / "d")
    data_of(tmp_path / "d").unlink()
    rig = open_rig(tmp_path / "d")
    assert rig.loaded.rebuilt == (0,) and found_blocks(rig) == blocks
    rig.tier.close()


@pytest.mark.slow
def test_random_damage_costs_blocks_at_most(tmp_path: Path) -> None:
    """Whatever is found is good, or fails its check; nothing raises, nothing dies."""
    blocks = stored(tmp_path / "d")
    data = data_of(tmp_path / "d")
    whole = data.read_bytes()
    rng = random.Random(9)
    for _ in range(12):
        broken = bytearray(whole)
        used = 40 * 4096  # beyond are pages that LMDB has not used yet
        for _ in range(rng.choice([1, 3, 30])):
            broken[rng.randrange(used)] ^= 1 << rng.randrange(8)
        data.write_bytes(broken)
        (tmp_path / "d" / "clean").unlink(missing_ok=True)
        try:
            rig = open_rig(tmp_path / "d")
        except StoreError as refused:  # the flip hit the store id or the format itself
            assert "another store" in str(refused) or "kvstore" in str(refused)
            continue
        found = found_blocks(rig)
        assert found.items() <= blocks.items()
        assert all_good(rig, found)
        rig.tier.check_integrity()
        rig.tier.close()


def test_damaged_headers_cost_their_blocks_only(tmp_path: Path) -> None:
    path = tmp_path / "d"
    blocks = stored(path)
    with (path / "00000000.seg").open("r+b") as file:
        for number in (3, 7):
            file.seek(4096 + blocks[number] * SLOT + 40 + number)
            file.write(b"\xff\xfe\xfd")
    data_of(path).write_bytes(b"")
    rig = open_rig(path)
    assert found_blocks(rig) == {n: s for n, s in blocks.items() if n not in (3, 7)}
    assert rig.tier.free(SLOT) >= 2
    rig.tier.close()


def test_the_catalogue_mends_a_segments_header(tmp_path: Path) -> None:
    path = tmp_path / "d"
    blocks = stored(path)
    segment = path / "00000001.seg"
    whole = segment.read_bytes()
    segment.write_bytes(bytes(4096) + whole[4096:])
    rig = open_rig(path)
    assert found_blocks(rig) == blocks
    rig.tier.close()
    assert segment.read_bytes() == whole
    # With the catalogue gone too nothing says what lies in it: the file goes, the rest stays.
    segment.write_bytes(bytes(4096) + whole[4096:])
    data_of(path).write_bytes(b"")
    rig = open_rig(path)
    per = rig.tier.per
    assert found_blocks(rig) == {n: s for n, s in blocks.items() if s // per != 1}
    rig.tier.close()
    assert not segment.exists()


def test_a_segment_cut_short_costs_its_blocks_only(tmp_path: Path) -> None:
    path = tmp_path / "d"
    blocks = stored(path)
    segment = path / "00000000.seg"
    segment.write_bytes(segment.read_bytes()[: 4096 + 4 * SLOT])
    rig = open_rig(path)
    assert segment.stat().st_size == SEGMENT
    good = {n for n in LAYOUTS[SMALL] if rig.good(blocks[n], n)}
    assert good == {n for n in LAYOUTS[SMALL] if blocks[n] >= rig.tier.per or blocks[n] < 4}
    rig.tier.close()


def test_of_two_blocks_with_one_key_the_newer_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "d"
    rig = open_rig(path)
    slots = rig.reserve(4)
    generations = [5, 9, 2, 1]
    blocks = [block(1, generation=g) for g in generations[:3]] + [block(2, generation=1)]
    assert isinstance(rig.put(slots, blocks), Written)
    rig.tier.close()
    data_of(path).write_bytes(b"")
    rig = open_rig(path)
    assert found_blocks(rig) == {1: int(slots[1]), 2: int(slots[3])}
    assert rig.tier.blocks == 2
    rig.tier.close()


def test_stale_records_of_another_class_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "d"
    rig = open_rig(path, capacity_bytes=MIB)
    slots, _ = rig.write(range(12))
    rig.tier.remove(slots)
    rig.tier.flush_removals()
    assert rig.tier.reassign(0, RecordFormat.of(LARGE).slot_bytes)
    other, _ = rig.write([200], LARGE)
    rig.tier.close()
    data_of(path).write_bytes(b"")
    rig = open_rig(path, capacity_bytes=MIB)
    assert found_blocks(rig) == {200: int(other[0])}
    rig.tier.close()


def test_only_the_damaged_volume_is_rebuilt(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    rig = open_rig(paths)
    slots, _ = rig.write(range(150))
    name = rig.name
    rig.tier.close()
    assert {slot // rig.tier.per % 2 for slot in slots.tolist()} == {0, 1}
    data_of(paths[0]).write_bytes(b"")
    rig = open_rig(paths)
    assert rig.loaded.rebuilt == (0,)
    assert found_blocks(rig) == dict(enumerate(slots.tolist()))
    # The other volume still knows the layout, under the same number.
    assert rig.name == name and rig.tier.namespaces()[name].layout == SMALL.canonical()
    rig.tier.close()


def test_namespaces_are_saved_from_a_catalogue_with_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "d"
    stored(path)
    data = data_of(path)
    whole = bytearray(data.read_bytes())
    key = (5).to_bytes(16, "little")
    places = [at for at in range(0, len(whole) - 4096, 4096) if key in whole[at : at + 4096]]
    for at in places:  # the pages of rows, and no others
        whole[at + 8 : at + 16] = b"\xff" * 8
    data.write_bytes(whole)
    (path / "clean").unlink()
    walked = walk(data.parent, len(whole))
    assert not walked.sound and len(walked.namespaces) == 1
    rig = open_rig(path)
    assert rig.loaded.rebuilt == (0,)
    assert rig.tier.namespaces()[rig.name].digest == NAMESPACE
    assert rig.tier.namespaces()[rig.name].layout == SMALL.canonical()
    rig.tier.close()


def test_a_scan_reads_what_is_there_and_newest_is_stable(tmp_path: Path) -> None:
    path = tmp_path / "d"
    blocks = stored(path)
    io = FileIo()
    fd = io.open(path / "00000000.seg")
    count = (SEGMENT - 4096) // SLOT
    groups = scan_segment(
        io,
        fd,
        segment=0,
        slot_bytes=SLOT,
        slots=count + 50,  # beyond the end of the file there is nothing
        per=16,
        namespace_number=lambda digest: 4 if digest == NAMESPACE else None,
    )
    io.close(fd)
    kept, dropped = newest([*groups, *[rows.copy() for rows in groups]], 16)
    assert len(dropped) == sum(map(len, groups))
    slots = np.concatenate([slots_of_rows(rows, 16) for rows in kept])
    assert sorted(slots.tolist()) == sorted(s for s in blocks.values() if s < count)
    assert {int(n) for rows in kept for n in rows["namespace"]} == {4}
    assert newest([], 16) == ([], [])


class Stop(BaseException):
    """The process ends here."""


def test_a_rebuild_that_is_cut_short_is_made_again_and_forgets_nothing(tmp_path: Path) -> None:
    blocks = stored(tmp_path / "d")
    data_of(tmp_path / "d").write_bytes(b"")
    # A catalogue that is new and sound, and has no row yet.
    with armed("catalogue.commit", _stop), pytest.raises(Stop):
        open_rig(tmp_path / "d")
    assert (tmp_path / "d" / "rebuilding").exists()
    rig = open_rig(tmp_path / "d")
    assert rig.loaded.rebuilt == (0,)
    assert found_blocks(rig) == blocks and all_good(rig, blocks)
    assert not (tmp_path / "d" / "rebuilding").exists()
    rig.tier.close()


def _stop() -> None:
    raise Stop


def test_a_damaged_table_of_namespaces_gives_no_number_that_rows_cannot_have() -> None:
    sound = Namespace(NAMESPACE, b"", "a").pack()
    table = {0: sound, 7: sound, NAMESPACES_MAX: sound, NAMESPACES_MAX + 1: sound, 2**33: sound}
    assert parse_namespaces(table).keys() == {7, NAMESPACES_MAX}
    names = Namespaces()
    assert names.merge({NAMESPACES_MAX: Namespace(NAMESPACE, b"", "a")})
    assert names.number(Namespace(bytes(32), b"", "b"), NAMESPACES_MAX) == 1
