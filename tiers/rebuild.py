"""Rows from the slots' own headers, for a volume whose catalogue was lost or damaged.

A slot that was freed still has its old header, so a block that was evicted may come back: it is the
same block, and its payload is verified before it is used. One that was invalidated must not: the
caller says below which generation. Only headers are read.
"""

from collections.abc import Callable

import numpy as np

from kvstore.tiers.catalogue_row import Rows, rows_of, slots_of_rows
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import BLOCK_TOKENS_MAX, RUNS_MAX
from kvstore.tiers.record import ALIGN, HEADER, MAGIC, Bytes, RecordFormat
from kvstore.tiers.segment import HEADER_BYTES

WINDOW_BYTES = 4 << 20  # Small slots are read many at a time; of large ones only the headers.
HEADER_BYTES_MAX = 1 << 20  # More than the header of any layout that can be described.

NamespaceNumber = Callable[[bytes], int | None]


def scan_segment(
    io: FileIo,
    fd: int,
    *,
    segment: int,
    slot_bytes: int,
    slots: int,
    per: int,
    namespace_number: NamespaceNumber,
    void_below: Callable[[bytes], int] = lambda digest: 0,
) -> list[Rows]:
    """Unsealed rows of the sound headers in one segment, one array for each record format.

    slots: how many the segment has. per: slots_per_segment_max. namespace_number: of a digest; None
    leaves the block out. void_below: of a digest, the generation below which its records are left
    out: they were invalidated. What cannot be read is left out; never raises for bad bytes.
    """
    groups: dict[tuple[RecordFormat, bytes], tuple[list[Bytes], list[int]]] = {}
    whole = WINDOW_BYTES // slot_bytes
    step = whole if whole >= 16 else 1
    buffer = aligned_buffer(step * slot_bytes if step > 1 else HEADER_BYTES_MAX)
    view: Bytes = np.frombuffer(buffer, np.uint8)
    for first in range(0, slots, step):
        count = min(step, slots - first)
        at = HEADER_BYTES + first * slot_bytes
        size = count * slot_bytes if step > 1 else ALIGN
        try:
            got = io.pread(fd, buffer[:size], at)
            if step == 1 and got == size:
                got += _rest_of_header(io, fd, buffer, at, slot_bytes)
        except OSError:
            continue
        for number in range(count):
            start = number * slot_bytes
            header = _sound_header(view[start : max(start, min(got, start + slot_bytes))])
            if header is not None and header[0].slot_bytes == slot_bytes:
                record, kept = header
                headers, indices = groups.setdefault((record, kept[64:96].tobytes()), ([], []))
                headers.append(kept)
                indices.append(segment * per + first + number)
    found = []
    for (record, digest), (headers, at_slots) in groups.items():
        stacked = np.stack(headers)
        valid = record.fixed(stacked)["generation"] >= np.uint64(void_below(digest))
        name = namespace_number(digest) if valid.any() else None
        if name is not None:
            slots_at = np.array(at_slots, np.int64)[valid]
            found.append(rows_of(record, stacked[valid], slots_at, name, per))
    return found


def newest(groups: list[Rows], per: int) -> tuple[list[Rows], list[int]]:
    """Keep of each key the row of the highest generation; of equal ones, that of the lowest slot.

    Returns: (groups without the others, the slot ids of the others).
    """
    if not groups:
        return [], []
    keys = np.concatenate([rows["key"] for rows in groups])
    generations = np.concatenate([rows["generation"] for rows in groups])
    halves = np.ascontiguousarray(keys).view("<u8").reshape(-1, 2)
    order = np.lexsort((~generations, halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    first = np.ones(len(order), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    keep = np.zeros(len(order), bool)
    keep[order[first]] = True
    kept, dropped, at = [], [], 0
    for rows in groups:
        chosen = keep[at : at + len(rows)]
        at += len(rows)
        dropped += slots_of_rows(rows[~chosen], per).tolist()
        if chosen.any():
            kept.append(rows[chosen])
    return kept, dropped


def _rest_of_header(io: FileIo, fd: int, buffer: memoryview, at: int, slot_bytes: int) -> int:
    """Read what a header has beyond its first page. Returns: bytes read."""
    fixed = np.frombuffer(buffer[: HEADER.itemsize], HEADER)[0]
    size = int(fixed["header_bytes"])
    if bytes(fixed["magic"]) != MAGIC or not ALIGN < size <= min(slot_bytes, HEADER_BYTES_MAX):
        return 0
    if size % ALIGN:
        return 0
    return io.pread(fd, buffer[ALIGN:size], at + ALIGN)


def _sound_header(slot: Bytes) -> tuple[RecordFormat, Bytes] | None:
    """The header at the start of a slot, copied, with its format; None unless it is sound."""
    if len(slot) < ALIGN or slot[: len(MAGIC)].tobytes() != MAGIC:
        return None
    fixed = slot[: HEADER.itemsize].view(HEADER)[0]
    tokens, runs = int(fixed["block_tokens"]), int(fixed["runs"])
    if not (1 <= tokens <= BLOCK_TOKENS_MAX and 1 <= runs <= RUNS_MAX):
        return None
    record = RecordFormat(tokens, runs, int(fixed["payload_bytes"]))
    header = slot[: record.header_bytes]
    if len(header) < record.header_bytes or record.check_header(header) is not None:
        return None
    return record, header.copy()
