"""Starting: what the tiers hold goes into the index; lookups answer Miss(starting) meanwhile."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstore.bulk import StoredBlocks, bulk_load
from kvstore.floors import Floors
from kvstore.inspect import layout_of
from kvstore.placement import Placement
from kvstore.plans import SpaceFacts
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue_row import Rows, slots_of_rows
from kvstore.tiers.failpoints import reach
from kvstore.tiers.host_scan import FoundRecords
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import ALIGN, RecordFormat


class Starter:
    """Fills an index from a taken-over arena and from the catalogues; numbers the namespaces.

    failure: what `start` raised, for the thread that waits for it.
    """

    def __init__(self, placement: Placement, floors: Floors) -> None:
        self._placement = placement
        self._floors = floors
        self._numbers: dict[bytes, int] = {}
        self.failure: BaseException | None = None

    @property
    def numbers(self) -> Mapping[bytes, int]:
        """The index's numbers of all namespaces, by digest. Under the placement's lock."""
        return self._numbers

    def space_number(self, digest: bytes, layout: Layout, slot_bytes: int) -> int:
        """The index's number of a namespace. Under the placement's lock.

        What is there under its digest with blocks of another size is none of its own, whatever an
        archive said that was imported: it is dropped.
        """
        placement, number = self._placement, self._numbers.get(digest)
        if number is not None:
            columns = placement.index.rows
            sizes = (columns.space_block_tokens[number], columns.space_slot_bytes[number])
            if sizes == (layout.block_tokens, slot_bytes):
                return number
            for tier in placement.index.tiers:
                placement.left(tier, placement.index.drop_space(number, tier))
        return self._add(digest, layout.block_tokens, slot_bytes)

    def start(self) -> None:
        """Load everything, then let lookups in. What it raises is kept in `failure`."""
        placement = self._placement
        try:
            if placement.disk is not None:
                loaded = placement.disk.load(void_below=self._floors.of_rebuilt)
                reach("start.recover")
                with placement.lock:
                    for rows in loaded.rows.values():
                        self._add_disk(rows)
            with placement.lock:
                if placement.host.taken_over:
                    scanned = placement.host.scan()
                    reach("start.takeover")
                    for found in scanned:
                        self._add_host(found)
                placement.started.set()
        except BaseException as failure:
            self.failure = failure

    def _add_disk(self, rows: Rows) -> None:
        placement = self._placement
        assert placement.disk is not None
        namespaces = placement.disk.namespaces()
        block_tokens = rows["tokens"].shape[1]
        spaces = np.full(max(namespaces, default=0) + 1, -1, np.int64)
        for number, namespace in namespaces.items():
            layout = layout_of(namespace.layout)
            own = rows["slot_pages"][rows["namespace"] == number]
            if layout is None and len(own):
                # The catalogue lost the layout; the rows themselves say how large a slot is.
                spaces[number] = self._known(namespace.digest, block_tokens, int(own[0]) * ALIGN)
            elif layout is not None and layout.block_tokens == block_tokens:
                size = RecordFormat.of(layout).slot_bytes
                spaces[number] = self._known(namespace.digest, block_tokens, size)
        numbers = spaces[np.minimum(rows["namespace"], len(spaces) - 1)]
        below = np.zeros(len(spaces), np.uint64)
        for number, namespace in namespaces.items():
            below[number] = self._floors.of_row(namespace.digest)
        known = (numbers >= 0) & (rows["namespace"] < len(spaces))
        # What was invalidated just before a kill, which the catalogue may not know.
        known &= rows["generation"] >= below[np.minimum(rows["namespace"], len(spaces) - 1)]
        if not known.all():
            placement.disk.remove(slots_of_rows(rows[~known], placement.disk.per))
            rows, numbers = rows[known], numbers[known]
        slots = slots_of_rows(rows, placement.disk.per)
        placed = bulk_load(
            placement.index,
            TierName.DISK,
            StoredBlocks(
                keys=_digests(rows["key"]),
                parents=_digests(rows["parent"]),
                spaces=numbers.astype(np.uint16),
                tokens=rows["tokens"],
                depths=rows["depth"],
                contents=rows["generation"],
                slots=slots,
            ),
        )
        placement.disk.remove(slots[placed < 0])

    def _add_host(self, found: FoundRecords) -> None:
        """Blocks of a former owner: unverified until their first read; not on disk means dirty."""
        placement, fixed = self._placement, found.fixed
        record = found.format
        digests = np.ascontiguousarray(fixed["namespace"])
        names, which = np.unique(digests, return_inverse=True)
        numbers = np.array(
            [self._known(bytes(n), record.block_tokens, record.slot_bytes) for n in names]
        )
        below = np.array([self._floors.of_arena(bytes(name)) for name in names], np.uint64)
        valid = fixed["generation"] >= below[which]
        if not valid.all():
            placement.release_host_slots(found.slots[~valid])
            found = FoundRecords(
                record, found.slots[valid], fixed[valid], np.ascontiguousarray(found.tokens[valid])
            )
            fixed, which = found.fixed, which[valid]
        for name, number in zip(names, numbers.tolist(), strict=True):
            placement.spaces.setdefault(number, SpaceFacts(bytes(name), record, b"", ""))
        placed = bulk_load(
            placement.index,
            TierName.HOST,
            StoredBlocks(
                keys=_digests(fixed["key"]),
                parents=_digests(fixed["parent"]),
                spaces=numbers[which].astype(np.uint16),
                tokens=found.tokens,
                depths=fixed["depth"],
                contents=fixed["generation"],
                slots=found.slots,
                media=np.ascontiguousarray(fixed["media"]).view(np.uint8).reshape(-1, 32),
            ),
        )
        placement.release_host_slots(found.slots[placed < 0])
        rows = placed[placed >= 0]
        rows = rows[placement.index.slots(TierName.DISK, rows) < 0] if placement.disk else rows[:0]
        order = np.argsort(placement.index.rows.depth[rows], kind="stable")
        placement.mark_dirty(rows[order])

    def _known(self, digest: bytes, block_tokens: int, slot_bytes: int) -> int:
        number = self._numbers.get(digest)
        return self._add(digest, block_tokens, slot_bytes) if number is None else number

    def _add(self, digest: bytes, block_tokens: int, slot_bytes: int) -> int:
        number = self._placement.index.add_space(block_tokens, slot_bytes)
        self._numbers[digest] = number
        self._placement.space_digests[number] = digest
        return number


def _digests(column: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """A column of 16-byte values as uint8 [n, 16]."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(-1, 16)
