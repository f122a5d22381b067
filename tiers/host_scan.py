"""Finding the records in a taken-over host segment: one strided look at the magics, then a batched
check of the headers' checksums. Nothing of a header is believed before its checksum is right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.tiers.layout import BLOCK_TOKENS_MAX, RUNS_MAX
from kvstore.tiers.record import ALIGN, FIXED_BYTES, HEADER, MAGIC, VERSION, Bytes, RecordFormat
from kvstore.tiers.slab import Slots

MAGIC_WORD = np.frombuffer(MAGIC, np.uint64)[0]
CHUNK_BYTES = 512 << 10  # Headers copied out at a time to be checked: they stay in the cache.


@dataclass(frozen=True)
class FoundRecords:
    """Records of one format whose headers are whole; their payloads are not verified yet.

    slots: int64 [n]. fixed: HEADER [n]. tokens: int32 [n, block_tokens].
    """

    format: RecordFormat
    slots: Slots
    fixed: npt.NDArray[np.void]
    tokens: npt.NDArray[np.int32]


def find_records(rows: Bytes, first_slot: int) -> Iterator[FoundRecords]:
    """The records of one segment, by format. Copies; never writes.

    rows: uint8 [slots, slot_bytes], a view of the segment. first_slot: the id of its slot 0.
    """
    magics = rows[:, :8].view(np.uint64)[:, 0]
    candidates = np.flatnonzero(magics == MAGIC_WORD)
    claimed = rows[candidates, :FIXED_BYTES].view(HEADER)[:, 0]
    while len(candidates):
        first = claimed[0]
        sizes = [int(first[name]) for name in ("block_tokens", "runs", "payload_bytes")]
        record = RecordFormat(*sizes)
        same = np.ones(len(candidates), np.bool_)
        for name, size in zip(("block_tokens", "runs", "payload_bytes"), sizes, strict=True):
            same &= claimed[name] == size
        if _possible(record, rows.shape[1]):
            yield from _verified(rows, candidates[same], record, first_slot)
        candidates, claimed = candidates[~same], claimed[~same]


def _possible(record: RecordFormat, slot_bytes: int) -> bool:
    """Whether a record with these claimed sizes can lie in such a slot: bounds every length."""
    return (
        0 < record.block_tokens <= BLOCK_TOKENS_MAX
        and 0 < record.runs <= RUNS_MAX
        and 0 < record.payload_bytes <= slot_bytes - ALIGN
        and record.slot_bytes == slot_bytes
    )


def _verified(
    rows: Bytes, indices: Slots, record: RecordFormat, first_slot: int
) -> Iterator[FoundRecords]:
    step = max(1, CHUNK_BYTES // record.header_bytes)
    for start in range(0, len(indices), step):
        chunk = indices[start : start + step]
        headers = rows[chunk, : record.header_bytes]
        fixed = record.fixed(headers)
        good = record.sealed(headers)
        good &= (fixed["version"] == VERSION) & (fixed["header_bytes"] == record.header_bytes)
        if good.any():
            yield FoundRecords(
                record, chunk[good] + first_slot, fixed[good], record.tokens(headers)[good]
            )


def merged(parts: list[FoundRecords]) -> list[FoundRecords]:
    """The same records, one entry for each format."""
    by_format: dict[RecordFormat, list[FoundRecords]] = {}
    for part in parts:
        by_format.setdefault(part.format, []).append(part)
    return [
        FoundRecords(
            record,
            np.concatenate([part.slots for part in same]),
            np.concatenate([part.fixed for part in same]),
            np.concatenate([part.tokens for part in same]),
        )
        for record, same in by_format.items()
    ]
