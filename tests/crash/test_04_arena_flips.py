"""Row 4 in host memory: what a dead owner left is damaged before the next one takes it over.

The arena is copied while its owner is at rest, which is what a kill would leave of it; the copy is
damaged and lies under its name again when the store is opened.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.arena_file import ArenaStart
from kvstore.tiers.arena_header import CLASSES_AT
from kvstore.tiers.base import TierName
from kvstore.tiers.host import HostTier
from support.chains import (
    BLOCKS,
    CHAINS,
    RECORD,
    RECORDS,
    SETTINGS,
    TOKENS,
    engine_of,
    flip,
    save_chains,
    tokens_of,
)
from support.checks import assert_at_rest
from support.images import copy_store

HEADER_BITS = RECORD.header_bytes * 8
PAYLOAD_BITS = RECORD.payload_bytes * 8
BODY_BITS = 10_000
PAGE = 4096


@dataclass
class Kill:
    """What a killed owner left: its directory, its arena, and where each record lies in it."""

    directory: Path
    arena: Path
    image: bytes  # as far as there are records
    size: int
    offsets: list[int]  # chain after chain

    def settings(self, at: Path) -> dict[str, Any]:
        shared = {"persist": True, "arena_directory": at}
        # So large and so patient that nothing is written back before a flush.
        return {**SETTINGS, **shared, "host": "96MiB", "dirty_age_s": 3600.0, "direct": False}

    def take_over(self, at: Path, image: bytearray) -> Store:
        """The next owner, in a directory of its own, with this arena."""
        for name in ("store", "shm"):
            with suppress(FileNotFoundError):
                shutil.rmtree(at / name)
        shutil.copytree(self.directory, at / "store")
        (at / "shm").mkdir()
        place = at / "shm" / self.arena.name
        place.touch(0o600)
        place.write_bytes(image)
        os.truncate(place, self.size)
        store = open_store(at / "store", **self.settings(at / "shm"))
        assert store._placement.host.taken_over
        return store


def make_kill(at: Path, flushed: bool) -> Kill:
    """flushed: the blocks are on disk too."""
    kill = Kill(at / "kept", Path(), b"", 0, [])
    (at / "shm").mkdir()
    with open_store(at / "store", **kill.settings(at / "shm")) as store:
        save_chains(store)
        if flushed:
            store.flush()
        placement = store._placement
        engine = engine_of(store)
        for chain in range(CHAINS):
            with engine.space.sequence(tokens_of(chain)).lookup() as ticket:
                assert ticket.blocks == BLOCKS
                slots = placement.index.slots(TierName.HOST, ticket.rows)
            address = placement.host.arena.address
            kill.offsets += [int(a) - address for a in placement.host.record_addresses(slots)]
        copy_store(at / "store", kill.directory)
        kill.arena = placement.host.arena.path
        kill.size = kill.arena.stat().st_size
        with kill.arena.open("rb") as file:
            kill.image = file.read(max(kill.offsets) + RECORD.slot_bytes)
    return kill


@pytest.fixture(scope="module")
def killed(module_memory: Path) -> Kill:
    return make_kill(module_memory, flushed=False)


@pytest.fixture(autouse=True)
def nothing_raised(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread of the store met an exception."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def load(store: Store, chain: int) -> int:
    """Load a chain and check every byte of what is usable. Returns: blocks."""
    return engine_of(store).ask(tokens_of(chain)).tokens // TOKENS


def damaged(kill: Kill, bits: Any) -> bytearray:
    """The image with one bit of every record flipped: bit number `bits[n]` of record n."""
    image = bytearray(kill.image)
    for offset, bit in zip(kill.offsets, bits, strict=True):
        flip(image, offset * 8 + int(bit))
    return image


def test_an_undamaged_arena_serves_all(killed: Kill, memory: Path) -> None:
    with killed.take_over(memory, bytearray(killed.image)) as store:
        assert [load(store, chain) for chain in range(CHAINS)] == [BLOCKS] * CHAINS
        assert store.counters()["tokens_hit.host"] == RECORDS * TOKENS


@pytest.mark.slow
def test_every_bit_of_a_header(killed: Kill, memory: Path) -> None:
    """A record whose header is not whole is no block: nothing of it is found."""
    for first in range(0, HEADER_BITS, RECORDS):
        image = damaged(killed, range(first, first + RECORDS))
        with killed.take_over(memory, image) as store:
            assert store._placement.index.blocks(TierName.HOST) == 0
            assert [load(store, chain) for chain in range(CHAINS)] == [0] * CHAINS
            assert store.counters()["misses.absent"] == RECORDS * TOKENS
            assert_at_rest(store)
    print(f"{HEADER_BITS} of {HEADER_BITS} flipped header bits were counted misses")


@pytest.mark.slow
def test_random_bits_of_a_payload(killed: Kill, memory: Path) -> None:
    """From the last block of each chain to its first: each is loaded by itself, and missed."""
    random = np.random.default_rng(4)
    flipped = 0
    while flipped < BODY_BITS:
        chains = [tokens_of(chain) for chain in range(CHAINS)]
        chains = chains[: -(-(BODY_BITS - flipped) // BLOCKS)]
        bits = random.integers(0, PAYLOAD_BITS, RECORDS) + HEADER_BITS
        with killed.take_over(memory, damaged(killed, bits)) as store:
            engine = engine_of(store)
            for block in reversed(range(BLOCKS)):
                loads = [
                    engine.space.sequence(tokens[: (block + 1) * TOKENS + 1])
                    .lookup(block * TOKENS)
                    .load(engine.pool, range(BLOCKS))
                    for tokens in chains
                ]
                assert {one.result(60).tokens for one in loads} == {block * TOKENS}
            counters, here = store.counters(), len(chains) * BLOCKS
            assert counters["bad_blocks.host"] == here
            assert counters["misses.checksum"] == here * TOKENS
            assert store.leaks() == {"leases": 0, "holds": 0}
            store.check_integrity()
        flipped += here
    print(f"{flipped} of {flipped} flipped payload bits were counted misses")


def test_bits_that_nobody_reads(killed: Kill, memory: Path) -> None:
    padding_at = (RECORD.header_bytes + RECORD.payload_bytes) * 8
    padding_bits = RECORD.slot_bytes * 8 - padding_at
    image = damaged(killed, [padding_at + n % padding_bits for n in range(RECORDS)])
    with killed.take_over(memory, image) as store:
        assert [load(store, chain) for chain in range(CHAINS)] == [BLOCKS] * CHAINS


def test_records_in_each_others_place_are_blocks_all_the_same(killed: Kill, memory: Path) -> None:
    """A slot means nothing by itself: the header says what lies there. Two halves mean nothing."""
    size, half = RECORD.slot_bytes, RECORD.header_bytes
    whole, mixed = bytearray(killed.image), bytearray(killed.image)
    for one, other in zip(killed.offsets[::2], killed.offsets[1::2], strict=True):
        whole[one : one + size] = killed.image[other : other + size]
        whole[other : other + size] = killed.image[one : one + size]
        mixed[one + half : one + size] = killed.image[other + half : other + size]
    with killed.take_over(memory, whole) as store:
        assert [load(store, chain) for chain in range(CHAINS)] == [BLOCKS] * CHAINS
    with killed.take_over(memory, mixed) as store:
        assert [load(store, chain) for chain in range(CHAINS)] == [0] * CHAINS
        assert store.counters()["bad_blocks.host"] == CHAINS


@pytest.mark.parametrize("page", [0, 1])
def test_zeroed_pages(killed: Kill, memory: Path, page: int) -> None:
    image = bytearray(killed.image)
    for offset in killed.offsets:
        image[offset + page * PAGE : offset + (page + 1) * PAGE] = bytes(PAGE)
    with killed.take_over(memory, image) as store:
        assert [load(store, chain) for chain in range(CHAINS)] == [0] * CHAINS
        assert store.counters()["bad_blocks.host"] == (0 if page == 0 else CHAINS)
        missed = "misses.absent" if page == 0 else "misses.checksum"
        assert store.counters()[missed] == RECORDS * TOKENS


def test_a_bad_block_heals_and_the_prefix_before_it_stays(killed: Kill, memory: Path) -> None:
    random = np.random.default_rng(4)
    image = bytearray(killed.image)
    bad = random.integers(0, BLOCKS, CHAINS // 4).tolist()
    for chain, block in enumerate(bad):
        bit = HEADER_BITS * (chain % 2) + int(random.integers(PAYLOAD_BITS))
        flip(image, killed.offsets[chain * BLOCKS + block] * 8 + bit)
    with killed.take_over(memory, image) as store:
        for chain, block in enumerate(bad):
            assert load(store, chain) == block
            _, saved = engine_of(store).save(tokens_of(chain))
            assert (saved.present, saved.saved) == (block, BLOCKS - block)
            assert load(store, chain) == BLOCKS
        assert_at_rest(store)
    settings = killed.settings(memory / "shm")
    with open_store(memory / "store", **settings) as store:
        assert {load(store, chain) for chain in range(len(bad))} == {BLOCKS}


def test_a_block_that_is_bad_in_memory_is_served_from_disk(memory: Path) -> None:
    (memory / "before").mkdir()
    kill = make_kill(memory / "before", flushed=True)
    with kill.take_over(memory, damaged(kill, [HEADER_BITS + 8] * RECORDS)) as store:
        for chain in range(4):
            assert load(store, chain) == 0  # its first block was bad: dropped with all below it
            assert load(store, chain) == BLOCKS
        counters = store.counters()
        assert (counters["bad_blocks.host"], counters["bad_blocks.disk"]) == (4, 0)
        assert counters["tokens_hit.disk"] == 4 * BLOCKS * TOKENS


@pytest.mark.slow
def test_bits_of_the_arenas_own_header(memory: Path) -> None:
    """The arena is taken over without the segment that is not known, or a new one is made."""
    flip_arena_header(memory, every=7)  # each bit of a byte comes up


@pytest.mark.long
def test_every_bit_of_the_arenas_own_header(memory: Path) -> None:
    flip_arena_header(memory, every=1)


def flip_arena_header(memory: Path, every: int) -> None:
    size, segment = 200 << 10, 64 << 10
    own = {"store_id": bytes(16), "persist": True, "directory": memory}
    host = HostTier(size, segment, **own)
    slots = host.reserve(RECORD.slot_bytes, 12)
    keys = np.zeros((12, 16), np.uint8)
    headers = RECORD.build(
        keys=keys,
        parents=keys,
        namespace=bytes(32),
        first_depth=0,
        first_generation=1,
        tokens=np.zeros((12, TOKENS), np.int32),
        created_s=0,
    )
    RECORD.seal(headers)
    host.publish(slots, headers)
    image, path = host.arena.path.read_bytes(), host.arena.path
    covered = CLASSES_AT + 8 * host.arena.segments
    host.close(keep=False)
    outcomes = set()
    for bit in range(0, covered * 8, every):
        data = bytearray(image)
        flip(data, bit)
        path.touch(0o600)
        path.write_bytes(data)
        host = HostTier(size, segment, **own)
        found = sum(len(part.slots) for part in host.scan())
        host.check_integrity()
        outcomes.add((host.arena.start, found))
        host.close(keep=False)
    assert outcomes == {
        (ArenaStart.REPLACED, 0),  # a bit of the fixed part
        (ArenaStart.TAKEN_OVER, 4),  # of the first segment's class: 8 of the blocks lay in it
        (ArenaStart.TAKEN_OVER, 8),
        (ArenaStart.TAKEN_OVER, 12),  # of a word or a byte that says nothing of blocks
    }
