"""Blocks for tests of the disk tier: the bytes of a block follow from its number."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.hashing.checksum import run_checksums
from kvstore.tiers.catalogue_row import Rows, rows_of, slots_of_rows
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_outcomes import NO_SLOTS, Slots, WriteFailed, Written
from kvstore.tiers.disk_start import Loaded
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.record_read import RecordCheck

STORE = bytes(range(16))
NAMESPACE = bytes(range(32))
MIB = 1 << 20
SEGMENT = 128 << 10
SMALL = Layout(16, (CacheGroup("full", 2, (1000, 1000), "uint8"),))  # 8 KiB slots
LONGER = Layout(40, (CacheGroup("full", 1, (2000, 1001), "uint8"),))  # 8 KiB slots too
LARGE = Layout(16, (CacheGroup("opaque", 700, (20,), "page", format="x"),))  # a header of 2 pages


def key_of(number: int) -> bytes:
    """The key of block `number`."""
    return number.to_bytes(16, "little")


@dataclass(frozen=True)
class Block:
    """A sealed record as it lies in a host slot."""

    layout: Layout
    header: np.ndarray[Any, np.dtype[np.uint8]]
    record: memoryview


def block(number: int, layout: Layout = SMALL, generation: int | None = None) -> Block:
    """Block `number`; its parent is block `number - 1`."""
    record = RecordFormat.of(layout)
    rng = np.random.default_rng(number)
    payload = rng.integers(0, 256, record.payload_bytes, np.uint8)
    headers = record.build(
        keys=np.frombuffer(key_of(number), np.uint8)[None],
        parents=np.frombuffer(key_of(max(0, number - 1)), np.uint8)[None],
        namespace=NAMESPACE,
        first_depth=number,
        first_generation=number if generation is None else generation,
        tokens=rng.integers(0, 50_000, (1, record.block_tokens), np.int32),
        created_s=1_700_000_000,
    )
    record.checksums(headers)[0] = run_checksums(payload, layout.run_offsets, layout.run_lengths)
    record.seal(headers)
    buffer = aligned_buffer(record.slot_bytes)
    buffer[: record.header_bytes] = memoryview(headers[0])
    buffer[record.header_bytes : record.header_bytes + record.payload_bytes] = memoryview(payload)
    return Block(layout, headers[0], buffer)


@dataclass
class Rig:
    """A tier that is loaded, and what it found."""

    tier: DiskTier
    loaded: Loaded
    name: int = 0

    def reserve(self, count: int, layout: Layout = SMALL, near: int | None = None) -> Slots:
        size = RecordFormat.of(layout).slot_bytes
        return self.tier.reserve(size, count, near=near, block_tokens=layout.block_tokens)

    def write(
        self, numbers: Sequence[int], layout: Layout = SMALL, remove: Slots = NO_SLOTS
    ) -> tuple[Slots, Written | WriteFailed]:
        """Reserve slots for these blocks and write them as one group."""
        slots = self.reserve(len(numbers), layout)
        assert len(slots) == len(numbers), "the tier is full"
        return slots, self.put(slots, [block(n, layout) for n in numbers], remove)

    def put(
        self, slots: Slots, blocks: list[Block], remove: Slots = NO_SLOTS
    ) -> Written | WriteFailed:
        """Write these blocks to these slots as one group."""
        record = RecordFormat.of(blocks[0].layout)
        rows = rows_of(
            record, np.stack([b.header for b in blocks]), slots, self.name, self.tier.per
        )
        return self.tier.write_group(slots, [b.record for b in blocks], rows, remove)

    def good(self, slot: int, number: int, layout: Layout = SMALL) -> bool:
        """Whether the slot holds exactly block `number`."""
        wanted = block(number, layout)
        buffer = aligned_buffer(len(wanted.record))
        fault = self.tier.read_record(slot, buffer, RecordCheck(layout))
        return fault is None and buffer == wanted.record


def open_rig(paths: Path | list[Path], io: FileIo | None = None, **settings: Any) -> Rig:
    """A tier over one or several paths, loaded."""
    many = paths if isinstance(paths, list) else [paths]
    chosen: dict[str, Any] = {"capacity_bytes": 3 * MIB, "segment_bytes": SEGMENT, **settings}
    capacity, segment = chosen.pop("capacity_bytes"), chosen.pop("segment_bytes")
    tier = DiskTier(many, capacity, segment, io or FileIo(), **{"store_id": STORE, **chosen})
    try:
        rig = Rig(tier, tier.load())
    except BaseException:
        tier.close()
        raise
    number = tier.namespace_number(NAMESPACE, SMALL.canonical(), "test")
    assert number is not None
    rig.name = number
    return rig


def fill(rig: Rig, layout: Layout = SMALL, first: int = 0) -> dict[int, int]:
    """Write groups until no slot is left. Returns: number -> slot."""
    stored: dict[int, int] = {}
    for number in count(first, 16):
        slots = rig.reserve(16, layout)
        numbers = range(number, number + len(slots))
        if len(slots):
            blocks = [block(n, layout) for n in numbers]
            assert isinstance(rig.put(slots, blocks), Written)
            stored.update(zip(numbers, slots.tolist(), strict=True))
        if len(slots) < 16:
            return stored
    return stored


def found_blocks(rig: Rig) -> dict[int, int]:
    """The number of each block that a start found, and its slot."""
    found: dict[int, int] = {}
    for rows in rig.loaded.rows.values():
        for row, slot in zip(rows, slots_of_rows(rows, rig.tier.per).tolist(), strict=True):
            found[int.from_bytes(bytes(row["key"]), "little")] = slot
    return found


def count_rows(rows: dict[int, Rows]) -> int:
    """How many rows a start found."""
    return sum(map(len, rows.values()))


@dataclass
class FaultyIo(FileIo):
    """File calls that fail when told to. `calls` is what was called, in order.

    fail: given a call's name, says whether it fails, and with which errno (0: not).
    """

    fail: Callable[[str], int] = lambda name: 0
    calls: list[str] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        number = self.fail(name)
        if number:
            raise OSError(number, errno.errorcode[number])

    def pread(self, fd: int, buffer: Any, offset: int) -> int:
        self._call("pread")
        return super().pread(fd, buffer, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> None:
        self._call("pwritev")
        super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        self._call("allocate")
        super().allocate(fd, size, offset)
