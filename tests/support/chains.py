"""A store of a few long chains on disk, whose records a test damages where they lie.

The pristine directory is made once; every trial works on a copy of it. A load of a chain reads all
its blocks in one wave, so one load is a trial of as many damaged records as the chain has blocks.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import RecordFormat
from support.engine import WAIT_S, Engine

CHAINS = 32
BLOCKS = 128  # of a chain; reads.WAVE_BLOCKS, so that one wave has them all
TOKENS = 4  # of a block
LAYOUT = Layout(TOKENS, (CacheGroup("full", 2, (1000, 1003), "uint8"),))
RECORD = RecordFormat.of(LAYOUT)
RECORDS = CHAINS * BLOCKS
SETTINGS: dict[str, Any] = {"host": "48MiB", "disk_capacity": "96MiB"}
Damage = Callable[[bytearray, int], None]  # changes record number n, in place


def tokens_of(chain: int, blocks: int = BLOCKS) -> npt.NDArray[np.int32]:
    """The prompt whose last usable block is block `blocks - 1` of a chain."""
    random = np.random.default_rng((4, chain))
    return random.integers(0, 50_000, BLOCKS * TOKENS + 1, dtype=np.int32)[: blocks * TOKENS + 1]


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="m"), BLOCKS)


def save_chains(store: Store) -> None:
    """All chains, into host memory."""
    engine = engine_of(store)
    for chain in range(CHAINS):
        assert engine.save(tokens_of(chain))[1].saved == BLOCKS


def make_pristine(directory: Path) -> Path:
    """A closed store with all chains on disk."""
    with open_store(directory, **SETTINGS, direct=False) as store:
        save_chains(store)
    return directory


@dataclass
class Place:
    """Where a record lies: in a file, from a byte on."""

    file: Path
    offset: int


class Trial:
    """A store over a copy of the pristine one: all its blocks lie on disk alone."""

    def __init__(self, pristine: Path, directory: Path, **settings: Any) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)
        shutil.copytree(pristine, directory)
        self.directory = directory
        self._settings = {**SETTINGS, "direct": False, **settings}
        self.open()
        self.places = self.find_records()

    def open(self) -> None:
        self.store = open_store(self.directory, **self._settings)
        self.engine = engine_of(self.store)

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def find_records(self) -> list[Place]:
        """Of every block of every chain, chain after chain."""
        placement = self.store._placement
        assert placement.disk is not None
        places = []
        for chain in range(CHAINS):
            with self.engine.space.sequence(tokens_of(chain)).lookup() as ticket:
                assert ticket.blocks == BLOCKS
                slots = placement.index.slots(TierName.DISK, ticket.rows)
            segments = placement.disk.slab.segments_of(slots).tolist()
            offsets = placement.disk.slab.offsets_of(slots).tolist()
            for segment, offset in zip(segments, offsets, strict=True):
                places.append(Place(self.directory / "disk0" / f"{segment:08x}.seg", offset))
        return places

    def damage(self, change: Damage, records: Any = range(RECORDS)) -> None:
        """Change records in their files, under the open store."""
        for file in {self.places[number].file for number in records}:
            with file.open("r+b") as opened:
                for number in records:
                    place = self.places[number]
                    if place.file == file:
                        opened.seek(place.offset)
                        record = bytearray(opened.read(RECORD.slot_bytes))
                        change(record, number)
                        opened.seek(place.offset)
                        opened.write(record)

    def records(self) -> list[bytes]:
        """The bytes of every record, as they lie in the files."""
        data = {file: file.read_bytes() for file in {place.file for place in self.places}}
        size = RECORD.slot_bytes
        return [data[place.file][place.offset : place.offset + size] for place in self.places]

    def count(self, *names: str) -> int:
        """The sum of some counters."""
        counters = self.store.counters()
        return sum(counters[name] for name in names)

    def load(self, chain: int, blocks: int = BLOCKS, skip: int = 0) -> int:
        """Load a chain from block `skip` on; the bytes of what is usable are checked.

        Returns: blocks that are usable, those that were skipped included.
        """
        sequence = self.engine.space.sequence(tokens_of(chain, blocks))
        with sequence.lookup(skip * TOKENS) as ticket:
            if not skip:
                return self.engine.load(ticket).tokens // TOKENS
            load = ticket.load(self.engine.pool, np.arange(blocks), skip_tokens=skip * TOKENS)
            return load.result(WAIT_S).tokens // TOKENS


def flip(record: bytearray, bit: int) -> None:
    """Flip one bit of a record."""
    record[bit // 8] ^= 1 << bit % 8
