"""The small tables of a catalogue: whose it is, its segments, its namespaces. Pure."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

from kvstore.tiers.errors import StoreError

FORMAT = 1
NAMESPACES_MAX = 1024
LAYOUT_BYTES_MAX = 64 * 1024
LABEL_BYTES_MAX = 256

IDENTITY = struct.Struct("<I16sIIQ")
SEGMENT = struct.Struct("<QI")
NUMBER = struct.Struct(">I")
DIGEST_BYTES = 32
LABEL_AT = DIGEST_BYTES + NUMBER.size


class SegmentState(StrEnum):
    """What a segment is good for."""

    USABLE = "usable"
    QUARANTINED = "quarantined"  # a sync of it failed; its file goes when nobody reads it


@dataclass(frozen=True, slots=True)
class Identity:
    """Which volume of which store a catalogue belongs to."""

    store_id: bytes
    volume: int
    volumes: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """What its rows' keys stand for. layout: Layout.canonical(), or b"" where it was lost."""

    digest: bytes
    layout: bytes
    label: str

    def pack(self) -> bytes:
        """As it lies in the catalogue: with a checksum of its own."""
        label = self.label.encode()[:LABEL_BYTES_MAX]
        body = self.digest + NUMBER.pack(len(label)) + label + self.layout
        return struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body

    @classmethod
    def parse(cls, value: bytes) -> "Namespace | None":
        """The namespace in these bytes; None when they are damaged."""
        body = value[8:]
        if len(body) < LABEL_AT or struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) != value[:8]:
            return None
        end = LABEL_AT + NUMBER.unpack_from(body, DIGEST_BYTES)[0]
        return cls(body[:DIGEST_BYTES], body[end:], body[LABEL_AT:end].decode(errors="replace"))


def parse_namespaces(table: Mapping[int, bytes]) -> dict[int, Namespace]:
    """Rows of a namespaces table; damaged ones, and numbers that none is given, are left out."""
    parsed = {
        number: Namespace.parse(value)
        for number, value in table.items()
        if 1 <= number <= NAMESPACES_MAX
    }
    return {number: namespace for number, namespace in parsed.items() if namespace is not None}


def refuse_identity(value: bytes | None, wanted: Identity | None, directory: Path) -> None:
    if value is None or len(value) < NUMBER.size:
        raise StoreError(f"the catalogue in {directory} is damaged; it names no store")
    version = struct.unpack_from("<I", value)[0]
    if version != FORMAT or len(value) != IDENTITY.size:
        age = "a newer" if version > FORMAT else "an older"
        raise StoreError(
            f"the catalogue in {directory} was written by {age} kvstore (format {version}, this "
            f"one reads {FORMAT}); use that version, or give another directory"
        )
    found = Identity(*IDENTITY.unpack(value)[1:])
    if wanted is not None and found != wanted:
        raise StoreError(
            f"the catalogue in {directory} belongs to another store; give each store its own "
            "directories"
        )
