"""A volume as one reads it beside its owner, or without one: rows, and the slots they may name."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.bad_block import BadBlock, BadReason
from kvstore.home import StoreFacts
from kvstore.inspect import place_of
from kvstore.slot_check import KnownSpace
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.record import ALIGN
from kvstore.tiers.segment import (
    HEADER_BYTES,
    SEGMENT_MAGIC,
    FileHeader,
    parse_header,
    segment_name,
    segment_number,
)


@dataclass
class VolumeView:
    """One volume. `refresh` reads again what its owner may have changed.

    spaces: the namespaces by number.  classes: segment -> slot_bytes, as a start would take them:
    from the file's header, or where that is damaged from the catalogue.
    damaged: segments whose header is not readable.
    """

    path: Path
    catalogue: Catalogue
    facts: StoreFacts
    io: FileIo
    direct: bool
    spaces: dict[int, KnownSpace] = field(default_factory=dict)
    classes: dict[int, int] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)

    def refresh(self) -> None:
        """Read namespaces and segments as they are now."""
        namespaces = self.catalogue.namespaces()
        self.spaces = {number: KnownSpace.of(space) for number, space in namespaces.items()}
        self.classes, self.damaged = {}, []
        table = self.catalogue.segments()
        for name in self.io.list_names(self.path):
            segment = segment_number(name)
            if segment is None:
                continue
            slot_bytes = self._class_in_header(segment)
            if slot_bytes is None:
                self.damaged.append(segment)
            self.classes[segment] = slot_bytes or table.get(segment, (0, None))[0]

    def _class_in_header(self, segment: int) -> int | None:
        """The slot size that a segment file states; None if its header is damaged."""
        page = aligned_buffer(HEADER_BYTES)
        try:
            fd = self.io.open(self.path / segment_name(segment), direct=self.direct)
            try:
                self.io.pread(fd, page, 0)
            finally:
                self.io.close(fd)
        except OSError:
            return None
        header = parse_header(bytes(page), SEGMENT_MAGIC)
        if not isinstance(header, FileHeader) or header.segment != segment:
            return None
        return header.slot_bytes if header.store_id == self.facts.store_id else None

    def batches(self) -> Iterator[tuple[dict[int, Rows], int]]:
        """All rows in parts, by block_tokens: sound ones that lie under their own key, and how
        many are damaged.
        """
        last: dict[int, int] = {}
        for batch, damaged_rows in self.catalogue.batches():
            found: dict[int, Rows] = {}
            damaged = damaged_rows
            for block_tokens, rows in batch.items():
                # Rows come in the order of their keys. One that does not ascend is not its key's.
                places = np.concatenate([[last.get(block_tokens, -1)], _places(rows)])
                own = places[1:] > np.maximum.accumulate(places)[:-1]
                if not own.all():
                    own = np.array([self._is_own(row) for row in rows], np.bool_)
                    own[own] = _first_of_each(_places(rows[own]))
                damaged += int((~own).sum())
                found[block_tokens] = rows[own]
                last[block_tokens] = int(places.max())
            yield {tokens: rows for tokens, rows in found.items() if len(rows)}, damaged

    def _is_own(self, row: np.void) -> bool:
        """Whether the catalogue has this very row under the slot that it names."""
        there = self.row(int(row["segment"]), int(row["index"]))
        return there is not None and there.tobytes() == row.tobytes()

    def row(self, segment: int, index: int) -> Rows | None:
        """The row of a slot as it is now: an array [1], or None."""
        return self.catalogue.row(segment, index)

    def has_slots(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows name a slot that exists: bool [n]."""
        sizes = rows["slot_pages"].astype(np.int64) * ALIGN
        segments = rows["segment"].astype(np.int64)
        known, which = np.unique(segments, return_inverse=True)
        classes = np.array([self.classes.get(segment, 0) for segment in known.tolist()], np.int64)
        room = self.facts.disk_segment_bytes - HEADER_BYTES
        fits = (rows["index"].astype(np.int64) + 1) * sizes <= room
        return np.asarray((sizes > 0) & (classes[which] == sizes) & fits)

    def has_spaces(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows name a namespace that is known: bool [n]."""
        return np.isin(rows["namespace"], np.fromiter(self.spaces, np.int64, len(self.spaces)))

    def bad(self, row: np.void, reason: BadReason) -> BadBlock:
        """A bad block, by its row."""
        segment, index = int(row["segment"]), int(row["index"])
        place = place_of(self.path, segment, index, int(row["slot_pages"]) * ALIGN)
        return BadBlock(bytes(row["key"]).hex(), reason, place, segment, index)


def _places(rows: Rows) -> npt.NDArray[np.int64]:
    """Where rows lie as one number each, in the order of the catalogue's keys."""
    return (rows["segment"].astype(np.int64) << 32) + rows["index"].astype(np.int64)


def _first_of_each(places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """The first row of each place: bool [n]."""
    first = np.zeros(len(places), np.bool_)
    first[np.unique(places, return_index=True)[1]] = True
    return first
