"""Checksums of runs: the standard XXH3-64, and every flipped byte is found."""

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from kvstore.hashing.checksum import run_checksums, verify_runs

Ints = npt.NDArray[np.int64]


def extents(*values: int) -> Ints:
    return np.array(values, np.int64)


def test_checksums_are_xxh3_64_of_each_run(form: str) -> None:
    source = np.random.default_rng(1)
    payload = source.integers(0, 256, 300_000).astype(np.uint8)
    lengths = np.concatenate([np.arange(700), source.integers(700, 60_000, 50)]).astype(np.int64)
    offsets = np.array([source.integers(0, len(payload) - n + 1) for n in lengths], np.int64)
    found = run_checksums(payload, offsets, lengths)
    assert found.dtype == np.uint64
    for at, size, checksum in zip(offsets, lengths, found, strict=True):
        assert xxhash.xxh3_64_intdigest(payload[at : at + size]) == checksum, (at, size)


def test_a_flipped_bit_is_found_in_the_run_that_has_it(form: str) -> None:
    payload = np.random.default_rng(2).integers(0, 256, 5000).astype(np.uint8)
    offsets, lengths = extents(0, 1, 241, 1300, 4999), extents(1, 240, 1059, 3699, 1)
    expected = run_checksums(payload, offsets, lengths)
    assert verify_runs(payload, offsets, lengths, expected) == -1
    for run, (at, size) in enumerate(zip(offsets, lengths, strict=True)):
        for byte in {at, at + size // 2, at + size - 1}:
            payload[byte] ^= 4
            assert verify_runs(payload, offsets, lengths, expected) == run
            payload[byte] ^= 4
    payload[[1, 4999]] ^= 1
    assert verify_runs(payload, offsets, lengths, expected) == 1


def test_no_runs_are_all_good(form: str) -> None:
    empty = extents()
    assert verify_runs(np.zeros(0, np.uint8), empty, empty, np.zeros(0, np.uint64)) == -1


def test_a_payload_may_be_read_only(form: str) -> None:
    payload = np.frombuffer(b"kv" * 600, np.uint8)
    found = run_checksums(payload, extents(0), extents(1200))
    assert found.tolist() == [xxhash.xxh3_64_intdigest(b"kv" * 600)]


LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        (extents(0), extents(101)),
        (extents(-1), extents(5)),
        (extents(0), extents(-1)),
        (extents(100), extents(1)),
        (extents(LARGEST), extents(LARGEST)),
        (extents(0, 1), extents(1)),
        (extents(0).astype(np.int32), extents(1)),
        (extents(0, 0, 0, 0)[::2], extents(1, 1)),
    ],
)
def test_runs_outside_the_payload_are_refused(form: str, offsets: Ints, lengths: Ints) -> None:
    with pytest.raises(ValueError):
        run_checksums(np.zeros(100, np.uint8), offsets, lengths)


@pytest.mark.parametrize("payload", [np.zeros(9, np.int8), np.zeros((3, 3), np.uint8)])
def test_other_payloads_are_refused(form: str, payload: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError):
        run_checksums(payload, extents(0), extents(1))


def test_each_run_needs_a_checksum(form: str) -> None:
    with pytest.raises(ValueError):
        verify_runs(np.zeros(9, np.uint8), extents(0), extents(1), np.zeros(2, np.uint64))
