"""What lies in a store's directory, read beside its owner or without one. Never writes."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.counters import Counters, summary
from kvstore.home import COUNTERS_FILE, LOCK_FILE, StoreFacts, owner_alive, require_store
from kvstore.labels import UNKNOWN, shown
from kvstore.tiers.catalogue import CATALOGUE_ERRORS, Catalogue
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.errors import LayoutError, StoreError
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import ALIGN
from kvstore.tiers.segment import HEADER_BYTES, segment_name
from kvstore.tiers.survey import catalogue_files
from kvstore.tiers.walk import walk


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
    page_locked: host memory that a device reaches by itself, in bytes, and what that took.
    """

    in_use: bool
    tiers: dict[str, TierStats]
    tokens_asked: int
    tokens_hit: dict[str, int]
    misses: dict[str, int]
    page_locked: dict[str, float]
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
        shape["page_locked"]["bytes"] = 0
    with suppress(StoreError):
        blocks, used = disk_use(directory, facts, io)
        tiers["disk"] = TierStats(facts.disk_capacity_bytes, used, blocks)
    return StoreStats(in_use=in_use, tiers=tiers, counters=counters, **shape)


def list_blocks(directory: Path, io: FileIo | None = None) -> Iterator[StoredBlock]:
    """The blocks on disk, volume by volume, in the order of their places.

    Raises ConfigError or StoreError for what is not a store, or has no readable catalogue.
    """
    io = io or FileIo()
    facts = require_store(directory, io)
    refuse_own_process(directory, io)
    for volume in volumes_of(directory, facts):
        with reading_catalogue(directory, volume, io) as catalogue:
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
                            place=place_of(
                                volume,
                                int(row["segment"]),
                                int(row["index"]),
                                int(row["slot_pages"]) * ALIGN,
                            ),
                        )


def layout_of(canonical: bytes) -> Layout | None:
    """The layout whose `canonical()` these bytes are; None for any other bytes."""
    try:
        name, version, block_tokens, groups = json.loads(canonical)
        texts = [text for group in groups for text in (group[3], group[4], group[6])]
        if not all(isinstance(text, str) for text in texts):
            return None
        layout = Layout(
            int(block_tokens),
            tuple(
                CacheGroup(kind, layers, tuple(run_bytes), dtype, scales, window, form)
                for kind, layers, run_bytes, dtype, scales, window, form in groups
            ),
        )
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, LayoutError):
        return None
    return layout if (name, version) == ("layout", 1) and layout.canonical() == canonical else None


def volumes_of(directory: Path, facts: StoreFacts) -> list[Path]:
    """The directory of each volume. The first lies in `directory`, wherever that was moved to."""
    paths = [directory, *facts.paths[1:]]
    return [path / f"disk{number}" for number, path in enumerate(paths)] if facts.paths else []


def refuse_own_process(directory: Path, io: FileIo) -> None:
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
def reading_catalogue(directory: Path, volume: Path, io: FileIo) -> Iterator[Catalogue]:
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
    except CATALOGUE_ERRORS as error:
        raise StoreError(
            f"the catalogue in {volume} cannot be read ({error}); stop its owner and start it again"
        ) from None
    finally:
        catalogue.close()


def disk_use(directory: Path, facts: StoreFacts, io: FileIo) -> tuple[int, int]:
    """Blocks on disk, and bytes of their slots."""
    blocks = used_bytes = 0
    for volume in volumes_of(directory, facts):
        with reading_catalogue(directory, volume, io) as catalogue:
            for batch, _ in catalogue.batches():
                blocks += sum(len(rows) for rows in batch.values())
                used_bytes += sum(bytes_of_slots(rows) for rows in batch.values())
    return blocks, used_bytes


def bytes_of_slots(rows: Rows) -> int:
    """Bytes of the slots that rows name."""
    return int(rows["slot_pages"].sum(dtype=np.int64)) * ALIGN


def place_of(volume: Path, segment: int, index: int, slot_bytes: int) -> str:
    """Where a record lies: segment file and byte offset."""
    return f"{volume / segment_name(segment)}:{HEADER_BYTES + index * slot_bytes}"
