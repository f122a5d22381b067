"""Record format v1: the golden record byte for byte, every bit of a header, every field compared.

A change of the golden file is a change of the format: it needs a new version.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore.hashing.checksum import run_checksums
from kvstore.native import build
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import (
    ALIGN,
    CHECKSUM_AT,
    HEADER,
    HeaderFault,
    RecordFormat,
    align_up,
)

GOLDEN = Path(__file__).with_name("golden_record_v1.bin")
LAYOUT = Layout(5, (CacheGroup("full", 3, (100, 60), "int8"), CacheGroup("mla", 1, (40,), "int8")))
NAMESPACE = bytes(range(100, 132))
TOKENS = np.array([1, 2, 50_000, 2**31 - 1, 0], np.int32)


def headers_of(record: RecordFormat, count: int, first: int = 7) -> np.ndarray:
    """`count` headers whose fields all differ, unsealed."""
    numbers = np.arange(count * 16, dtype=np.int64).reshape(count, 16)
    tokens = np.arange(count * record.block_tokens, dtype=np.int32).reshape(
        count, record.block_tokens
    )
    return record.build(
        keys=(numbers % 251).astype(np.uint8),
        parents=(numbers % 241 + 1).astype(np.uint8),
        namespace=NAMESPACE,
        first_depth=3,
        first_generation=(first << 32) + 1,
        tokens=tokens,
        created_s=1_700_000_000,
    )


def golden_record() -> bytes:
    """The record that tests/tiers/golden_record_v1.bin holds."""
    record = RecordFormat.of(LAYOUT)
    payload = (np.arange(LAYOUT.payload_bytes) * 7 % 256).astype(np.uint8)
    header = headers_of(record, 1)
    record.tokens(header)[0] = TOKENS
    record.checksums(header)[0] = run_checksums(payload, LAYOUT.run_offsets, LAYOUT.run_lengths)
    header[0, 96:128] = np.arange(32)  # media digest
    record.seal(header)
    padding = align_up(record.payload_bytes) - record.payload_bytes
    return header.tobytes() + payload.tobytes() + bytes(padding)


def test_the_golden_record_is_what_is_written_byte_for_byte() -> None:
    golden = GOLDEN.read_bytes()
    assert golden_record() == golden
    with build.forced_fallback():
        assert golden_record() == golden


def test_the_golden_record_means_what_the_format_says() -> None:
    """Fields by hand: offsets and lengths as docs/formats.md gives them."""
    golden = GOLDEN.read_bytes()

    def number(at: int, size: int) -> int:
        return int.from_bytes(golden[at : at + size], "little")

    assert golden[:8] == b"KVBLOCK1"
    assert (number(8, 2), number(10, 2), number(12, 4), number(16, 8)) == (1, 0, 4096, 520)
    assert number(24, 8) == (7 << 32) + 1
    assert golden[32:48] == bytes(range(16)) and golden[48:64] == bytes(range(1, 17))
    assert golden[64:96] == NAMESPACE and golden[96:128] == bytes(range(32))
    assert (number(128, 2), number(130, 2), number(132, 4)) == (0, 0, 3)
    assert (number(136, 4), number(140, 4), number(144, 8)) == (5, 7, 1_700_000_000)
    assert golden[152:248] == bytes(96)
    assert [number(256 + 4 * at, 4) for at in range(5)] == TOKENS.tolist()
    assert golden[276:280] == bytes(4)  # The checksums are aligned to 8.
    payload = np.frombuffer(golden, np.uint8)[4096 : 4096 + 520]
    sums = run_checksums(payload, LAYOUT.run_offsets, LAYOUT.run_lengths)
    assert [number(280 + 8 * run, 8) for run in range(7)] == sums.tolist()
    assert number(248, 8) == xxh3_64_intdigest(golden[:248] + bytes(8) + golden[256:4096])
    assert golden[336:4096] == bytes(4096 - 336)
    assert len(golden) == 8192 and golden[4096 + 520 :] == bytes(4096 - 520)


@pytest.mark.parametrize("native", [True, False])
def test_every_flipped_bit_of_a_header_is_detected(native: bool) -> None:
    record = RecordFormat.of(LAYOUT)
    header = np.frombuffer(GOLDEN.read_bytes(), np.uint8)[: record.header_bytes].copy()
    assert record.check_header(header) is None
    faults = set()
    for bit in range(record.header_bytes * 8):
        header[bit // 8] ^= 1 << bit % 8
        fault = record.check_header(header)
        assert fault is not None, f"bit {bit}"
        faults.add(fault)
        header[bit // 8] ^= 1 << bit % 8
    assert faults == {HeaderFault.MAGIC, HeaderFault.VERSION, HeaderFault.CHECKSUM}
    many = np.repeat(header[None], 64, axis=0)
    many[np.arange(1, 64), np.arange(1, 64) * 61] ^= 16
    if native:
        sealed = record.sealed(many)
    else:
        with build.forced_fallback():
            sealed = record.sealed(many)
    assert sealed.tolist() == [True] + [False] * 63


def test_checking_many_headers_leaves_them_as_they_were() -> None:
    record = RecordFormat.of(LAYOUT)
    for count in (0, 1, 15, 16, 40):  # Few are checked one by one, many in a batch.
        headers = headers_of(record, count)
        record.seal(headers)
        assert all(record.check_header(header) is None for header in headers)
        before = headers.copy()
        assert record.sealed(headers).tolist() == [True] * count
        assert np.array_equal(headers, before)


def test_a_header_of_another_format_is_never_accepted() -> None:
    """A whole, sealed header is still refused where the reader expects other sizes."""
    record = RecordFormat(16, 60, 368_640)
    header = headers_of(record, 1)
    record.seal(header)
    others = [
        RecordFormat(15, 60, 368_640),
        RecordFormat(16, 61, 368_640),
        RecordFormat(16, 60, 368_639),
    ]
    for other in others:
        assert other.header_bytes == record.header_bytes
        assert other.check_header(header[0]) is HeaderFault.LENGTH
    assert record.check_header(header[0]) is None


def test_zeros_and_noise_are_no_header() -> None:
    record = RecordFormat.of(LAYOUT)
    assert record.check_header(np.zeros(4096, np.uint8)) is HeaderFault.MAGIC
    noise = np.random.default_rng(1).integers(0, 256, 4096, np.uint8)
    assert record.check_header(noise) is HeaderFault.MAGIC


def test_identity_names_the_first_field_that_differs() -> None:
    record = RecordFormat.of(LAYOUT)
    header = np.frombuffer(GOLDEN.read_bytes(), np.uint8)[: record.header_bytes]
    right = {
        "namespace": NAMESPACE,
        "key": bytes(range(16)),
        "parent": bytes(range(1, 17)),
        "generation": (7 << 32) + 1,
        "tokens": TOKENS,
    }

    def check(**changes: object) -> HeaderFault | None:
        return record.check_identity(header, **{**right, **changes})  # type: ignore[arg-type]

    assert check() is None
    assert check(namespace=bytes(32)) is HeaderFault.NAMESPACE
    assert check(key=bytes(16)) is HeaderFault.KEY
    assert check(parent=bytes(16)) is HeaderFault.PARENT
    assert check(tokens=TOKENS[::-1].copy()) is HeaderFault.TOKENS
    assert check(tokens=TOKENS[:4]) is HeaderFault.TOKENS
    assert check(generation=(7 << 32) + 2) is HeaderFault.GENERATION
    assert check(generation=1) is HeaderFault.GENERATION


@given(
    block_tokens=st.integers(1, 4096), runs=st.integers(1, 8192), payload=st.integers(1, 1 << 32)
)
@settings(max_examples=60, deadline=None)
def test_parts_of_a_record_never_overlap(block_tokens: int, runs: int, payload: int) -> None:
    record = RecordFormat(block_tokens, runs, payload)
    assert record.checksums_at % 8 == 0
    assert record.checksums_at >= HEADER.itemsize + 4 * block_tokens
    assert record.header_bytes >= record.checksums_at + 8 * runs
    assert record.header_bytes % ALIGN == 0 and record.slot_bytes % ALIGN == 0
    assert 0 <= record.slot_bytes - record.header_bytes - payload < ALIGN
    headers = headers_of(record, 2)
    record.tokens(headers)[:] = -1
    record.checksums(headers)[:] = 2**64 - 1
    record.seal(headers)
    fixed = record.fixed(headers)
    assert (fixed["magic"] == b"KVBLOCK1").all() and (fixed["payload_bytes"] == payload).all()
    assert not headers[:, record.checksums_at + 8 * runs :].any()
    assert all(record.check_header(header) is None for header in headers)


def test_fields_of_the_fixed_header_never_overlap() -> None:
    assert HEADER.fields is not None
    spans = sorted((field[1], field[1] + field[0].itemsize) for field in HEADER.fields.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1] == (CHECKSUM_AT, HEADER.itemsize)


def test_blocks_of_a_chain_count_up() -> None:
    record = RecordFormat.of(LAYOUT)
    fixed = record.fixed(headers_of(record, 4))
    assert fixed["depth"].tolist() == [3, 4, 5, 6]
    assert (fixed["generation"] - np.uint64(7 << 32)).tolist() == [1, 2, 3, 4]
    assert [bytes(key)[:2] for key in fixed["key"]] == [
        b"\0\1",
        b"\x10\x11",
        b"\x20\x21",
        b"\x30\x31",
    ]
