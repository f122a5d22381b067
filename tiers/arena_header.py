"""The bytes at the start of a host arena, format v1. Pure; no I/O.

    0             fixed part, 128 bytes (ARENA_HEADER); constant for the life of the arena
    128           sealed word: boot number, one more with every owner
    136           sealed word: 1 after a clean stop, 0 while an owner runs
    256           sealed words: slot_bytes / 4096 of each segment, 0 = no class [segments]
    ...           zeros up to a multiple of 4096, then the segments

A sealed word is a value in the low 32 bits and, above, a check of it and its place. It is one
aligned 8-byte store, so an owner killed at any instant leaves the old value or the new one.
"""

import numpy as np
import xxhash

from kvstore.tiers.record import align_up

MAGIC = b"KVARENA1"
VERSION = 1
STORE_ID_BYTES = 16
FIXED_BYTES = 128
BOOT_AT = 128
CLEAN_AT = 136
CLASSES_AT = 256
CHECKSUM_AT = 120
WORD_MAX = 0xFFFFFFFF
SEGMENTS_MAX = 1 << 24
ARENA_BYTES_MAX = 1 << 56

ARENA_HEADER = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "flags",
            "header_bytes",
            "file_bytes",
            "segment_bytes",
            "segments",
            "store_id",
            "checksum",
        ],
        "formats": ["S8", "<u2", "<u2", "<u4", "<u8", "<u8", "<u4", "V16", "<u8"],
        "offsets": [0, 8, 10, 12, 16, 24, 32, 40, CHECKSUM_AT],
        "itemsize": FIXED_BYTES,
    }
)


def header_bytes_of(segments: int) -> int:
    """Bytes before the first segment, a multiple of 4096."""
    return align_up(CLASSES_AT + 8 * segments)


def segments_in(capacity_bytes: int, segment_bytes: int) -> int:
    """How many segments fit into a capacity beside the header, which has a word for each."""
    # Each segment also takes its word; rounding the header up costs at most one segment more.
    segments = max(0, capacity_bytes - CLASSES_AT) // (segment_bytes + 8)
    while segments and header_bytes_of(segments) + segments * segment_bytes > capacity_bytes:
        segments -= 1
    return segments


def fixed_part(store_id: bytes, segments: int, segment_bytes: int) -> bytes:
    """The first 128 bytes of an arena. An arena fits an owner if its first 128 bytes are these."""
    header = np.zeros(1, ARENA_HEADER)
    header["magic"] = MAGIC
    header["version"] = VERSION
    header["header_bytes"] = header_bytes_of(segments)
    header["file_bytes"] = header_bytes_of(segments) + segments * segment_bytes
    header["segment_bytes"] = segment_bytes
    header["segments"] = segments
    header["store_id"] = np.void(store_id)
    header["checksum"] = xxhash.xxh3_64_intdigest(header.tobytes()[:CHECKSUM_AT])
    return header.tobytes()


def parse_fixed(head: bytes, store_id: bytes) -> tuple[int, int] | None:
    """Segments and segment_bytes of an arena of this store that begins with `head`, 128 bytes.

    Returns: (segments, segment_bytes) | None, for any other bytes.
    """
    if len(head) != FIXED_BYTES:
        return None
    header = np.frombuffer(head, ARENA_HEADER)[0]
    segments, segment_bytes = int(header["segments"]), int(header["segment_bytes"])
    if not 0 < segments <= SEGMENTS_MAX or segments * segment_bytes > ARENA_BYTES_MAX:
        return None
    same = fixed_part(store_id, segments, segment_bytes) == head
    return (segments, segment_bytes) if same else None


def seal_word(store_id: bytes, place: int, value: int) -> int:
    """The sealed word of a value, 0..WORD_MAX, that lies at byte `place` of the header."""
    framed = store_id + place.to_bytes(4, "little") + value.to_bytes(4, "little")
    return (xxhash.xxh3_64_intdigest(framed) & WORD_MAX) << 32 | value


def open_word(store_id: bytes, place: int, word: int) -> int:
    """The value of a sealed word; 0 for one that was never written or is damaged."""
    value = word & WORD_MAX
    return value if word == seal_word(store_id, place, value) else 0
