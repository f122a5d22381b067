"""Blocks from outside, into the disk tier: checked as a load checks them, written as a save's are.

They are written as write-back writes them: records, then a sync, then their rows in one commit; a
block after its parent. So a kill at any instant leaves a sound store with a part of the blocks.
What is there already is never written over, and nothing gives way: where the disk is full for
blocks of one size, the rest of that size is left out.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvstore.hashing.chain import ChainFunction
from kvstore.hashing.checksum import verify_runs
from kvstore.hashing.namespace import root_key
from kvstore.inspect import layout_of
from kvstore.opening import Opened
from kvstore.plans import SpaceFacts
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue_row import rows_of
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.disk_outcomes import WriteFailed, WriteFault
from kvstore.tiers.errors import LayoutError, StoreError
from kvstore.tiers.io import aligned_buffer
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import HeaderFault, RecordFormat

GROUP_BLOCKS = 64
GROUP_BYTES = 32 << 20
NO_MEDIA = bytes(32)
NO_ROOM_FAULTS = {WriteFault.NO_SPACE, WriteFault.CATALOGUE_FULL}


class Refused(StrEnum):
    """Why a block was not imported; the first that applies."""

    NAMESPACE = "namespace"  # its layout contradicts what the store knows, or there are too many
    TOO_LARGE = "too_large"  # no segment of this store holds one
    LENGTH = "length"  # it has not the length that its layout gives
    CHECKSUM = "checksum"  # its bytes are not those that were written
    HEADER = "header"  # it is no record of this namespace
    KEY = "key"  # its key does not follow from its parent and its tokens
    PARENT = "parent"  # the block before it is not in the store
    COLLISION = "collision"  # the store has another block under this key
    NO_ROOM = "no_room"  # no slot was left for it, or for a block before it


@dataclass(frozen=True)
class ImportSpace:
    """A namespace of an archive, as the store takes it. number: in the index; name: on disk."""

    digest: bytes
    layout: Layout
    record: RecordFormat
    number: int
    name: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in an archive."""
        return self.record.header_bytes + self.record.payload_bytes


@dataclass(frozen=True)
class _Candidate:
    """A block that passed its checks. parent: its row, or -1; or -2: in this group."""

    body: npt.NDArray[np.uint8]
    key: bytes
    parent: int
    parent_key: bytes


