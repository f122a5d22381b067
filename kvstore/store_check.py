"""Is what the catalogues of a store say true? Read beside the owner, or without one.

The owner goes on meanwhile, so a slot may get another block between reading its row and reading its
bytes: before a block is called bad, its row is read again, and then its bytes.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.bad_block import FOUND_BY_READING, BadBlock, BadReason
from kvstore.home import StoreFacts, owner_alive
from kvstore.inspect import bytes_of_slots, reading_catalogue, volumes_of
from kvstore.orphans import Families
from kvstore.slot_check import SPAN_BYTES, read_span, span_bytes
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.segment import segment_name
from kvstore.volume_view import VolumeView

ORPHAN_TRIES = 3  # Beside an owner: a child's row may be committed an instant before its parent's.
ORPHAN_PAUSE_S = 0.5


class StoreCheck:
    """The volumes of a store, and what was found bad in them. Changes nothing.

    total_bytes: of the slots that the last survey found.
    """

    def __init__(
        self, directory: Path, facts: StoreFacts, io: FileIo, pause: Callable[[float], None]
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._io = io
        self._pause = pause
        self.in_use = owner_alive(directory, io)
        self.views: dict[int, VolumeView] = {}
        self.total_bytes = 0
        self._nameless: list[BadBlock] = []  # what is bad and is no slot
        self._bad: dict[tuple[int, int], BadBlock] = {}  # by segment and index
        self._buffers: deque[memoryview] = deque()

    @property
    def bad(self) -> list[BadBlock]:
        """All that was found, the catalogues first, then in the order of the slots."""
        return [*self._nameless, *(self._bad[place] for place in sorted(self._bad))]

    def bad_when_read(self) -> list[BadBlock]:
        """Those whose bytes are bad: what reading found, and no survey finds again."""
        return [block for block in self._bad.values() if block.reason in FOUND_BY_READING]

    def still_bad(self, blocks: Iterable[BadBlock]) -> list[BadBlock]:
        """Which of these are bad, read again now; and whatever is wrong with the catalogues."""
        with ExitStack() as stack:
            self.begin(stack)
            orphans = self.survey()
            self.check_again((block.segment, block.index) for block in blocks)
            self.note_orphans(orphans)
        return self.bad

    # --- the catalogues

    def begin(self, stack: ExitStack) -> None:
        """Open the catalogues; those that cannot be read are noted. `stack` closes them."""
        for number, path in enumerate(volumes_of(self._directory, self._facts)):
            try:
                catalogue = stack.enter_context(reading_catalogue(self._directory, path, self._io))
                direct = self._io.supports_direct(path)
                view = VolumeView(path, catalogue, self._facts, self._io, direct)
                view.refresh()
            except (StoreError, OSError):
                self._nameless.append(BadBlock("", BadReason.CATALOGUE, str(path)))
                continue
            self.views[number] = view

    def survey(self) -> set[tuple[int, int]]:
        """Look at all rows, note those that stand for nothing, and count the bytes to read.

        Returns: segment and index of blocks that seem to have no parent.
        """
        families = Families()
        self.total_bytes = 0
        for number, view in self.views.items():
            damaged_rows = 0
            for batch, damaged in view.batches():
                damaged_rows += damaged
                for rows in batch.values():
                    stray = self._strays(view, rows)
                    self.total_bytes += bytes_of_slots(rows[~stray])
                    families.add(number, rows[~stray], view.spaces)
            row_fault = BadBlock("", BadReason.CATALOGUE_ROW, str(view.path))
            self._nameless += [row_fault] * damaged_rows
            for segment in view.damaged:
                place = f"{view.path / segment_name(segment)}:0"
                self._nameless.append(BadBlock("", BadReason.SEGMENT_HEADER, place))
        return {(segment, index) for _, segment, index in families.orphans()}

    def _strays(self, view: VolumeView, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows name no slot or no namespace: bool [n]. They are noted as bad."""
        found = ~view.has_slots(rows) | ~view.has_spaces(rows)
        if not found.any():
            return found
        if self.in_use:
            view.refresh()  # The owner may have made a segment or a namespace since.
            found = ~view.has_slots(rows) | ~view.has_spaces(rows)
        for row, slot in zip(rows[found], view.has_slots(rows[found]), strict=True):
            if self._is_there(view, row):
                reason = BadReason.NO_NAMESPACE if slot else BadReason.NO_SLOT
                self._note(view.bad(row, reason))
        return found

    def note_orphans(self, orphans: set[tuple[int, int]]) -> None:
        """Note those without a parent; beside an owner only those that stay so for a while."""
        for _ in range(ORPHAN_TRIES if self.in_use and orphans else 0):
            self._pause(ORPHAN_PAUSE_S)
            families = Families()
            for number, view in self.views.items():
                view.refresh()
                for batch, _damaged in view.batches():
                    for rows in batch.values():
                        families.add(number, rows, view.spaces)
            orphans &= {(segment, index) for _, segment, index in families.orphans()}
        for segment, index in orphans - self._bad.keys():
            view = self.views[segment % len(self._facts.paths)]
            now = view.row(segment, index)
            if now is not None:
                self._note(view.bad(now[0], BadReason.NO_PARENT))

    # --- one block

    def _note(self, bad: BadBlock) -> None:
        self._bad[bad.segment, bad.index] = bad

    def _is_there(self, view: VolumeView, row: np.void) -> bool:
        """Whether the catalogue still says the same of this slot."""
        now = view.row(int(row["segment"]), int(row["index"]))
        return now is not None and now[0].tobytes() == row.tobytes()

    def confirm(self, view: VolumeView, row: np.void) -> bool:
        """A block seems bad: look again, and note it if it is. Returns: whether it is there."""
        now = view.row(int(row["segment"]), int(row["index"]))
        if now is None or now[0]["generation"] != row["generation"]:
            return False
        if self.in_use:
            view.refresh()
        fault = self.read(view, now)[0][0]
        if fault is not None:
            self._note(view.bad(row, fault))
        return True

    def check_again(self, places: Iterable[tuple[int, int]]) -> None:
        """Note those of these slots that hold a bad block now."""
        for segment, index in places:
            view = self.views.get(segment % len(self._facts.paths)) if segment >= 0 else None
            row = view.row(segment, index) if view is not None else None
            if view is None or row is None or not view.has_slots(row)[0]:
                continue
            fault = self.read(view, row)[0][0]
            if fault is not None:
                self._note(view.bad(row[0], fault))

    def read(self, view: VolumeView, rows: Rows) -> tuple[list[BadReason | None], int]:
        """Read and check one span, on any thread. Returns: why each is bad, and how many only by
        their headers could be checked.
        """
        size = span_bytes(rows)
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = aligned_buffer(max(size, SPAN_BYTES))
        if len(buffer) < size:
            buffer = aligned_buffer(size)
        reading = read_span(self._io, view.path, rows, buffer, view.spaces, direct=view.direct)
        self._buffers.append(buffer)
        return reading.faults, reading.unchecked
