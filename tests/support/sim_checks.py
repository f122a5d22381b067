"""What must be true in a simulation: of every load, at every moment, after every crash."""

from typing import Any

import numpy as np

from kvstore.loading import LoadResult
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.io import aligned_buffer
from kvstore.tiers.record_read import RecordCheck
from kvstore.tiers.segment import segment_name
from support.sim_disk import Node
from support.sim_engine import LoadUnderWay
from support.sim_world import Violation, World, keys_in

SAMPLE = 12  # records read after a crash
NO_LEAKS = {"leases": 0, "holds": 0}


def collect(world: World) -> None:
    """Look at what has ended since: loads, saves, and what the store logged."""
    world.refuse_logged()
    for engine in world.engines:
        for request in engine.requests:
            request.collect()
        for under_way in list(engine.loads):
            if under_way.load.done:
                check_load(world, under_way, under_way.load.result(0))
                engine.finish(under_way)


def check_load(world: World, under_way: LoadUnderWay, result: LoadResult) -> None:
    """The pages of all tokens that a load claims are exactly right."""
    world.note("loaded", result.tokens, "of", under_way.ticket.tokens, result.reason)
    wrong = under_way.engine.wrong(under_way, result.tokens)
    if wrong:
        raise Violation(f"a load delivered wrong bytes in blocks {wrong} of {result.tokens} tokens")
    if result.tokens > under_way.ticket.tokens:
        raise Violation("a load claims more than its ticket")
    bad = {MissReason.CHECKSUM, MissReason.HEADER, MissReason.IO_ERROR}
    life = world.life
    if result.reason in bad and not (
        world.io.hits or life.rebuilt or world.suspects or world.unsure
    ):
        raise Violation(f"a load met {result.reason} where no fault was")


def check_state(world: World) -> None:
    """Index, slots, sums and capacity agree."""
    store = world.store
    with world.calm():
        store.check_integrity()
        disk = store._placement.disk
        assert disk is not None
        used, allocated, capacity = disk.used_bytes, disk.allocated_bytes, disk.capacity_bytes
    if not used <= allocated <= capacity:
        raise Violation(f"used {used} <= allocated {allocated} <= {capacity} is false")


def check_recovered(world: World, *, clean: bool) -> None:
    """After a crash: what was on disk is there and whole, and whatever the catalogue names is."""
    with world.calm():
        _check_recovered(world, clean)


def _check_recovered(world: World, clean: bool) -> None:
    placement = world.store._placement
    sure = not (world.unsure or world.io.hits)
    found = keys_in(placement.index, TierName.DISK)
    if sure and not (world.life.rebuilt and (world.suspects or world.reported)):
        lost = world.on_disk - found
        if lost:
            raise Violation(f"{len(lost)} of {len(world.on_disk)} synced blocks are gone")
        if clean and found - world.on_disk:
            raise Violation("a clean stop brought removed blocks back")
    # A block that came back on disk, with an older record, wins over the one in the arena.
    came_back = world.life.rebuilt or world.removing or world.resized
    if world.host_kept and placement.host.taken_over and not came_back:
        lost = world.in_host - keys_in(placement.index, TierName.HOST)
        if lost:
            raise Violation(f"{len(lost)} blocks of the kept arena are gone")
    if sure:
        _read_some(world, found)
    check_state(world)
    world.unsure = not sure or world.life.rebuilt


