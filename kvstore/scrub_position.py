"""How far a scrub came: the file `scrub` in a store's home. It only saves work.

    0   magic      KVSCRUB1
    8   version    1
    12  store id   16 bytes
    28  volume, segment, index   the next record to read; all before it were read
    40  blocks, bytes, unchecked   uint64 each, what was read so far
    64  seconds    float64
    72  bad        how many entries follow
    76  entries    segment, index, number of the reason: of blocks that were bad when read
    ..  checksum   XXH3-64 of all before it

It is replaced by renaming and never synced: after a power loss a scrub starts from the beginning.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore.bad_block import BadReason
from kvstore.home import STORE_ID_BYTES
from kvstore.tiers.io import FileIo

SCRUB_FILE = "scrub"
MAGIC = b"KVSCRUB1"
VERSION = 1
HEAD = struct.Struct("<8sI16sIIIQQQdI")
ENTRY = struct.Struct("<III")
CHECKSUM = struct.Struct("<Q")
FILE_BYTES_MAX = 8192
ENTRIES_MAX = (FILE_BYTES_MAX - HEAD.size - CHECKSUM.size) // ENTRY.size  # Later ones are lost.
REASONS = tuple(BadReason)


@dataclass
class Position:
    """Where a scrub is, and its sums so far. bad: (segment, index, reason)."""

    volume: int = 0
    segment: int = 0
    index: int = 0
    blocks: int = 0
    read_bytes: int = 0
    unchecked: int = 0
    seconds: float = 0.0
    bad: list[tuple[int, int, BadReason]] = field(default_factory=list)

    def pack(self, store_id: bytes) -> bytes:
        """As it lies in the file."""
        entries = self.bad[:ENTRIES_MAX]
        head = HEAD.pack(
            MAGIC,
            VERSION,
            store_id,
            self.volume,
            self.segment,
            self.index,
            self.blocks,
            self.read_bytes,
            self.unchecked,
            self.seconds,
            len(entries),
        )
        body = head + b"".join(ENTRY.pack(s, i, REASONS.index(why)) for s, i, why in entries)
        return body + CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, data: bytes, store_id: bytes) -> "Position | None":
        """The position in these bytes; None for a damaged one, or another store's."""
        body = data[: -CHECKSUM.size]
        if len(store_id) != STORE_ID_BYTES or len(body) < HEAD.size:
            return None
        if CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != data[-CHECKSUM.size :]:
            return None
        magic, version, store, volume, segment, index, *sums, count = HEAD.unpack_from(body)
        entries = body[HEAD.size :]
        if (magic, version, store) != (MAGIC, VERSION, store_id):
            return None
        if len(entries) != count * ENTRY.size:
            return None
        bad = list(ENTRY.iter_unpack(entries))
        if any(number >= len(REASONS) for _, _, number in bad):
            return None
        blocks, read_bytes, unchecked, seconds = sums
        named = [(s, i, REASONS[number]) for s, i, number in bad]
        return cls(volume, segment, index, blocks, read_bytes, unchecked, seconds, named)


def read_position(directory: Path, store_id: bytes, io: FileIo) -> Position | None:
    """What the last run left in a store's home; None where nothing can be used."""
    try:
        fd = io.open(directory / SCRUB_FILE)
        try:
            data = bytearray(min(io.size(fd), FILE_BYTES_MAX))
            io.pread(fd, data, 0)
        finally:
            io.close(fd)
    except OSError:
        return None
    return Position.parse(bytes(data), store_id)


def write_position(directory: Path, position: Position, store_id: bytes, io: FileIo) -> bool:
    """Replace the file. Returns: whether that was possible; a scrub goes on without it."""
    new = directory / (SCRUB_FILE + ".new")
    try:
        fd = io.open(new, create=True, write=True)
        try:
            io.truncate(fd, 0)
            io.pwrite(fd, position.pack(store_id), 0)
        finally:
            io.close(fd)
        io.rename(new, directory / SCRUB_FILE)
    except OSError:
        return False
    return True


def remove_position(directory: Path, io: FileIo) -> None:
    """A run came to its end: the next begins at the beginning."""
    try:
        io.unlink(directory / SCRUB_FILE)
    except OSError:
        return  # There was none, or it cannot be removed; the next run says --resume or not.
