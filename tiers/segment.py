"""The first 4096 bytes of a segment file and of a volume: who owns it and what its slots are. Pure.

    0    magic          KVSEGMT1 or KVVOLUM1
    8    version        1
    12   store_id       16 bytes, of the whole store
    28   volume         number of this volume among `volumes`
    32   volumes        how many paths the store has
    36   segment        number among all volumes; 0 in a volume's header
    40   segment_bytes  size of every segment file, this header included
    48   slot_bytes     the segment's size class; 0 in a volume's header
    56   capacity_bytes what the volume may take at most; 0 in a segment's header
    4088 checksum       XXH3-64 of all before it

Slots follow at 4096, one after the other. All integers are little-endian.
"""

import re
import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

SEGMENT_MAGIC = b"KVSEGMT1"
VOLUME_MAGIC = b"KVVOLUM1"
VERSION = 1
HEADER_BYTES = 4096
STORE_ID_BYTES = 16
FIELDS = struct.Struct("<8sI16sIIIQQQ")
CHECKSUM = struct.Struct("<Q")
CHECKSUM_AT = HEADER_BYTES - CHECKSUM.size

VOLUME_FILE = "volume"
NAME = re.compile(r"([0-9a-f]{8})\.seg")


class FileHeaderFault(StrEnum):
    """What is wrong with a file's header; the first that applies."""

    MAGIC = "magic"
    VERSION = "version"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a segment, or of a volume (magic says which). Sizes in bytes."""

    magic: bytes
    store_id: bytes
    volume: int
    volumes: int
    segment_bytes: int
    segment: int = 0
    slot_bytes: int = 0
    capacity_bytes: int = 0

    def pack(self) -> bytes:
        """The header's 4096 bytes."""
        fields = FIELDS.pack(
            self.magic,
            VERSION,
            self.store_id,
            self.volume,
            self.volumes,
            self.segment,
            self.segment_bytes,
            self.slot_bytes,
            self.capacity_bytes,
        )
        page = fields.ljust(CHECKSUM_AT, b"\0")
        return page + CHECKSUM.pack(xxhash.xxh3_64_intdigest(page))


def parse_header(page: bytes, magic: bytes) -> FileHeader | FileHeaderFault:
    """Read a header of the given kind. Never raises, whatever the bytes are.

    Returns: the header | MAGIC | VERSION | CHECKSUM.
    """
    if len(page) != HEADER_BYTES or page[: len(magic)] != magic:
        return FileHeaderFault.MAGIC
    found, version, store_id, volume, volumes, segment, segment_bytes, slot_bytes, capacity = (
        FIELDS.unpack_from(page)
    )
    if version != VERSION:
        return FileHeaderFault.VERSION
    if not has_checksum(page):
        return FileHeaderFault.CHECKSUM
    return FileHeader(
        found, store_id, volume, volumes, segment_bytes, segment, slot_bytes, capacity
    )


def has_checksum(page: bytes) -> bool:
    """Whether a header of any version is whole: one that is not was damaged, and is not newer."""
    known: int = CHECKSUM.unpack_from(page, CHECKSUM_AT)[0]
    return known == xxhash.xxh3_64_intdigest(page[:CHECKSUM_AT])


def segment_name(segment: int) -> str:
    """The file name of a segment: eight hex digits."""
    return f"{segment:08x}.seg"


def segment_number(name: str) -> int | None:
    """The segment a file name stands for; None for any other name."""
    found = NAME.fullmatch(name)
    return int(found.group(1), 16) if found else None
