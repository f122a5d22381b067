"""The file `pins` in a store's home: which prefixes are to be kept, and until when.

It is replaced whole. Little-endian; a header of 64 bytes:

    0   magic "KVPINS01"      8  version, uint32       12  pins, uint32
    16  the next pin's id, uint64       24  zeros      56  checksum of all, with this field as zero

then for each pin, the oldest first, 72 bytes and the keys it does not share with an earlier pin:

    0   pin id, uint64                  8   namespace digest, 32 bytes
    40  ends, ms since 1970, uint64     48  ttl, ms, uint64
    56  slot_bytes, uint32              60  blocks, uint32
    64  place of the earlier pin whose first keys are this pin's too, uint32
    68  how many of these, uint32       72  the other keys, root first, 16 bytes each
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

MAGIC = b"KVPINS01"
VERSION = 1
HEADER = struct.Struct("<8sIIQ32xQ")
PIN = struct.Struct("<Q32sQQIIII")
KEY_BYTES = 16
FILE_MIN_BYTES = 12 << 10  # what even the smallest store has room for
FILE_MAX_BYTES = 4 << 20
FILE_IN_OVERHEAD_BYTES = 4 << 10
FILE_SHARE = 2048  # of the disk's capacity at most one byte in so many, between these two

Keys = npt.NDArray[np.uint8]  # [n, 16]


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin as the file has it. Times in seconds, expires_s since 1970; keys uint8 [n, 16]."""

    number: int
    namespace: bytes
    expires_s: float
    ttl_s: float
    slot_bytes: int
    keys: Keys


def file_bytes_max(disk_capacity_bytes: int) -> int:
    """How large the file may become in a store with a disk tier of this capacity."""
    return min(max(FILE_MIN_BYTES, disk_capacity_bytes // FILE_SHARE), FILE_MAX_BYTES)


def reserved_bytes(disk_capacity_bytes: int) -> int:
    """What the file and its successor may take beyond what a store sets aside for small files."""
    return 2 * (file_bytes_max(disk_capacity_bytes) - FILE_IN_OVERHEAD_BYTES)


def encoded_bytes(pins: int, keys: int) -> int:
    """Size of a file of so many pins with so many different keys."""
    return HEADER.size + pins * PIN.size + keys * KEY_BYTES


def encode(pins: list[PinRecord], next_number: int, limit_bytes: int) -> bytes:
    """The file's bytes. Where all do not fit the limit, the newest pins are left out."""
    parts: list[bytes] = []
    size, first_of = HEADER.size, dict[bytes, int]()
    for place, pin in enumerate(pins):
        data = pin.keys.tobytes()
        keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
        # A pin's keys are a chain, so those that were seen before are its first ones.
        shared = next((n for n, key in enumerate(keys) if key not in first_of), len(keys))
        other = first_of[keys[shared - 1]] if shared else 0
        size += PIN.size + (len(keys) - shared) * KEY_BYTES
        if size > limit_bytes:
            break
        first_of.update(dict.fromkeys(keys[shared:], place))
        times = round(pin.expires_s * 1000), round(pin.ttl_s * 1000)
        sizes = pin.slot_bytes, len(keys), other, shared
        parts.append(PIN.pack(pin.number, pin.namespace, *times, *sizes))
        parts.append(data[shared * KEY_BYTES :])
    count = len(parts) // 2
    body = b"".join(parts)
    whole = HEADER.pack(MAGIC, VERSION, count, next_number, 0) + body
    checksum = xxhash.xxh3_64_intdigest(whole)
    return HEADER.pack(MAGIC, VERSION, count, next_number, checksum) + body


def decode(data: bytes) -> tuple[list[PinRecord], int]:
    """The pins of a file, and the next pin's id.

    Raises ValueError, in a few words, for bytes that `encode` did not make.
    """
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is no list of pins")
    _, version, count, next_number, checksum = HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"it has version {version}, this kvstore reads {VERSION}")
    body = data[HEADER.size :]
    whole = HEADER.pack(MAGIC, version, count, next_number, 0) + body
    if xxhash.xxh3_64_intdigest(whole) != checksum:
        raise ValueError("its checksum is wrong")
    pins: list[PinRecord] = []
    at = 0
    for _ in range(count):
        if len(body) - at < PIN.size:
            raise ValueError("it ends in the middle of a pin")
        pin = PIN.unpack_from(body, at)
        number, namespace, expires_ms, ttl_ms, slot_bytes, blocks, other, shared = pin
        at += PIN.size
        end = at + (blocks - shared) * KEY_BYTES
        if shared > blocks or end > len(body) or not blocks or not slot_bytes:
            raise ValueError("a pin's sizes make no sense")
        if shared and (other >= len(pins) or shared > len(pins[other].keys)):
            raise ValueError("a pin shares keys with none before it")
        own = np.frombuffer(body, np.uint8, end - at, at).reshape(-1, KEY_BYTES)
        keys = np.concatenate([pins[other].keys[:shared], own]) if shared else own.copy()
        times = expires_ms / 1000, ttl_ms / 1000
        pins.append(PinRecord(number, namespace, *times, slot_bytes, keys))
        at = end
    if at != len(body):
        raise ValueError("something follows the last pin")
    return pins, next_number
