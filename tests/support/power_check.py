"""Loses power at random instants of a recorded log, and looks at each image with the real code.

    python -m support.power_check LOG ROOT SEED IMAGES [STORES]

Lays the images into ROOT, from which the log was recorded. Every image is opened as a disk tier:
each block it names must be there to the byte, with its parent; each block that was written and not
removed before the instant must be among them. STORES of them are opened as a store too, which must
serve every prompt that was flushed, or say that it is not there, and save again. Prints what it
found as JSON, one line before each image: a process that dies is blamed on the last line.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.home import OVERHEAD_BYTES, read_facts
from kvstore.store import Store
from kvstore.tiers.catalogue_row import slots_of_rows
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.errors import KvstoreError
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.record import HEADER, RecordFormat
from kvstore.tiers.record_read import RecordCheck
from support.engine import Engine, payload_of
from support.marks import Promised
from support.power_image import Content, Disk, Image, Place
from support.power_workload import (
    BLOCKS,
    CAPACITY_BYTES,
    LAYOUTS,
    SEGMENT_BYTES,
    config_of,
    prompt_of,
    small_segments,
)
from support.shim import Entry, Event, entries
from support.walkers import Walkers

CHECKS = [RecordCheck(layout) for layout in LAYOUTS]


class Checker:
    """Opens images. found: totals over all of them; faults: what must not be, with the instant."""

    def __init__(self, root: Path, store_id: bytes, walkers: Walkers) -> None:
        self._root = root
        self._store_id = store_id
        self._walkers = walkers
        self._good: dict[int, tuple[bytes, list[bytes]]] = {}  # slot -> row and pages, checked
        self.found: Counter[str] = Counter()
        self.faults: list[str] = []

    def check(self, image: Image, promised: Promised, instant: str) -> None:
        """Open an image as a disk tier and compare all that it names."""
        self.found["images"] += 1
        disk = self._root / "store" / "disk0"
        if not disk.parent.is_dir():
            self._fault(instant, "lost: the store's directory is gone", bool(promised.slots))
            return
        try:
            tier = DiskTier(
                [disk],
                CAPACITY_BYTES,
                SEGMENT_BYTES,
                FileIo(),
                store_id=self._store_id,
                direct=False,
                other_bytes=OVERHEAD_BYTES,
                catalogues=self._walkers,
            )
            loaded = tier.load()
        except KvstoreError as error:
            self._fault(instant, f"refused: {error}")
            return
        rebuilt = bool(loaded.rebuilt)
        self.found["rebuilt"] += rebuilt
        self._fault(instant, "damaged rows", loaded.damaged > 0)
        good: set[bytes] = set()
        parents: dict[bytes, bytes] = {}
        for rows in loaded.rows.values():
            for row, slot in zip(rows, slots_of_rows(rows, tier.per).tolist(), strict=True):
                key = bytes(row["key"])
                fault = self._read(tier, row, slot, image, promised)
                if fault is None:
                    good.add(key)
                    if row["depth"]:
                        parents[key] = bytes(row["parent"])
                elif fault == "wrong" or not rebuilt:
                    self._fault(instant, f"{fault} in slot {slot}")
                else:
                    self.found["counted misses of a rebuilt catalogue"] += 1
        lost = promised.slots.keys() - good
        self._fault(instant, f"lost: {len(lost)} blocks that were synced", bool(lost))
        # A rebuilt catalogue may name blocks that were removed; the store drops those at its start.
        orphans = {parents[key] for key in promised.slots.keys() & parents.keys()} - good
        self._fault(instant, f"orphans: {len(orphans)} parents missing", bool(orphans))
        tier.check_integrity()
        tier.close()
        self.found["blocks"] += len(good)
        self.found["synced blocks"] += len(promised.slots)

    def check_store(self, promised: Promised, flushed: list[int], instant: str) -> None:
        """Open an image as a store, load prompts from it, and save one."""
        try:
            store = Store(config_of(self._root), catalogues=self._walkers)
        except KvstoreError as error:
            self._fault(instant, f"refused: {error}")
            return
        with store:
            store.check_integrity()
            for number in [*flushed[-6:], 1000]:
                which = number // 6 % 2
                tenant = f"tenant {number // 12 % 3}"
                space = store.namespace(LAYOUTS[which], model=f"model {which}", tenant=tenant)
                engine = Engine(space, 2 * BLOCKS)
                sequence = space.sequence(prompt_of(number))
                with sequence.lookup() as ticket:
                    result = engine.load(ticket)  # asserts every byte
                keys = [key.tobytes() for key in sequence.keys[: sequence.blocks]]
                there = [key in promised.slots for key in keys]
                must = len(there) if all(there) else there.index(False)
                blocks = result.tokens // space.layout.block_tokens
                self._fault(instant, f"lost: prompt {number}", blocks < must)
                self.found["blocks of stores"] += blocks
            _, saved = engine.save(prompt_of(1000))
            store.flush()
            self._fault(instant, f"a save was dropped: {saved.dropped}", bool(saved.dropped))
        self.found["stores"] += 1

    def _read(
        self, tier: DiskTier, row: Any, slot: int, image: Image, promised: Promised
    ) -> str | None:
        """None for a block that is exactly what it must be; else what is wrong with it."""
        namespace = tier.namespaces().get(int(row["namespace"]))
        which = None if namespace is None else promised.layouts.get(namespace.digest)
        if which is None:
            return "a row of no namespace"
        size = RecordFormat.of(LAYOUTS[which]).slot_bytes
        content = image.files[str(self._root / f"store/disk0/{slot // tier.per:08x}.seg")]
        row_bytes, pages = row.tobytes(), _pages_of(content, tier.slab.offset_of(slot), size)
        known = self._good.get(slot)
        if known is not None and known[0] == row_bytes and _are_same(known[1], pages):
            return None
        buffer = aligned_buffer(size)
        if tier.read_record(slot, buffer, CHECKS[which]) is not None:
            return "a record that fails its check"
        header = np.frombuffer(buffer[: HEADER.itemsize], HEADER)[0]
        key, record = bytes(row["key"]), RecordFormat.of(LAYOUTS[which])
        if bytes(header["key"]) != key:
            return "another block's record"
        payload = buffer[record.header_bytes : record.header_bytes + record.payload_bytes]
        if payload != memoryview(payload_of(LAYOUTS[which], key)):
            return "wrong"
        self._good[slot] = row_bytes, pages
        self.found["records read"] += 1
        return None

    def _fault(self, instant: str, text: str, is_so: bool = True) -> None:
        if is_so:
            self.faults.append(f"{instant}: {text}")


def _pages_of(content: Content, offset: int, size: int) -> list[bytes]:
    return content.pages[offset // 4096 : (offset + size) // 4096]


def _are_same(one: list[bytes], other: list[bytes]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def instants(log: list[Entry], images: int, chance: random.Random) -> Iterator[int]:
    """Numbers of entries, in order, after which the power goes."""
    yield from sorted(chance.randrange(1, len(log) + 1) for _ in range(images))


def flushed_numbers(log: list[Entry]) -> list[int]:
    """The prompts in the order of the marks: each is saved and flushed in turn."""
    return [at for at, _ in enumerate(e for e in log if e.name == "flushed")]


def main(log_path: Path, root: Path, seed: int, images: int, stores: int) -> None:
    small_segments()
    walkers = Walkers()
    log = list(entries(log_path))
    facts = read_facts(root / "store", FileIo())
    assert facts is not None, "the recorded store is gone"
    checker = Checker(root, facts.store_id, walkers)
    place, disk, promised = Place(root), Disk(str(root)), Promised()
    chance = random.Random(seed)
    every = images // stores if stores else images + 1
    at, flushes = 0, 0
    for number, instant in enumerate(instants(log, images, chance)):
        for entry in log[at:instant]:
            if entry.event is Event.MARK:
                promised.apply(entry.name, bytes(entry.data))
                flushes += entry.name == "flushed"
            else:
                disk.apply(entry)
        at = instant
        name = f"image {number} at {instant} (replay: LOG ROOT {seed} {images})"
        print(json.dumps(name), flush=True)
        image = disk.image(random.Random(f"{seed} {number}"))
        place.lay(image)
        if number % every == every - 1:
            checker.check_store(promised, list(range(flushes)), name)
        else:
            checker.check(image, promised, name)
    walkers.close()
    faults = promised.broken + checker.faults
    deaths = len(walkers.deaths)
    print(json.dumps({**checker.found, "faults": faults, "walks that died": deaths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
