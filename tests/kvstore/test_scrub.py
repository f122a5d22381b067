"""A scrub finds whatever is wrong, at the speed that it was told, and goes on where it stopped."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.bad_block import BadReason
from kvstore.clock import Clock
from kvstore.hashing.checksum import run_checksums
from kvstore.scrub import Verification, verify_store
from kvstore.scrub_position import Position
from kvstore.slot_check import KnownSpace, faults_of, spans
from kvstore.tiers.catalogue import Catalogue, Change
from kvstore.tiers.catalogue_row import Rows, row_dtype, rows_of
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import RecordFormat
from support.stored import BLOCKS, LAYOUT, Stored, make_store

SLOT = RecordFormat.of(LAYOUT).slot_bytes
TINY = Layout(4, (CacheGroup("full", 1, (40, 24), "uint8"),))
COPIES = 256


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return make_store(tmp_path / "store")


def change_rows(stored: Stored, change: Callable[[Catalogue, Rows], None]) -> None:
    """Let a test write to the catalogue of a closed store."""
    catalogue = Catalogue(stored.directory / "disk0" / "catalogue", FileIo(), size_bytes=1 << 24)
    try:
        rows, _ = catalogue.load()
        change(catalogue, rows[16])
    finally:
        catalogue.close()


def stop_after(blocks: int) -> Callable[[int, int], None]:
    """Progress that interrupts, as Ctrl-C would."""

    def told(done_bytes: int, _: int) -> None:
        if done_bytes >= blocks * SLOT:
            raise KeyboardInterrupt

    return told


class Timer(Clock):
    """A clock that goes on only while somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def one_record() -> tuple[np.ndarray, Rows, KnownSpace]:
    """A sealed record of TINY, its row, and its namespace."""
    shape, random = RecordFormat.of(TINY), np.random.default_rng(1)
    payload = random.integers(0, 256, shape.payload_bytes, np.uint8)
    headers = shape.build(
        keys=random.integers(0, 256, (1, 16), np.uint8),
        parents=random.integers(0, 256, (1, 16), np.uint8),
        namespace=bytes(range(32)),
        first_depth=3,
        first_generation=7,
        tokens=random.integers(0, 9, (1, 4), np.int32),
        created_s=1,
    )
    shape.checksums(headers)[0] = run_checksums(payload, TINY.run_offsets, TINY.run_lengths)
    shape.seal(headers)
    record = np.zeros(shape.slot_bytes, np.uint8)
    record[: shape.header_bytes] = headers[0]
    record[shape.header_bytes : shape.header_bytes + len(payload)] = payload
    rows = rows_of(shape, headers, np.array([0]), 1, 4)
    return record, rows, KnownSpace(bytes(range(32)), "", TINY)