def _read_some(world: World, found: set[bytes]) -> None:
    """Read records that the index has on disk: all whole, but those that were flipped."""
    index, disk = world.store._placement.index, world.store._placement.disk
    assert disk is not None
    rows = index.rows_of(tier=TierName.DISK)
    chosen = world.rng.sample(rows.tolist(), min(SAMPLE, len(rows)))
    checks = {engine.space.number: engine.space.check for engine in world.engines}
    for row in chosen:
        key = _key_of(index, row)
        check: RecordCheck | None = checks.get(int(index.rows.space[row]))
        if check is None or key in world.suspects:
            continue
        if world.life.rebuilt and key not in world.on_disk:
            continue  # Headers tell nothing of payloads that were never synced.
        buffer = aligned_buffer(check.record.slot_bytes)
        slot = int(index.slots(TierName.DISK, np.array([row], np.int32))[0])
        fault = disk.read_record(slot, buffer, check)
        header = np.frombuffer(buffer, np.uint8)[: check.record.header_bytes]
        if fault is not None or header[32:48].tobytes() != key:
            known = "synced" if key in world.on_disk else "catalogued"
            raise Violation(f"a {known} block is not whole after a crash: {fault}")


def _key_of(index: Any, row: int) -> bytes:
    return np.array([index.rows.key0[row], index.rows.key1[row]], np.uint64).tobytes()


def flip_on_disk(world: World) -> bool:
    """Flip one bit of a record on disk, anywhere in it."""
    placement = world.store._placement
    index, disk = placement.index, placement.disk
    assert disk is not None
    rows = index.rows_of(tier=TierName.DISK).tolist()
    if not rows:
        return False
    row = world.rng.choice(rows)
    slot = int(index.slots(TierName.DISK, np.array([row], np.int32))[0])
    segment = disk.slab.segment_of(slot)
    volume = disk._volumes[segment % len(disk._volumes)]
    node = world.io._find(volume.path / segment_name(segment))
    assert isinstance(node, Node)
    at = disk.slab.offset_of(slot) + _place(world, disk.slab.class_of(segment))
    node.data[at] ^= 1 << world.rng.randrange(8)
    world.suspects.add(_key_of(index, row))
    return True


def flip_in_arena(world: World) -> bool:
    """Flip one bit of a record in an arena whose owner was killed."""
    placement = world.store._placement
    index, host = placement.index, placement.host
    rows = index.rows_of(tier=TierName.HOST).tolist()
    names = world.disk.directory("/dev/shm").names
    if not rows or not names:
        return False
    node = next(iter(names.values()))
    assert isinstance(node, Node)
    row = world.rng.choice(rows)
    slot = int(index.slots(TierName.HOST, np.array([row], np.int32))[0])
    size = host.slab.class_of(host.slab.segment_of(slot))
    at = int(host.slab.positions_of(np.array([slot]), host.arena.segments_at)[0])
    node.data[at + _place(world, size)] ^= 1 << world.rng.randrange(8)
    world.suspects.add(_key_of(index, row))
    return True


def _place(world: World, slot_bytes: int) -> int:
    """A byte of a record: mostly of its payload."""
    return (
        world.rng.randrange(4096, 4096 + 900)
        if world.rng.random() < 0.8
        else (world.rng.randrange(slot_bytes))
    )


def check_end(world: World) -> None:
    """At rest nothing is held, every slot taken has its block, and no descriptor stays open."""
    with world.calm():
        _check_end(world)


def _check_end(world: World) -> None:
    store, placement = world.store, world.store._placement
    while store._saver.step() or store._loader.step():
        pass
    collect(world)
    for ticket in world.tickets:
        ticket.release()
    world.tickets.clear()
    store.flush()
    collect(world)
    if store.leaks() != NO_LEAKS:
        raise Violation(f"leaks: {store.leaks()}")
    check_state(world)
    disk, index = placement.disk, placement.index
    assert disk is not None
    if placement.host.blocks != index.blocks(TierName.HOST):
        raise Violation("a host slot leaked")
    sick = {"device", "sync_error"} & world.io.hits.keys()
    if not sick:
        if placement.dirty:
            raise Violation(f"a flush left blocks unwritten: {placement.dirty}")
        if disk.flush_removals() is not None:
            raise Violation("removals cannot be committed")
        if disk.slab.occupied() != index.blocks(TierName.DISK):
            raise Violation("a disk slot leaked")
