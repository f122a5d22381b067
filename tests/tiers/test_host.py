"""Host slots: round trips, capacity, and what a new owner finds after its predecessor was killed.

Run as a program, this file is the owner that gets killed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvstore.native import build
from kvstore.tiers.errors import ClosedError
from kvstore.tiers.host import HostTier
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import ALIGN, RecordFormat

MIB = 1 << 20
STORE = bytes(range(16))
CAPACITY = 4 * MIB
SEGMENT = (CAPACITY - 4096) // 3 // 4096 * 4096
# Three formats in two classes: the first two need slots of the same size.
SMALL = RecordFormat(16, 8, 5000)
SMALL_TOO = RecordFormat(32, 2, 8192)
LARGE = RecordFormat(64, 1000, 50_001)


def open_host(directory: Path, **settings: object) -> HostTier:
    chosen = {"store_id": STORE, "persist": True, "directory": directory, **settings}
    return HostTier(CAPACITY, SEGMENT, **chosen)  # type: ignore[arg-type]


def contents(number: int, record: RecordFormat) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The key, tokens and payload of block `number`: all of them follow from it."""
    rng = np.random.default_rng(number)
    key = number.to_bytes(16, "little")
    tokens = rng.integers(0, 50_000, record.block_tokens, np.int32)
    return key, tokens, rng.integers(0, 256, record.payload_bytes, np.uint8)


def header_of(number: int, record: RecordFormat) -> np.ndarray:
    key, tokens, _ = contents(number, record)
    headers = record.build(
        keys=np.frombuffer(key, np.uint8)[None],
        parents=np.zeros((1, 16), np.uint8),
        namespace=bytes(32),
        first_depth=0,
        first_generation=number,
        tokens=tokens[None],
        created_s=0,
    )
    record.seal(headers)
    return headers


def write_payload(host: HostTier, slot: int, number: int, record: RecordFormat) -> None:
    payload = contents(number, record)[2]
    view = host.record_view(slot, record.slot_bytes)
    at = record.header_bytes
    view[at : at + record.payload_bytes] = payload.data


def save(host: HostTier, number: int, record: RecordFormat) -> int:
    """Store block `number`; the slot, or -1 when there is none."""
    slots = host.reserve(record.slot_bytes, 1)
    if not len(slots):
        return -1
    write_payload(host, int(slots[0]), number, record)
    host.publish(slots, header_of(number, record))
    return int(slots[0])


def holds(host: HostTier, slot: int, number: int, record: RecordFormat) -> bool:
    """Whether a slot has exactly block `number`."""
    header = host.header_view(slot, record.header_bytes)
    if record.check_header(header) is not None:
        return False
    view = host.record_view(slot, record.slot_bytes)[record.header_bytes :]
    payload = bytes(view[: record.payload_bytes])
    same = header.tobytes() == header_of(number, record).tobytes()
    return same and payload == contents(number, record)[2].tobytes()


def found(host: HostTier) -> dict[int, tuple[int, RecordFormat]]:
    """Block number -> slot and format, of what scan() finds; its tokens are checked here."""
    result: dict[int, tuple[int, RecordFormat]] = {}
    for part in host.scan():
        numbers = part.fixed["generation"].tolist()
        for slot, number, tokens in zip(part.slots.tolist(), numbers, part.tokens, strict=True):
            assert np.array_equal(tokens, contents(number, part.format)[1])
            assert number not in result
            result[number] = slot, part.format
    return result


def abandon(host: HostTier) -> None:
    """As if the owner had died: its lock goes, nothing is written."""
    assert host.arena._file is not None
    os.close(host.arena._file.lock)


# --- one owner