def test_every_flipped_bit_of_a_record_is_found() -> None:
    record, row, space = one_record()
    shape = RecordFormat.of(TINY)
    used = shape.header_bytes + shape.payload_bytes
    sums_end = shape.checksums_at + 8 * shape.runs
    # All bits that mean something, and of the header's zeros one bit in each byte.
    bits = [*range(8 * sums_end), *range(8 * sums_end + 3, 8 * shape.header_bytes, 8)]
    bits += range(8 * shape.header_bytes, 8 * used)
    for first in range(0, len(bits), COPIES):
        these = bits[first : first + COPIES]
        view = np.tile(record, (len(these), 1))
        for copy, bit in enumerate(these):
            view[copy, bit // 8] ^= np.uint8(1 << bit % 8)
        offsets = np.arange(len(these)) * shape.slot_bytes
        rows = np.repeat(row, len(these))
        found = faults_of(view.reshape(-1), offsets, rows, shape.slot_bytes, TINY, space)
        assert None not in found
    whole = faults_of(record, np.array([0]), row, shape.slot_bytes, TINY, space)
    assert whole == [None]


def test_another_blocks_record_and_a_page_of_zeros(stored: Stored) -> None:
    """Two records that changed places, and one that a device lost a page of."""
    with open(stored.segments[0], "r+b") as file:
        records = []
        for index in range(BLOCKS):
            file.seek(4096 + index * SLOT)
            records.append(file.read(SLOT))
        for index, record in ((2, records[5]), (5, records[2])):
            file.seek(4096 + index * SLOT)
            file.write(record)
        file.seek(4096 + 9 * SLOT)
        file.write(bytes(4096))
        file.seek(4096 + 12 * SLOT + SLOT - 8192)
        file.write(bytes(4096))
    bad = verify_store(stored.directory).bad
    assert [(block.index, block.reason) for block in bad] == [
        (2, "header_key"),
        (5, "header_key"),
        (9, "header_magic"),
        (12, "payload_checksum"),
    ]


def test_a_block_whose_parent_is_not_there(stored: Stored) -> None:
    def lose(catalogue: Catalogue, rows: Rows) -> None:
        row = rows[rows["depth"] == 7]
        key = struct.pack(">II", int(row["segment"][0]), int(row["index"][0]))
        assert catalogue.commit(Change(removed=[key])) is None

    change_rows(stored, lose)
    found = verify_store(stored.directory)
    assert [(bad.key, bad.reason) for bad in found.bad] == [(stored.keys[8], "no_parent")]
    assert found.blocks == BLOCKS - 1


def test_rows_that_stand_for_nothing(stored: Stored) -> None:
    """A slot in no segment, one beyond its segment's end, and a namespace that is not known."""

    def add(catalogue: Catalogue, rows: Rows) -> None:
        strays = np.repeat(rows[:1], 3)
        strays["segment"][0], strays["index"][1], strays["index"][2] = 900, 1 << 20, 30
        strays["namespace"][2] = 77
        assert catalogue.commit(Change(rows=[strays])) is None

    change_rows(stored, add)
    found = verify_store(stored.directory)
    reasons = sorted((bad.segment, bad.index, str(bad.reason)) for bad in found.bad)
    segment = int(stored.segments[0].stem, 16)
    assert reasons == [
        (segment, 30, "no_namespace"),
        (segment, 1 << 20, "no_slot"),
        (900, 0, "no_slot"),
    ]
    assert found.blocks == BLOCKS


def test_a_damaged_row_and_one_under_anothers_key(stored: Stored) -> None:
    def write(catalogue: Catalogue, rows: Rows) -> None:
        txn = catalogue._env.begin(write=True)
        for index, flip in ((0, True), (30, False)):
            value = bytearray(rows[1].tobytes())
            value[20] ^= flip
            segment = int(rows["segment"][0])
            txn.put(struct.pack(">II", segment, index), bytes(value), db=catalogue._rows)
        txn.commit()

    change_rows(stored, write)
    found = verify_store(stored.directory)
    # The first block's row is lost with its bytes, so the second has no parent any more.
    reasons = [str(bad.reason) for bad in found.bad]
    assert reasons == ["catalogue_row", "catalogue_row", "no_parent"]
    assert found.blocks == BLOCKS - 1


def test_a_damaged_segment_header(stored: Stored) -> None:
    with open(stored.segments[0], "r+b") as file:
        file.seek(50)
        file.write(b"\xff")
    found = verify_store(stored.directory)
    assert [str(bad.reason) for bad in found.bad] == ["segment_header"]
    assert found.blocks == BLOCKS


def test_an_interrupted_run_goes_on(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.scrub.SPAN_BYTES", 3 * SLOT)
    with open(stored.segments[0], "r+b") as file:
        for index in (4, 15):
            file.seek(4096 + index * SLOT + 5000)
            file.write(b"????")
    with pytest.raises(KeyboardInterrupt):
        verify_store(stored.directory, stop_after(9))
    told: list[int] = []
    found = verify_store(stored.directory, lambda done, _: told.append(done), resume=True)
    assert told[0] == 12 * SLOT  # the nine were not read again
    assert (found.blocks, found.bytes, found.resumed) == (BLOCKS, BLOCKS * SLOT, True)
    assert [bad.index for bad in found.bad] == [4, 15]
    again = verify_store(stored.directory, resume=True)
    assert (again.blocks, again.resumed) == (BLOCKS, False)  # a run that ended leaves no position


@pytest.mark.parametrize("damage", [b"", b"KVSCRUB1", bytes(200)])
def test_a_damaged_position_is_the_beginning(stored: Stored, damage: bytes) -> None:
    (stored.directory / "scrub").write_bytes(damage)
    found = verify_store(stored.directory, resume=True)
    assert (found.blocks, found.resumed) == (BLOCKS, False)


def test_a_position_survives_its_file_and_no_flipped_bit_does() -> None:
    store = bytes(range(16))
    position = Position(1, 2, 3, 4, 5, 6, 7.5, [(8, 9, BadReason.IO_ERROR)])
    data = position.pack(store)
    assert Position.parse(data, store) == position
    assert Position.parse(data, bytes(16)) is None
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert Position.parse(bytes(flipped), store) is None
    many = Position(bad=[(1, n, BadReason.NO_SLOT) for n in range(5000)])
    assert len(many.pack(store)) <= 8192


def test_the_rate_is_kept(stored: Stored) -> None:
    timer = Timer()
    rate = 4 * SLOT
    found = verify_store(stored.directory, rate_bytes=rate, clock=timer, pause=timer.pause)
    assert found.blocks == BLOCKS
    # The last read need not be waited for.
    assert timer.now >= (BLOCKS * SLOT - (256 << 10)) / rate
    assert verify_store(stored.directory, clock=timer, pause=timer.pause).seconds == 0.0


def test_spans_cover_every_row_once_and_in_order() -> None:
    random = np.random.default_rng(3)
    batch: dict[int, Rows] = {}
    for tokens in (4, 16):
        rows = np.zeros(200, row_dtype(tokens))
        rows["segment"] = np.sort(random.integers(0, 4, 200))
        rows["index"] = random.permutation(1000)[:200]
        rows["slot_pages"] = 2 + rows["segment"] % 2
        batch[tokens] = np.sort(rows, order=["segment", "index"])
    seen: list[tuple[int, int, int]] = []
    for rows in spans(batch, 1 << 20):
        assert len(np.unique(rows["segment"])) == 1
        size = int(rows["index"][-1] - rows["index"][0] + 1) * int(rows["slot_pages"][0]) * 4096
        assert size <= 1 << 20
        seen += [(int(r["segment"]), int(r["index"]), rows["tokens"].shape[1]) for r in rows]
    assert seen == sorted(seen)
    assert len(seen) == len(set(seen)) == 400


def test_no_position_can_be_written(stored: Stored) -> None:
    """A scrub of a store that one may only read is a scrub all the same."""
    (stored.directory / "scrub.new").mkdir()
    with pytest.raises(KeyboardInterrupt):
        verify_store(stored.directory, stop_after(1))
    found: Verification = verify_store(stored.directory, resume=True)
    assert found.blocks == BLOCKS


def test_a_namespace_whose_layout_was_lost(stored: Stored) -> None:
    def forget(catalogue: Catalogue, rows: Rows) -> None:
        (number,) = np.unique(rows["namespace"]).tolist()
        known = catalogue.namespaces()[number]
        lost = Namespace(known.digest, b"", "")
        assert catalogue.commit(Change(namespaces={number: lost})) is None

    change_rows(stored, forget)
    found = verify_store(stored.directory)
    assert (found.blocks, found.unchecked, found.bad) == (BLOCKS, BLOCKS, [])
