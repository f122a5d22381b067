"""Records in the slots of a segment, read in large pieces and checked many at a time.

One read brings a span of slots; their headers are compared with the catalogue's rows as whole
arrays, and all their runs are summed in one call that holds no lock of the interpreter. Only what
differs is looked at by itself, to say how.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.bad_block import BadReason
from kvstore.hashing.checksum import run_checksums, verify_runs
from kvstore.inspect import layout_of
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import ALIGN, MAGIC, VERSION, Bytes, RecordFormat
from kvstore.tiers.segment import HEADER_BYTES, segment_name

SPAN_BYTES = 4 << 20  # What one read brings, unless a single record is larger.
GAP_BYTES = 128 << 10  # Bytes between two records that are read along: cheaper than another read.
READS_MAX = 2  # A failed read is tried once more.


@dataclass(frozen=True)
class KnownSpace:
    """A namespace of the catalogue. layout: None where the catalogue lost it."""

    digest: bytes
    label: str
    layout: Layout | None

    @classmethod
    def of(cls, namespace: Namespace) -> "KnownSpace":
        return cls(namespace.digest, namespace.label, layout_of(namespace.layout))


Spaces = Mapping[int, KnownSpace]


@dataclass
class Reading:
    """What came of a span of rows, all arrays in their order.

    view: the bytes read. offsets: of each record in it. faults: why a block is bad, or None.
    unchecked: blocks whose payload could not be checked, because their layout is not known.
    """

    view: Bytes
    offsets: npt.NDArray[np.int64]
    faults: list[BadReason | None]
    unchecked: int


def slot_bytes_of(rows: Rows) -> int:
    """The slot size of the rows of one span."""
    return int(rows["slot_pages"][0]) * ALIGN


def span_bytes(rows: Rows) -> int:
    """Bytes from the first slot of a span to the end of its last."""
    slots = int(rows["index"][-1]) - int(rows["index"][0]) + 1
    return slots * slot_bytes_of(rows)


def spans(batch: Mapping[int, Rows], most_bytes: int = SPAN_BYTES) -> Iterator[Rows]:
    """Cut rows, by block_tokens and each in the order of its slots, into spans to read at once.

    A span has one segment, one slot size and one block_tokens, and its slots ascend; so do spans.
    """
    groups = [rows for rows in batch.values() if len(rows)]
    if not groups:
        return
    segments = np.concatenate([rows["segment"] for rows in groups]).astype(np.int64)
    indexes = np.concatenate([rows["index"] for rows in groups]).astype(np.int64)
    pages = np.concatenate([rows["slot_pages"] for rows in groups]).astype(np.int64)
    group = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups])
    within = np.concatenate([np.arange(len(rows)) for rows in groups])
    order = np.lexsort((indexes, segments))
    segments, indexes, pages = segments[order], indexes[order], pages[order]
    group, within = group[order], within[order]
    gaps = (np.diff(indexes) - 1) * pages[1:] * ALIGN
    cut = (np.diff(segments) != 0) | (np.diff(pages) != 0) | (np.diff(group) != 0)
    cut |= gaps > GAP_BYTES
    bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), len(order)]
    for first, last in pairwise(bounds):
        slots = max(1, most_bytes // max(ALIGN, int(pages[first]) * ALIGN))
        at = first
        while at < last:
            end = int(np.searchsorted(indexes[at:last], indexes[at] + slots)) + at
            yield groups[int(group[at])][within[at:end]]
            at = end


def read_span(
    io: FileIo, volume: Path, rows: Rows, buffer: memoryview, spaces: Spaces, *, direct: bool
) -> Reading:
    """Read the records of a span into `buffer`, page-aligned and large enough, and check them.

    Safe from any thread with a buffer of its own. Raises nothing: what fails is a fault.
    """
    slot_bytes, size = slot_bytes_of(rows), span_bytes(rows)
    offsets = (rows["index"].astype(np.int64) - int(rows["index"][0])) * slot_bytes
    view = np.frombuffer(buffer, np.uint8)[:size]
    faults: list[BadReason | None] = [None] * len(rows)
    unchecked = 0
    arrived = _read(io, volume, rows, buffer[:size], offsets, direct=direct)
    for at in np.flatnonzero(~arrived).tolist():
        faults[at] = BadReason.IO_ERROR
    for number in np.unique(rows["namespace"]).tolist():
        these = np.flatnonzero(arrived & (rows["namespace"] == number))
        if not len(these):
            continue
        space = spaces.get(number)
        if space is None:
            found: list[BadReason | None] = [BadReason.NO_NAMESPACE] * len(these)
        elif space.layout is None:
            found = [
                header_fault(view, at, rows[i], slot_bytes, space)
                for i, at in zip(these.tolist(), offsets[these].tolist(), strict=True)
            ]
            unchecked += found.count(None)
        else:
            found = faults_of(view, offsets[these], rows[these], slot_bytes, space.layout, space)
        for at, fault in zip(these.tolist(), found, strict=True):
            faults[at] = fault
    return Reading(view, offsets, faults, unchecked)


def _read(
    io: FileIo,
    volume: Path,
    rows: Rows,
    buffer: memoryview,
    offsets: npt.NDArray[np.int64],
    *,
    direct: bool,
) -> npt.NDArray[np.bool_]:
    """Which records were read whole: bool [n]. After an error each is read by itself, twice."""
    slot_bytes = slot_bytes_of(rows)
    start = HEADER_BYTES + int(rows["index"][0]) * slot_bytes
    try:
        fd = io.open(volume / segment_name(int(rows["segment"][0])), direct=direct)
    except OSError:
        return np.zeros(len(rows), np.bool_)
    try:
        try:
            arrived: npt.NDArray[np.bool_] = offsets + slot_bytes <= io.pread(fd, buffer, start)
            return arrived
        except OSError:
            one_by_one = [
                _read_one(io, fd, buffer[at : at + slot_bytes], start + at)
                for at in offsets.tolist()
            ]
            return np.array(one_by_one, np.bool_)
    finally:
        io.close(fd)


def _read_one(io: FileIo, fd: int, buffer: memoryview, offset: int) -> bool:
    for _ in range(READS_MAX):
        try:
            return io.pread(fd, buffer, offset) == len(buffer)
        except OSError:
            continue
    return False


def faults_of(
    view: Bytes,
    offsets: npt.NDArray[np.int64],
    rows: Rows,
    slot_bytes: int,
    layout: Layout,
    space: KnownSpace,
) -> list[BadReason | None]:
    """Check records of one namespace that lie in `view` at `offsets` against their rows."""
    shape = RecordFormat.of(layout)
    if shape.slot_bytes != slot_bytes:
        return [BadReason.HEADER_LENGTH] * len(rows)
    headers = np.stack([view[at : at + shape.header_bytes] for at in offsets.tolist()])
    good = _same_identity(shape, headers, rows, space.digest) & shape.sealed(headers)
    starts = offsets[:, None] + shape.header_bytes + layout.run_offsets[None, :]
    lengths = np.broadcast_to(layout.run_lengths, starts.shape)
    sums = run_checksums(view, starts.reshape(-1), np.ascontiguousarray(lengths).reshape(-1))
    good &= (sums.reshape(len(rows), -1) == shape.checksums(headers)).all(axis=1)
    return [
        None if fine else _fault(view, at, row, shape, layout, space)
        for fine, at, row in zip(good.tolist(), offsets.tolist(), rows, strict=True)
    ]


def _same_identity(
    shape: RecordFormat, headers: Bytes, rows: Rows, digest: bytes
) -> npt.NDArray[np.bool_]:
    """Which headers state this format and are their rows' very blocks: bool [n]."""
    fixed = shape.fixed(headers)
    same: npt.NDArray[np.bool_] = (fixed["magic"] == MAGIC) & (fixed["version"] == VERSION)
    same &= fixed["header_bytes"] == shape.header_bytes
    same &= fixed["payload_bytes"] == shape.payload_bytes
    same &= (fixed["block_tokens"] == shape.block_tokens) & (fixed["runs"] == shape.runs)
    same &= fixed["generation"] == rows["generation"]
    same &= (headers[:, 64:96] == np.frombuffer(digest, np.uint8)).all(axis=1)
    for name, at in (("key", 32), ("parent", 48)):
        wanted = np.ascontiguousarray(rows[name]).view(np.uint8).reshape(-1, 16)
        same &= (headers[:, at : at + 16] == wanted).all(axis=1)
    if rows["tokens"].shape[1] != shape.block_tokens:
        return np.zeros(len(rows), np.bool_)
    same &= (shape.tokens(headers) == rows["tokens"]).all(axis=1)
    return same