def test_round_trips_over_random_classes_and_evictions() -> None:
    host = open_host(Path("/dev/shm"), persist=False)
    rng = random.Random(3)
    stored: dict[int, tuple[int, RecordFormat]] = {}
    for number in range(600):
        record = rng.choice([SMALL, SMALL_TOO, LARGE])
        slot = save(host, number, record)
        if slot >= 0:
            stored[number] = slot, record
        if slot < 0 or rng.random() < 0.08:
            gone = rng.sample(sorted(stored), min(len(stored), 8))
            host.release(np.array([stored.pop(at)[0] for at in gone], np.int64))
        if number % 100 == 0:
            host.check_integrity()
    assert len(stored) > 50
    assert all(holds(host, slot, number, record) for number, (slot, record) in stored.items())
    assert host.blocks == len(stored)
    assert host.used_bytes == sum(record.slot_bytes for _, record in stored.values())
    host.close(keep=False)


def test_addresses_and_views_are_the_same_memory() -> None:
    host = open_host(Path("/dev/shm"), persist=False)
    slots = host.reserve(LARGE.slot_bytes, 3)
    addresses = host.payload_addresses(slots, LARGE.header_bytes)
    for slot, address in zip(slots.tolist(), addresses.tolist(), strict=True):
        view = np.frombuffer(host.record_view(slot, LARGE.slot_bytes), np.uint8)
        assert view.ctypes.data + LARGE.header_bytes == address
        assert view.ctypes.data % ALIGN == 0 and len(view) == LARGE.slot_bytes
        header = host.header_view(slot, LARGE.header_bytes)
        assert header.ctypes.data == view.ctypes.data and len(header) == LARGE.header_bytes
    assert len(set(addresses.tolist())) == 3
    host.close(keep=False)


def test_capacity_is_exact_and_a_full_tier_gives_fewer_slots() -> None:
    host = open_host(Path("/dev/shm"), persist=False)
    assert host.capacity_bytes == CAPACITY
    assert host.reserve(SMALL.slot_bytes, 0).tolist() == []
    slots = host.reserve(SMALL.slot_bytes, 10_000)
    # Nearly all of the capacity is slots: the header and one partial slot a segment are not.
    assert CAPACITY - host.arena.segments * SMALL.slot_bytes - 8192 < host.used_bytes
    assert host.used_bytes <= host.allocated_bytes <= CAPACITY
    assert os.fstat(host.arena.fd).st_size <= CAPACITY
    assert os.fstat(host.arena.fd).st_blocks * 512 <= CAPACITY
    assert host.reserve(SMALL.slot_bytes, 1).tolist() == []
    assert host.reserve(LARGE.slot_bytes, 1).tolist() == []
    host.release(slots[5:9])
    assert sorted(host.reserve(SMALL.slot_bytes, 9).tolist()) == slots[5:9].tolist()
    host.check_integrity()
    host.close(keep=False)


def test_a_machine_without_memory_is_a_full_tier_and_heals() -> None:
    class Full(FileIo):
        full = True

        def allocate(self, fd: int, size: int, offset: int = 0) -> None:
            if self.full and offset:
                raise OSError(28, "No space left on device")
            super().allocate(fd, size, offset)

    io = Full()
    host = open_host(Path("/dev/shm"), persist=False, io=io)
    assert save(host, 1, SMALL) == -1
    assert host.used_bytes == 0 and host.slab.allocated_bytes() == 0
    io.full = False
    assert holds(host, save(host, 1, SMALL), 1, SMALL)
    host.check_integrity()
    host.close(keep=False)


def test_misuse_is_refused_and_changes_nothing() -> None:
    host = open_host(Path("/dev/shm"), persist=False)
    slot = save(host, 1, SMALL)
    with pytest.raises(ValueError, match="not occupied"):
        host.release(np.array([slot, slot + 1], np.int64))
    assert holds(host, slot, 1, SMALL)
    assert not host.fits(host.arena.segment_bytes + 4096)
    with pytest.raises(ValueError, match="do not fit"):
        host.reserve(host.arena.segment_bytes + 4096, 1)
    with pytest.raises(ValueError, match="as many headers"):
        host.publish(np.array([slot], np.int64), header_of(1, SMALL)[:0])
    with pytest.raises(ValueError, match="holds occupied slots"):
        host.reassign(host.slab.segment_of(slot), LARGE.slot_bytes)
    host.close(keep=False)
    with pytest.raises(ClosedError, match="open the store again"):
        host.reserve(SMALL.slot_bytes, 1)
    with pytest.raises(ClosedError):
        host.record_view(slot, SMALL.slot_bytes)


