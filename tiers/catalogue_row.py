"""The row of a block in the catalogue: pure bytes, no I/O.

A row is 72 bytes and the block's token ids; its length alone says block_tokens. Little-endian:

    0   checksum     XXH3-64 of the rest of the row
    8   generation   of the record, as in its header
    16  key, parent  16 bytes each
    48  segment, index   where the slot lies; the catalogue's own key says the same
    56  namespace    number of a row of the namespaces table
    60  depth        blocks before it in its chain
    64  created_s    seconds since 1970
    68  slot_pages   slot_bytes / 4096
    72  tokens       int32 [block_tokens]
"""

import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kvstore.hashing.checksum import run_checksums
from kvstore.tiers.layout import BLOCK_TOKENS_MAX
from kvstore.tiers.record import ALIGN, HEADER, RecordFormat

HEAD_BYTES = 72
CHECKED_FROM = 8
KEY = struct.Struct(">II")  # (segment, index): the order in which a segment is read.

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.void]
Slots = npt.NDArray[np.int64]

LMDB_PAGE = 4096
LMDB_PAGE_HEADER = 16
LMDB_NODE = 8 + KEY.size + 2  # Node header, key, and its entry in the page's index.
LMDB_NODE_MAX = 2038  # A larger node's value lies in pages of its own.
LMDB_FILL_MIN = 4  # A page less than a quarter full is merged or filled from its neighbour.


@cache
def row_dtype(block_tokens: int) -> np.dtype[np.void]:
    """The row of a block of `block_tokens` tokens."""
    if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise ValueError(f"block_tokens must lie in 1..{BLOCK_TOKENS_MAX}; got {block_tokens}")
    return np.dtype(
        [
            ("checksum", "<u8"),
            ("generation", "<u8"),
            ("key", "V16"),
            ("parent", "V16"),
            ("segment", "<u4"),
            ("index", "<u4"),
            ("namespace", "<u4"),
            ("depth", "<u4"),
            ("created_s", "<u4"),
            ("slot_pages", "<u4"),
            ("tokens", "<i4", (block_tokens,)),
        ]
    )


def block_tokens_of(row_bytes: int) -> int | None:
    """How many tokens a row of this length has; None for a length no row has."""
    tokens, rest = divmod(row_bytes - HEAD_BYTES, 4)
    return tokens if rest == 0 and 1 <= tokens <= BLOCK_TOKENS_MAX else None


def worst_row_bytes(block_tokens: int) -> int:
    """Bytes one row takes in the catalogue at worst, with its share of inner pages.

    A leaf page is at least a quarter full, or holds one row; a large row has pages of its own.
    """
    row = HEAD_BYTES + 4 * block_tokens
    node = LMDB_NODE + row
    own_pages = 0
    if node > LMDB_NODE_MAX:
        own_pages = LMDB_PAGE * -(-(LMDB_PAGE_HEADER + row) // LMDB_PAGE)
        node = LMDB_NODE + 8
    leaf = min(LMDB_PAGE, LMDB_FILL_MIN * node)
    return own_pages + leaf + leaf // 24


def rows_of(record: RecordFormat, headers: Bytes, slots: Slots, namespace: int, per: int) -> Rows:
    """Unsealed rows of sealed headers, uint8 [n, header_bytes], that go to `slots`, int64 [n].

    namespace: its number in the table. per: slots_per_segment_max of the slab.
    """
    fixed = headers[:, : HEADER.itemsize].view(HEADER)[:, 0]
    rows = np.zeros(len(headers), row_dtype(record.block_tokens))
    for name in ("generation", "key", "parent", "depth", "created_s"):
        rows[name] = fixed[name]
    place(rows, slots, record.slot_bytes, per)
    rows["namespace"] = namespace
    rows["tokens"] = record.tokens(headers)
    return rows


def place(rows: Rows, slots: Slots, slot_bytes: int, per: int) -> None:
    """Write where the blocks of rows lie, in place."""
    rows["segment"], rows["index"] = np.divmod(slots, per)
    rows["slot_pages"] = slot_bytes // ALIGN


def slots_of_rows(rows: Rows, per: int) -> Slots:
    """The slot ids of rows: int64 [n]."""
    return np.asarray(rows["segment"].astype(np.int64) * per + rows["index"])


def seal(rows: Rows) -> None:
    """Write the checksum of each row, in place."""
    rows["checksum"] = _checksums(rows)


def sound(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row passes its checksum: bool [n]."""
    return np.asarray(rows["checksum"] == _checksums(rows))


def keys_of(rows: Rows) -> list[bytes]:
    """The catalogue's keys of rows: (segment, index), big-endian."""
    pairs = np.empty((len(rows), 2), ">u4")
    pairs[:, 0], pairs[:, 1] = rows["segment"], rows["index"]
    joined = pairs.tobytes()
    return [joined[at : at + KEY.size] for at in range(0, len(joined), KEY.size)]


def values_of(rows: Rows) -> list[bytes]:
    """The rows as they lie in the catalogue."""
    joined, size = rows.tobytes(), rows.dtype.itemsize
    return [joined[at : at + size] for at in range(0, len(joined), size)]


class Collected:
    """Rows by block_tokens, each in one array that is allocated once: touching memory is slow."""

    def __init__(self) -> None:
        self._arrays: dict[int, Rows] = {}
        self._used: dict[int, int] = {}

    def add(self, parts: dict[int, list[Rows]], room: int) -> None:
        """Append rows. room: how many there may be from here on, these included."""
        for tokens, groups in parts.items():
            at = self._used.setdefault(tokens, 0)
            if tokens not in self._arrays:
                self._arrays[tokens] = np.empty(room, row_dtype(tokens))
            for rows in groups:
                # As bytes: NumPy copies structured rows field by field.
                end = at + len(rows)
                self._arrays[tokens][at:end].view(np.uint8)[:] = rows.view(np.uint8)
                at = end
            self._used[tokens] = at

    def rows(self) -> dict[int, Rows]:
        """What was collected."""
        return {tokens: array[: self._used[tokens]] for tokens, array in self._arrays.items()}


def parse_rows(values: Sequence[bytes], found: dict[int, list[Rows]]) -> bool:
    """Add the sound rows among `values` to `found`, by block_tokens.

    Returns: True | False (at least one is damaged).
    """
    by_length: dict[int, Sequence[bytes]] = {}
    lengths = set(map(len, values))
    if len(lengths) == 1:
        by_length[lengths.pop()] = values
    else:
        by_length = {size: [v for v in values if len(v) == size] for size in lengths}
    whole = True
    for size, group in by_length.items():
        tokens = block_tokens_of(size)
        if tokens is None:
            whole = False
            continue
        rows = np.frombuffer(b"".join(group), row_dtype(tokens))
        good = sound(rows)
        if not good.all():
            whole, rows = False, rows[good]
        if len(rows):
            found.setdefault(tokens, []).append(rows)
    return whole


def _checksums(rows: Rows) -> npt.NDArray[np.uint64]:
    size = rows.dtype.itemsize
    starts = np.arange(len(rows), dtype=np.int64) * size + CHECKED_FROM
    lengths = np.full(len(rows), size - CHECKED_FROM, np.int64)
    return run_checksums(np.ascontiguousarray(rows).view(np.uint8).reshape(-1), starts, lengths)