def _fault(
    view: Bytes, at: int, row: np.void, shape: RecordFormat, layout: Layout, space: KnownSpace
) -> BadReason | None:
    """What is wrong with one record."""
    header = view[at : at + shape.header_bytes]
    fault = shape.check_header(header) or shape.check_identity(
        header,
        namespace=space.digest,
        key=bytes(row["key"]),
        parent=bytes(row["parent"]),
        generation=int(row["generation"]),
        tokens=row["tokens"],
    )
    if fault is not None:
        return BadReason(f"header_{fault}")
    payload = view[at + shape.header_bytes : at + shape.header_bytes + shape.payload_bytes]
    sums = np.array(shape.checksums(header[None, :])[0])
    bad = verify_runs(payload, layout.run_offsets, layout.run_lengths, sums)
    return None if bad < 0 else BadReason.PAYLOAD_CHECKSUM


def header_fault(
    view: Bytes, at: int, row: np.void, slot_bytes: int, space: KnownSpace
) -> BadReason | None:
    """The same of a block whose layout was lost: its header states the sizes itself."""
    header = view[at : at + slot_bytes]
    runs, payload_bytes = header[140:144].view("<u4")[0], header[16:24].view("<u8")[0]
    if int(runs) * 8 > slot_bytes or int(payload_bytes) > slot_bytes:
        return BadReason.HEADER_LENGTH
    shape = RecordFormat(len(row["tokens"]), int(runs), int(payload_bytes))
    if shape.slot_bytes != slot_bytes:
        return BadReason.HEADER_LENGTH
    header = header[: shape.header_bytes]
    fault = shape.check_header(header) or shape.check_identity(
        header,
        namespace=space.digest,
        key=bytes(row["key"]),
        parent=bytes(row["parent"]),
        generation=int(row["generation"]),
        tokens=row["tokens"],
    )
    return None if fault is None else BadReason(f"header_{fault}")