# --- the next owner


@pytest.mark.parametrize("native", [True, False])
def test_a_new_owner_finds_what_was_published_and_only_that(tmp_path: Path, native: bool) -> None:
    host = open_host(tmp_path)
    assert not host.taken_over and host.scan() == []
    slots = {number: save(host, number, SMALL) for number in range(20)}
    slots |= {number: save(host, number, SMALL_TOO) for number in range(20, 30)}
    slots |= {number: save(host, number, LARGE) for number in range(30, 40)}
    assert SMALL.slot_bytes == SMALL_TOO.slot_bytes
    host.release(np.array([slots.pop(3), slots.pop(25), slots.pop(39)], np.int64))
    only_reserved = int(host.reserve(LARGE.slot_bytes, 1)[0])
    write_payload(host, only_reserved, 98, LARGE)
    before_its_magic = int(host.reserve(SMALL.slot_bytes, 1)[0])
    write_payload(host, before_its_magic, 99, SMALL)
    header = header_of(99, SMALL)[0]
    host.header_view(before_its_magic, SMALL.header_bytes)[8:] = header[8:]
    abandon(host)

    heir = open_host(tmp_path)
    assert heir.taken_over
    with pytest.raises(ValueError, match="call scan"):
        heir.reserve(SMALL.slot_bytes, 1)
    if native:
        blocks = found(heir)
    else:
        with build.forced_fallback():
            blocks = found(heir)
    assert {number: slot for number, (slot, _) in blocks.items()} == slots
    assert all(holds(heir, slot, number, record) for number, (slot, record) in blocks.items())
    assert heir.blocks == len(slots) and heir.scan() == []
    heir.check_integrity()
    heir.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_of_a_header_hides_that_block_alone(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    first, second = save(host, 1, SMALL), save(host, 2, SMALL)
    bits = [*range(0, 256 * 8, 5), *range(256 * 8, SMALL.header_bytes * 8, 997)]
    for bit in bits:
        header = host.header_view(first, SMALL.header_bytes)
        header[bit // 8] ^= 1 << bit % 8
        abandon(host)
        host = open_host(tmp_path)
        assert found(host) == {2: (second, SMALL)}, f"bit {bit}"
        assert save(host, 1, SMALL) == first  # The torn slot is free again.
    host.close(keep=False)


def test_lengths_that_cannot_be_are_not_followed(tmp_path: Path) -> None:
    """Headers whose checksum is right and whose sizes are not those of their slot."""
    host = open_host(tmp_path)
    good = save(host, 1, SMALL)
    lies = [("payload_bytes", v) for v in (0, 4096, 8193, 1 << 40, 2**64 - 1)]
    lies += [("header_bytes", v) for v in (0, 8192, 2**32 - 4096)]
    lies += [("block_tokens", v) for v in (0, 4097, 2**32 - 1)]
    lies += [("runs", v) for v in (0, 8193, 2**32 - 1)]
    lies += [("version", 0), ("version", 2)]
    for field, value in lies:
        headers = header_of(7, SMALL)
        SMALL.fixed(headers)[field] = value
        SMALL.seal(headers)
        slots = host.reserve(SMALL.slot_bytes, 1)
        host.publish(slots, headers)
    abandon(host)
    heir = open_host(tmp_path)
    assert found(heir) == {1: (good, SMALL)}
    heir.check_integrity()
    heir.close(keep=False)


def test_old_bytes_are_no_blocks_after_a_segment_changed_its_class(tmp_path: Path) -> None:
    """A payload may hold bytes that look like a header where another class has its headers."""
    host = open_host(tmp_path)
    segments = host.arena.segments
    slots = np.concatenate([host.reserve(LARGE.slot_bytes, 1000)])
    fake = header_of(5, SMALL).tobytes()
    for slot in slots.tolist():
        view = host.record_view(slot, LARGE.slot_bytes)
        for at in range(LARGE.header_bytes, LARGE.slot_bytes - len(fake) + 1, ALIGN):
            view[at : at + len(fake)] = fake
    host.release(slots)
    for segment in range(segments):
        host.reassign(segment, SMALL.slot_bytes)
    kept = save(host, 1, SMALL)
    host.check_integrity()
    abandon(host)
    heir = open_host(tmp_path)
    assert found(heir) == {1: (kept, SMALL)}
    heir.check_integrity()
    heir.close(keep=False)


def test_a_damaged_class_word_costs_its_segment_alone(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    small, large = save(host, 1, SMALL), save(host, 2, LARGE)
    host.arena.buffer[256 + 8 * host.slab.segment_of(small)] ^= 1
    abandon(host)
    heir = open_host(tmp_path)
    assert found(heir) == {2: (large, LARGE)}
    assert save(heir, 3, SMALL) == small  # Its segment is given out again.
    heir.check_integrity()
    heir.close(keep=False)


def test_a_kept_arena_outlives_a_clean_stop_and_a_private_one_does_not(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    slot = save(host, 1, LARGE)
    host.close(keep=True)
    heir = open_host(tmp_path)
    assert heir.arena.was_clean and found(heir) == {1: (slot, LARGE)}
    heir.close(keep=False)
    private = open_host(tmp_path, persist=False)
    save(private, 1, LARGE)
    assert list(tmp_path.iterdir()) == []
    private.close(keep=True)
    assert list(tmp_path.iterdir()) == []


# --- kill -9


def owner_to_be_killed(directory: Path, seed: int) -> None:
    """Takes the arena over and saves and releases blocks until it is killed."""
    host = open_host(directory)
    stored = {number: slot for number, (slot, _) in found(host).items()}
    rng = random.Random(seed)
    number = max(stored, default=0)
    for turn in count():
        if turn == 20:
            print("ready", flush=True)
        number += 1
        record = (SMALL, SMALL_TOO, LARGE)[number % 3]
        slot = save(host, number, record)
        if slot >= 0:
            stored[number] = slot
        if slot < 0 or rng.random() < 0.1:
            gone = rng.sample(sorted(stored), min(len(stored), 6))
            host.release(np.array([stored.pop(at) for at in gone], np.int64))


@pytest.mark.slow
def test_after_kill_9_at_random_moments_every_block_found_is_whole(tmp_path: Path) -> None:
    delays = random.Random(11)
    largest, total = 0, 0
    for round_number in range(6):
        command = [sys.executable, __file__, str(tmp_path), str(round_number)]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        time.sleep(delays.uniform(0.01, 0.15))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
        heir = open_host(tmp_path)
        assert heir.taken_over and not heir.arena.was_clean
        blocks = found(heir)
        assert all(holds(heir, slot, number, record) for number, (slot, record) in blocks.items())
        heir.check_integrity()
        assert heir.arena.boot == 2 * round_number + 2
        total += len(blocks)
        assert max(blocks) > largest  # What it saved last is among them.
        largest = max(blocks)
        heir.close(keep=True)
    assert total > 6 * 10
    heir = open_host(tmp_path)
    heir.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_what_was_published_when_the_owner_stood_still_is_all_found(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import test_host as t\n"
        "host = t.open_host(Path(sys.argv[1]))\n"
        "for number in range(30): t.save(host, number, t.LARGE if number % 2 else t.SMALL)\n"
        "slot = int(host.reserve(t.SMALL.slot_bytes, 1)[0])\n"
        "t.write_payload(host, slot, 77, t.SMALL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = str(Path(__file__).parent)
    owner = subprocess.run([sys.executable, "-c", program, str(tmp_path), folder], check=False)
    assert owner.returncode == -signal.SIGKILL
    heir = open_host(tmp_path)
    blocks = found(heir)
    assert sorted(blocks) == list(range(30))
    assert all(holds(heir, slot, number, record) for number, (slot, record) in blocks.items())
    heir.close(keep=False)


if __name__ == "__main__":
    owner_to_be_killed(Path(sys.argv[1]), int(sys.argv[2]))
