"""Row 4: damaged records on disk. Each is a counted miss, or, where nobody reads, exact bytes.

Never a wrong byte, never an exception, and a save heals.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.record import HEADER, RecordFormat
from support.chains import (
    BLOCKS,
    CHAINS,
    LAYOUT,
    RECORD,
    RECORDS,
    TOKENS,
    Trial,
    flip,
    make_pristine,
    save_chains,
    tokens_of,
)
from support.checks import assert_at_rest

HEADER_BITS = RECORD.header_bytes * 8
PAYLOAD_BITS = RECORD.payload_bytes * 8
PADDING_AT = RECORD.header_bytes + RECORD.payload_bytes
BODY_BITS = 10_000
PAGE = 4096
BAD = ("misses.checksum", "misses.header")


@pytest.fixture(scope="module")
def pristine(module_memory: Path) -> Path:
    return make_pristine(module_memory / "pristine")


@pytest.fixture(autouse=True)
def nothing_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread of the store met an exception."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def assert_all_missed(trial: Trial, *reasons: str, records: int = RECORDS) -> None:
    """Every record is counted as bad, every block as missed, and no page as loaded."""
    for chain in range(records // BLOCKS):
        assert trial.load(chain) == 0
    assert trial.count("bad_blocks.disk") == records
    assert trial.count(*reasons) == records * TOKENS
    assert trial.count("tokens_hit.disk", "tokens_hit.host") == 0
    assert trial.store.leaks() == {"leases": 0, "holds": 0}


@pytest.mark.slow
def test_every_bit_of_a_header(pristine: Path, memory: Path) -> None:
    assert HEADER_BITS % RECORDS == 0
    for first in range(0, HEADER_BITS, RECORDS):
        with Trial(pristine, memory / "store") as trial:
            trial.damage(lambda record, number, at=first: flip(record, at + number))
            assert_all_missed(trial, *BAD)
    print(f"{HEADER_BITS} of {HEADER_BITS} flipped header bits were counted misses")


@pytest.mark.slow
def test_random_bits_of_a_payload(pristine: Path, memory: Path) -> None:
    rounds = -(-BODY_BITS // RECORDS)
    bits = np.random.default_rng(4).integers(0, PAYLOAD_BITS, (rounds, RECORDS))
    for chosen in bits + HEADER_BITS:
        with Trial(pristine, memory / "store") as trial:
            trial.damage(lambda record, number, at=chosen: flip(record, int(at[number])))
            assert_all_missed(trial, "misses.checksum")
    print(f"{bits.size} of {bits.size} flipped payload bits were counted misses")


def test_bits_that_nobody_reads(pristine: Path, memory: Path) -> None:
    """The padding behind a payload is under no checksum: the block's own bytes are still exact."""
    padding_bits = (RECORD.slot_bytes - PADDING_AT) * 8
    with Trial(pristine, memory / "store") as trial:
        assert padding_bits <= RECORDS
        trial.damage(lambda record, number: flip(record, PADDING_AT * 8 + number % padding_bits))
        assert [trial.load(chain) for chain in range(CHAINS)] == [BLOCKS] * CHAINS
        assert trial.count("bad_blocks.disk") == 0


def test_zeroed_pages(pristine: Path, memory: Path) -> None:
    pages = RECORD.slot_bytes // PAGE

    def zero(record: bytearray, number: int) -> None:
        at = number % pages * PAGE
        record[at : at + PAGE] = bytes(PAGE)

    with Trial(pristine, memory / "store") as trial:
        trial.damage(zero)
        assert_all_missed(trial, *BAD)


def test_records_in_each_others_place(pristine: Path, memory: Path) -> None:
    """Whole, sound records, each in its neighbour's slot."""
    with Trial(pristine, memory / "store") as trial:
        records = trial.records()
        trial.damage(lambda record, number: record.__setitem__(slice(None), records[number ^ 1]))
        assert_all_missed(trial, "misses.header")


def forged(record: bytearray, field: str, value: bytes) -> None:
    """Another value in a field of the header, under a right checksum."""
    at = HEADER.fields[field][1]  # type: ignore[index]
    record[at : at + len(value)] = value
    headers = np.frombuffer(record, np.uint8)[None, : RECORD.header_bytes]
    RECORD.seal(headers)


def test_sealed_headers_that_differ_in_one_field(pristine: Path, memory: Path) -> None:
    """As another block's, another tenant's, another layout's or an older record would."""
    fields = ("namespace", "key", "parent", "media", "generation", "block_tokens", "runs")

    def forge(record: bytearray, number: int) -> None:
        field = fields[number % len(fields)]
        forged(record, field, b"\x07" * HEADER.fields[field][0].itemsize)  # type: ignore[index]

    with Trial(pristine, memory / "store") as trial:
        trial.damage(forge)
        assert_all_missed(trial, "misses.header")


