"""What lies in a store's directory, read beside its owner or without one. Never writes to a store.

The owner goes on while this reads, so a slot may get another block between reading its row and
reading its bytes: before a block is called bad, its row is read again.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.counters import Counters, summary
from kvstore.hashing.checksum import verify_runs
from kvstore.home import COUNTERS_FILE, LOCK_FILE, StoreFacts, owner_alive, require_store
from kvstore.labels import UNKNOWN, shown
from kvstore.tiers.catalogue import Catalogue
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.errors import LayoutError, StoreError
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import ALIGN, RecordFormat
from kvstore.tiers.segment import HEADER_BYTES, segment_name
from kvstore.tiers.survey import catalogue_files
from kvstore.tiers.walk import walk


class Progress(Protocol):
    """Told now and then what is done and what there is to do, in bytes."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None: ...


@dataclass(frozen=True)
class TierStats:
    """Room in one tier. capacity_bytes: what it may use; used_bytes: slots that hold a block."""

    capacity_bytes: int
    used_bytes: int
    blocks: int


@dataclass(frozen=True)
class StoreStats:
    """What a store holds and what was asked of it, over all its owners. Tokens, not requests.

    in_use: whether a process owns the store now.  counters: everything that is counted, by name.
    """

    in_use: bool
    tiers: dict[str, TierStats]
    tokens_asked: int
    tokens_hit: dict[str, int]
    misses: dict[str, int]
    counters: dict[str, int]

    def document(self) -> dict[str, Any]:
        """As `kvstore stats --json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class StoredBlock:
    """A block on disk, as the catalogue has it. Sizes in bytes, keys in hex.

    first_token: number of its first token in its prompt.  label: model and tenant.
    """

    key: str
    parent: str
    label: str
    first_token: int
    block_tokens: int
    slot_bytes: int
    created_s: int
    place: str

    def document(self) -> dict[str, Any]:
        """As `kvstore ls --json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class BadBlock:
    """A block whose bytes are not those that were saved. key: hex, "" where no row names it."""

    key: str
    reason: str
    place: str


@dataclass
class Verification:
    """What `verify_store` found. blocks, bytes: what was read and checked, bad ones included.

    unchecked: blocks whose header is right but whose payload cannot be checked, because the
    catalogue lost their layout; it comes back when an engine opens the namespace again.
    """

    blocks: int = 0
    bytes: int = 0
    bad: list[BadBlock] = field(default_factory=list)
    unchecked: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """As `kvstore verify --json` prints it."""
        bad = [{"key": block.key, "reason": block.reason} for block in self.bad]
        return {"blocks": self.blocks, "bytes": self.bytes, "bad": bad, "seconds": self.seconds}


def read_stats(directory: Path, io: FileIo | None = None) -> StoreStats:
    """Room, hits and misses of the store in `directory`.

    Raises ConfigError or StoreError, in one sentence, for what is not a store.
    """
    io = io or FileIo()
    facts = require_store(directory, io)
    place = directory / COUNTERS_FILE
    counters = Counters.read(place, io) if io.exists(place) else Counters.in_memory().all()
    in_use = owner_alive(directory, io)
    shape: dict[str, Any] = summary(counters)
    tiers = {name: TierStats(**numbers) for name, numbers in shape.pop("tiers").items()}
    # The counters hold the last owner's word on its tiers. Its disk is here to be read, and its
    # memory ended with it.
    if not in_use:
        tiers["host"] = TierStats(tiers["host"].capacity_bytes, 0, 0)
    with suppress(StoreError):
        blocks, used = _disk_use(directory, facts, io)
        tiers["disk"] = TierStats(facts.disk_capacity_bytes, used, blocks)
    return StoreStats(in_use=in_use, tiers=tiers, counters=counters, **shape)


def list_blocks(directory: Path, io: FileIo | None = None) -> Iterator[StoredBlock]:
    """The blocks on disk, volume by volume, in the order of their places.

    Raises ConfigError or StoreError for what is not a store, or has no readable catalogue.
    """
    io = io or FileIo()
    facts = require_store(directory, io)
    _refuse_own_process(directory, io)
    for volume in _volumes(directory, facts):
        with _catalogue(directory, volume, io) as catalogue:
            labels = {n: shown(space.label) for n, space in catalogue.namespaces().items()}
            for batch, _ in catalogue.batches():
                for block_tokens, rows in batch.items():
                    for row in rows:
                        yield StoredBlock(
                            key=bytes(row["key"]).hex(),
                            parent=bytes(row["parent"]).hex(),
                            label=labels.get(int(row["namespace"]), UNKNOWN),
                            first_token=int(row["depth"]) * block_tokens,
                            block_tokens=block_tokens,
                            slot_bytes=int(row["slot_pages"]) * ALIGN,
                            created_s=int(row["created_s"]),
                            place=_place(volume, row),
                        )


def verify_store(
    directory: Path, progress: Progress | None = None, io: FileIo | None = None
) -> Verification:
    """Read every block on disk and check header, identity and every run. Changes nothing.

    A block that its owner removes meanwhile is left out. Raises ConfigError or StoreError for what
    is not a store; a catalogue that cannot be read is a bad entry, with an empty key.
    """
    io = io or FileIo()
    began_s = time.monotonic()
    facts = require_store(directory, io)
    _refuse_own_process(directory, io)
    found = Verification()
    total_bytes = 0
    with suppress(StoreError):
        total_bytes = _disk_use(directory, facts, io)[1] if progress else 0
    for volume in _volumes(directory, facts):
        try:
            with _catalogue(directory, volume, io) as catalogue:
                reader = _Reader(volume, catalogue, io)
                try:
                    for batch, damaged in catalogue.batches():
                        row_fault = BadBlock("", "catalogue_row", str(volume))
                        found.bad += [row_fault] * damaged
                        for rows in batch.values():
                            for row in rows:
                                reader.check(row, found)
                                if progress:
                                    progress(found.bytes, max(total_bytes, found.bytes))
                finally:
                    reader.close()
        except StoreError:
            found.bad.append(BadBlock("", "catalogue", str(volume)))
    found.seconds = time.monotonic() - began_s
    return found


class _Reader:
    """Reads and checks the blocks of one volume, around the page cache where that is possible."""

    def __init__(self, volume: Path, catalogue: Catalogue, io: FileIo) -> None:
        self._volume = volume
        self._catalogue = catalogue
        self._io = io
        self._direct = io.supports_direct(volume)
        self._segment = -1
        self._fd = -1
        self._buffer = aligned_buffer(ALIGN)
        self._spaces: dict[int, tuple[Namespace, Layout | None]] = {}

    def close(self) -> None:
        """Close the segment that was read last."""
        if self._fd >= 0:
            self._io.close(self._fd)
        self._fd = self._segment = -1

    def check(self, row: np.void, found: Verification) -> None:
        """Check one block and add it to `found`, unless its owner removed it meanwhile."""
        fault, whole = self._fault(row)
        if fault is not None:
            now = self._catalogue.row(int(row["segment"]), int(row["index"]))
            if now is None or now[0]["generation"] != row["generation"]:
                return
            self.close()  # The file may have been made anew under the same name.
            fault, whole = self._fault(row)
        found.blocks += 1
        found.bytes += int(row["slot_pages"]) * ALIGN
        found.unchecked += not whole
        if fault is not None:
            key = bytes(row["key"]).hex()
            found.bad.append(BadBlock(key, fault, _place(self._volume, row)))

    def _fault(self, row: np.void) -> tuple[str | None, bool]:
        """Why a block is bad, or None; and whether its payload could be checked."""
        slot_bytes = int(row["slot_pages"]) * ALIGN
        record = self._read(row, slot_bytes)
        if record is None:
            return "io_error", True
        space, layout = self._space(int(row["namespace"]))
        header = record.view(np.uint8)
        shape = RecordFormat.of(layout) if layout else _shape_of(row, header)
        if shape is None or shape.slot_bytes != slot_bytes:
            return "header_length", True
        header = record[: shape.header_bytes]
        fault = shape.check_header(header)
        if fault is None and space is not None:
            fault = shape.check_identity(
                header,
                namespace=space.digest,
                key=bytes(row["key"]),
                parent=bytes(row["parent"]),
                generation=int(row["generation"]),
                tokens=row["tokens"],
            )
        if fault is not None:
            return f"header_{fault}", True
        if layout is None:
            return None, False
        payload = record[shape.header_bytes : shape.header_bytes + shape.payload_bytes]
        sums = np.array(shape.checksums(header[None, :])[0])
        bad = verify_runs(payload, layout.run_offsets, layout.run_lengths, sums)
        return (None if bad < 0 else "payload_checksum"), True

    def _read(self, row: np.void, slot_bytes: int) -> npt.NDArray[np.uint8] | None:
        segment, index = int(row["segment"]), int(row["index"])
        if len(self._buffer) < slot_bytes:
            self._buffer = aligned_buffer(slot_bytes)
        try:
            if segment != self._segment:
                self.close()
                name = self._volume / segment_name(segment)
                self._fd = self._io.open(name, direct=self._direct)
                self._segment = segment
            view = self._buffer[:slot_bytes]
            got = self._io.pread(self._fd, view, HEADER_BYTES + index * slot_bytes)
        except OSError:
            return None
        return np.frombuffer(view, np.uint8) if got == slot_bytes else None

    def _space(self, number: int) -> tuple[Namespace | None, Layout | None]:
        if number not in self._spaces:
            # Read when it is met: the owner may have made a namespace since.
            for known, space in self._catalogue.namespaces().items():
                self._spaces[known] = (space, layout_of(space.layout))
        return self._spaces.get(number, (None, None))


def layout_of(canonical: bytes) -> Layout | None:
    """The layout whose `canonical()` these bytes are; None for any other bytes."""
    try:
        name, version, block_tokens, groups = json.loads(canonical)
        layout = Layout(
            int(block_tokens),
            tuple(
                CacheGroup(kind, layers, tuple(run_bytes), dtype, scales, window, form)
                for kind, layers, run_bytes, dtype, scales, window, form in groups
            ),
        )
    except (ValueError, TypeError, LayoutError):
        return None
    return layout if (name, version) == ("layout", 1) and layout.canonical() == canonical else None


def _shape_of(row: np.void, record: npt.NDArray[np.uint8]) -> RecordFormat | None:
    """The sizes that a header itself states, for a block whose layout was lost."""
    runs, payload_bytes = record[140:144].view("<u4")[0], record[16:24].view("<u8")[0]
    shape = RecordFormat(len(row["tokens"]), int(runs), int(payload_bytes))
    return shape if shape.slot_bytes == len(record) else None


def _volumes(directory: Path, facts: StoreFacts) -> list[Path]:
    """The directory of each volume. The first lies in `directory`, wherever that was moved to."""
    paths = [directory, *facts.paths[1:]]
    return [path / f"disk{number}" for number, path in enumerate(paths)] if facts.paths else []


def _refuse_own_process(directory: Path, io: FileIo) -> None:
    """LMDB cannot open a file twice in one process: its owner is asked by its own methods."""
    if not owner_alive(directory, io):
        return
    fd = io.open(directory / LOCK_FILE)
    try:
        text = bytearray(32)
        io.pread(fd, text, 0)
    finally:
        io.close(fd)
    if bytes(text).split(b"\n")[0] == str(os.getpid()).encode():
        raise StoreError(f"{directory} is in use by this very process; read it from another one")


@contextmanager
def _catalogue(directory: Path, volume: Path, io: FileIo) -> Iterator[Catalogue]:
    """The catalogue of a volume, to be read. Raises StoreError for one that cannot be.

    A broken LMDB file can kill its reader. Without an owner a child process walks it first; an
    owner did that when it opened the store, and a walk beside it would see pages in the making.
    """
    place, _ = catalogue_files(volume)
    if not io.exists(place):
        raise StoreError(
            f"{volume} has no catalogue; open the store for writing once to rebuild it"
        )
    sound = owner_alive(directory, io) or walk(place.parent, io.status(place).st_size).sound
    if not sound and not owner_alive(directory, io):
        raise StoreError(
            f"the catalogue in {volume} is damaged; open the store for writing once to rebuild it"
        )
    catalogue = Catalogue(place.parent, io, readonly=True)
    try:
        yield catalogue
    finally:
        catalogue.close()


def _disk_use(directory: Path, facts: StoreFacts, io: FileIo) -> tuple[int, int]:
    """Blocks on disk, and bytes of their slots."""
    blocks = used_bytes = 0
    for volume in _volumes(directory, facts):
        with _catalogue(directory, volume, io) as catalogue:
            for batch, _ in catalogue.batches():
                blocks += sum(len(rows) for rows in batch.values())
                used_bytes += sum(_slot_bytes(rows) for rows in batch.values())
    return blocks, used_bytes


def _slot_bytes(rows: Rows) -> int:
    return int(rows["slot_pages"].sum(dtype=np.int64)) * ALIGN


def _place(volume: Path, row: np.void) -> str:
    """Where a block's record lies: segment file and byte offset."""
    offset = HEADER_BYTES + int(row["index"]) * int(row["slot_pages"]) * ALIGN
    return f"{volume / segment_name(int(row['segment']))}:{offset}"