class DiskImport:
    """Takes namespaces and blocks. Nobody else uses the store meanwhile."""

    def __init__(self, opened: Opened, chain: ChainFunction) -> None:
        assert opened.disk is not None
        self._opened = opened
        self._placement = opened.placement
        self._disk = opened.disk
        self._chain = chain
        self._group: dict[bytes, _Candidate] = {}
        self._space: ImportSpace | None = None  # of the group
        self._full: set[int] = set()  # slot sizes for which there is no room
        self.imported = 0
        self.present = 0
        self.refused: Counter[Refused] = Counter()

    def space(self, namespace: Namespace) -> ImportSpace | Refused:
        """Take a namespace. Returns: an ImportSpace | NAMESPACE | TOO_LARGE."""
        layout = layout_of(namespace.layout)
        if layout is None:
            return Refused.NAMESPACE
        try:
            layout.refuse_unstorable()
        except LayoutError:
            return Refused.NAMESPACE
        record, index = RecordFormat.of(layout), self._placement.index
        if not self._disk.slab.fits(record.slot_bytes):
            return Refused.TOO_LARGE
        label = namespace.label
        for known in self._disk.namespaces().values():
            if known.digest == namespace.digest and known.layout:
                if known.layout != namespace.layout:
                    return Refused.NAMESPACE
                label = known.label
        number = self._opened.starter.numbers.get(namespace.digest)
        if number is not None:
            sizes = index.rows.space_block_tokens[number], index.rows.space_slot_bytes[number]
            if sizes != (record.block_tokens, record.slot_bytes):
                return Refused.NAMESPACE
        facts = SpaceFacts(namespace.digest, record, namespace.layout, label)
        try:
            name = self._placement.disk_namespace(facts)
        except StoreError:
            return Refused.NAMESPACE
        starter = self._opened.starter
        number = starter.space_number(namespace.digest, layout, record.slot_bytes)
        self._placement.spaces[number] = facts
        return ImportSpace(namespace.digest, layout, record, number, name)

    def add(self, space: ImportSpace, body: bytearray) -> None:
        """Check a block and put it into the group that is written next.

        body: block_bytes. Raises StoreError when the disk fails.
        """
        full = len(self._group) * space.record.slot_bytes >= GROUP_BYTES
        if self._space is not space or full or len(self._group) >= GROUP_BLOCKS:
            self.flush()
        self._space = space
        found = self._check(space, np.frombuffer(body, np.uint8))
        if isinstance(found, Refused):
            self.refused[found] += 1
        elif found is None:
            self.present += 1
        else:
            self._group[found.key] = found

    # --- checking

    def _check(
        self, space: ImportSpace, body: npt.NDArray[np.uint8]
    ) -> _Candidate | Refused | None:
        """Returns: a block to write | why not | None: it is there already."""
        record = space.record
        header, payload = body[: record.header_bytes], body[record.header_bytes :]
        fault = record.check_header(header)
        if fault is not None:
            return Refused.CHECKSUM if fault is HeaderFault.CHECKSUM else Refused.HEADER
        fixed = record.fixed(header[None])[0]
        tokens = np.ascontiguousarray(record.tokens(header[None]))
        if fixed["flags"] or bytes(fixed["namespace"]) != space.digest or int(tokens.min()) < 0:
            return Refused.HEADER
        sums = np.ascontiguousarray(record.checksums(header[None])[0])
        layout = space.layout
        if verify_runs(payload, layout.run_offsets, layout.run_lengths, sums) >= 0:
            return Refused.CHECKSUM
        key, parent = bytes(fixed["key"]), bytes(fixed["parent"])
        media = bytes(fixed["media"])
        given = None if media == NO_MEDIA else {0: media}
        if self._chain(parent, tokens, given).tobytes() != key:
            return Refused.KEY
        place = self._parent(space, parent, int(fixed["depth"]))
        if place is None:
            return Refused.NO_ROOM if record.slot_bytes in self._full else Refused.PARENT
        there = self._is_there(space, key, place, tokens)
        if there is not None:
            return None if there else Refused.COLLISION
        return _Candidate(body, key, place, parent)

    def _parent(self, space: ImportSpace, parent: bytes, depth: int) -> int | None:
        """The parent's row, -1 for a first block, -2 in this group; None if it is not on disk."""
        if depth == 0:
            return -1 if parent == root_key(space.digest) else None
        pending = self._group.get(parent)
        if pending is not None:
            deeper = int(space.record.fixed(pending.body[None])[0]["depth"]) + 1 == depth
            return -2 if deeper else None
        row = self._row(parent)
        if row is None:
            return None
        index = self._placement.index
        same = int(index.rows.space[row]) == space.number
        return row if same and int(index.rows.depth[row]) + 1 == depth else None

    def _is_there(
        self, space: ImportSpace, key: bytes, parent: int, tokens: npt.NDArray[np.int32]
    ) -> bool | None:
        """Whether the store has this very block; False: another under its key; None: neither."""
        if key in self._group:
            return True
        index = self._placement.index
        row = int(index.table.probe(np.frombuffer(key, np.uint8)[None])[0])
        if row < 0:
            return None
        rows = np.array([row], np.int32)
        same = int(index.rows.space[row]) == space.number and int(index.rows.parent[row]) == parent
        same = same and int(index.slots(TierName.DISK, rows)[0]) >= 0
        return same and np.array_equal(index.rows.tokens(rows, tokens.shape[1]), tokens)

    def _row(self, key: bytes) -> int | None:
        """The row of a block on disk."""
        index = self._placement.index
        row = index.table.probe(np.frombuffer(key, np.uint8)[None])
        if row[0] < 0 or int(index.slots(TierName.DISK, row)[0]) < 0:
            return None
        return int(row[0])

    # --- writing

    def flush(self) -> None:
        """Write the group. Raises StoreError when the disk fails; nothing of the group is kept."""
        group, space = list(self._group.values()), self._space
        self._group.clear()
        if not group or space is None:
            return
        record, disk = space.record, self._disk
        near = next((one.parent for one in group if one.parent >= 0), None)
        slots = disk.reserve(
            record.slot_bytes,
            len(group),
            near=None if near is None else self._slot(near),
            block_tokens=record.block_tokens,
        )
        if len(slots) < len(group):
            self._full.add(record.slot_bytes)
            self.refused[Refused.NO_ROOM] += len(group) - len(slots)
            group = group[: len(slots)]  # Parents come first, so no block loses its own.
        if not group:
            return
        headers = np.stack([one.body[: record.header_bytes] for one in group])
        generations = self._placement.new_generations(len(group))
        record.fixed(headers)["generation"] = generations
        record.seal(headers)
        memory = aligned_buffer(len(group) * record.slot_bytes)
        view = np.frombuffer(memory, np.uint8).reshape(len(group), record.slot_bytes)
        view[:, : record.header_bytes] = headers
        for place, one in zip(view, group, strict=True):
            place[record.header_bytes : space.block_bytes] = one.body[record.header_bytes :]
        size = record.slot_bytes
        records = [memory[at * size : (at + 1) * size] for at in range(len(group))]
        rows = rows_of(record, headers, slots, space.name, disk.per)
        outcome = disk.write_group(slots, records, rows)
        if isinstance(outcome, WriteFailed):
            self._placement.drop_disk_slots(outcome.abandoned)
            if outcome.reason not in NO_ROOM_FAULTS:
                raise StoreError(
                    f"the disk did not take a block ({outcome.reason}); what was imported before "
                    "is in the store, check that device and import again"
                )
            self._full.add(size)
            self.refused[Refused.NO_ROOM] += len(group)
            return
        self._publish(space, group, headers, slots, generations)

    def _slot(self, row: int) -> int:
        return int(self._placement.index.slots(TierName.DISK, np.array([row], np.int32))[0])

    def _publish(
        self,
        space: ImportSpace,
        group: list[_Candidate],
        headers: npt.NDArray[np.uint8],
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
    ) -> None:
        """Put written blocks into the index, each below its parent, for those that follow."""
        index, record = self._placement.index, space.record
        tokens = np.ascontiguousarray(record.tokens(headers))
        with self._placement.lock:
            for at, one in enumerate(group):
                media = bytes(record.fixed(headers[at : at + 1])[0]["media"])
                parent = self._row(one.parent_key) if one.parent == -2 else one.parent
                found = index.publish(
                    TierName.DISK,
                    space.number,
                    -1 if parent is None else parent,
                    np.frombuffer(one.key, np.uint8)[None].copy(),
                    tokens[at : at + 1],
                    slots[at : at + 1],
                    generations[at : at + 1],
                    None if media == NO_MEDIA else {0: media},
                )
                if parent is None or not found.placed.all() or not len(found.rows):
                    # More blocks than an index holds: the row must not stay on disk either.
                    self._disk.remove(slots[at : at + 1])
                    self.refused[Refused.NO_ROOM] += 1
                else:
                    self.imported += 1
        self._placement.counters.add("written_blocks", len(group))
        self._placement.counters.add("written_bytes", len(group) * record.slot_bytes)