def test_a_neighbours_record_with_this_blocks_names(pristine: Path, memory: Path) -> None:
    """Swapped records that carry the right key, parent and generation, but their own tokens."""
    with Trial(pristine, memory / "store") as trial:
        records = trial.records()

        def swap(record: bytearray, number: int) -> None:
            names = {name: bytes(record[at : at + size]) for name, at, size in NAMES}
            record[:] = records[number ^ 1]
            for name, value in names.items():
                forged(record, name, value)

        trial.damage(swap)
        assert_all_missed(trial, "misses.header")


NAMES = [
    (name, HEADER.fields[name][1], HEADER.fields[name][0].itemsize)  # type: ignore[index]
    for name in ("key", "parent", "generation", "depth")
]


@pytest.mark.slow
def test_a_stale_record_put_back(pristine: Path, memory: Path) -> None:
    """A, then B under the same key, then A's old bytes again: a miss, and never A."""
    with Trial(pristine, memory / "store") as trial:
        old = trial.records()
        trial.damage(lambda record, number: flip(record, HEADER_BITS + 5))
        assert_all_missed(trial, "misses.checksum")
        save_chains(trial.store)
        trial.store.close()
        trial.open()
        trial.places = trial.find_records()
        bad = trial.count("bad_blocks.disk")
        new = trial.records()
        trial.damage(lambda record, number: record.__setitem__(slice(None), old[number]))
        assert all(one != other for one, other in zip(old, new, strict=True))
        assert [trial.load(chain) for chain in range(CHAINS)] == [0] * CHAINS
        assert trial.count("bad_blocks.disk") == bad + RECORDS


@pytest.mark.slow
def test_files_cut_at_every_byte_of_a_header(pristine: Path, memory: Path) -> None:
    """From the last block of each chain to its first, so that none is gone with its parent."""
    with Trial(pristine, memory / "store") as trial:
        whole = {p.file: p.file.read_bytes() for p in trial.places}
        order = sorted(range(RECORDS), key=lambda n: (n // BLOCKS, n % BLOCKS), reverse=True)
        for byte, number in enumerate(order):
            place, (chain, block) = trial.places[number], divmod(number, BLOCKS)
            with place.file.open("r+b") as file:
                if file.seek(0, 2) < place.offset + RECORD.slot_bytes:
                    file.seek(0)
                    file.write(whole[place.file])
                file.truncate(place.offset + byte % RECORD.header_bytes)
            assert trial.load(chain, block + 1, skip=block) == block
        assert trial.count("bad_blocks.disk") == RECORDS == RECORD.header_bytes
        assert trial.count("misses.io_error") == RECORDS * TOKENS


def test_files_cut_at_pages_and_opened_again(pristine: Path, memory: Path) -> None:
    """What lay behind the cut is missed, what lies before it is exact; a save heals."""
    for pages in (0, 2, 100):
        trial = Trial(pristine, memory / "store")
        trial.store.close()
        for file in {place.file for place in trial.places}:
            with file.open("r+b") as opened:
                opened.truncate(pages * PAGE)
        trial.open()
        for chain in range(0, CHAINS, 8):
            blocks = trial.load(chain)
            ends = [p.offset + RECORD.slot_bytes for p in trial.places[chain * BLOCKS :][:BLOCKS]]
            whole = [end <= pages * PAGE for end in ends]
            assert blocks == (whole.index(False) if False in whole else BLOCKS)
            trial.engine.save(tokens_of(chain))
            assert trial.load(chain) == BLOCKS
        assert_at_rest(trial.store)
        trial.store.close()


@pytest.mark.slow
def test_a_bad_block_heals_and_the_prefix_before_it_stays(pristine: Path, tmp_path: Path) -> None:
    """Flip, miss, save, hit, and again after a restart."""
    random = np.random.default_rng(4)
    with Trial(pristine, tmp_path / "store", direct=True) as trial:
        for number in range(2):
            trial.places = trial.find_records()
            chosen = {chain: int(random.integers(BLOCKS)) for chain in range(number, CHAINS, 2)}
            bits = random.integers(0, HEADER_BITS + PAYLOAD_BITS, RECORDS).tolist()
            places = [chain * BLOCKS + block for chain, block in chosen.items()]
            trial.damage(lambda record, at, bits=bits: flip(record, bits[at]), places)
            for chain, block in chosen.items():
                assert trial.load(chain) == block  # the prefix, exact; then the miss
                _, saved = trial.engine.save(tokens_of(chain))
                assert (saved.present, saved.saved) == (block, BLOCKS - block)
                assert trial.load(chain) == BLOCKS
            assert trial.count("bad_blocks.disk") == (number + 1) * CHAINS // 2
            assert_at_rest(trial.store)
            trial.store.close()
            trial.open()
            assert {trial.load(chain) for chain in chosen} == {BLOCKS}
            trial.store.close()
            trial.open()


def test_the_layout_is_as_these_tests_assume() -> None:
    assert RecordFormat.of(LAYOUT).slot_bytes == 2 * PAGE
    assert RECORD.slot_bytes > PADDING_AT
