"""What may happen next in a simulation, and how often."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from kvstore.invalidation import Scope
from kvstore.store import Store
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError
from support.sim_checks import (
    check_end,
    check_recovered,
    check_state,
    collect,
    flip_in_arena,
    flip_on_disk,
)
from support.sim_io import Faults, PowerLoss
from support.sim_world import MIB, ROOM_BYTES, SEGMENT, World

BLOCKS_MAX = 8
TICKETS_MAX = 6
CHECK_EVERY = 50

# --- what engines do


def save(world: World) -> None:
    engine = world.rng.choice(world.engines)
    request = engine.start(world.rng, world.rng.randint(1, BLOCKS_MAX))
    if request is not None:
        engine.save(request)
        world.note("save", request.sequence.blocks, "blocks of", engine.tenant)


def extend(world: World) -> None:
    engine = world.rng.choice(world.engines)
    if engine.requests:
        request = world.rng.choice(engine.requests)
        if engine.extend(world.rng, request, world.rng.randint(1, 3)):
            engine.save(request)
            world.note("extend to", request.sequence.blocks)


def lookup(world: World) -> None:
    engine = world.rng.choice(world.engines)
    sequence = engine.sequence(world.rng, world.rng.randint(1, BLOCKS_MAX))
    size = engine.layout.block_tokens
    skip = size * world.rng.choice((0, 0, 0, 1, 2))
    ticket = sequence.lookup(skip)
    world.tickets.append(ticket)
    world.note("lookup found", ticket.blocks, "of", sequence.blocks, dict(ticket.by_tier))
    if len(world.tickets) > TICKETS_MAX:
        world.tickets.pop(0).release()


def load(world: World) -> None:
    if not world.tickets:
        return
    ticket = world.tickets.pop(world.rng.randrange(len(world.tickets)))
    engine = next(e for e in world.engines if e.space is ticket.sequence.space)
    size = engine.layout.block_tokens
    under_way = engine.load(ticket, ticket.skip_tokens // size)
    if under_way is None:
        ticket.release()
        return
    world.note("load", ticket.tokens)
    if world.rng.random() < 0.05:
        under_way.load.cancel()


def release(world: World) -> None:
    if world.tickets:
        world.tickets.pop(world.rng.randrange(len(world.tickets))).release()
        world.note("release")


def leave_tickets(world: World) -> None:
    """An engine dies with its tickets: their leases expire."""
    world.tickets.clear()
    advance_far(world)


# --- what time and the store's own threads do


def advance(world: World) -> None:
    world.clock.now += world.rng.choice((0.001, 0.3, 1.5))


def advance_far(world: World) -> None:
    world.clock.now += 6.0
    world.note("later")


def saver_step(world: World) -> None:
    if "saver" not in world.running:
        with world.running_part("saver"):
            if world.store._saver.step():
                world.note("saved", world.store._counters.get("saved_blocks"))


def loader_step(world: World) -> None:
    if "loader" not in world.running:
        with world.running_part("loader"):
            world.store._loader.step()


def writer_step(world: World) -> None:
    writer = world.store._writer
    assert writer is not None
    if world.may_write():
        with world.running_part("writer"):
            if writer.step():
                written = world.store._counters.get("written_blocks")
                failed = world.store._counters.get("write_failures")
                world.note("wrote", written, failed)


def invalidate(world: World) -> None:
    """All of a tenant is dropped: what is computed from now on is another version of it."""
    tenant = world.rng.choice(world.engines).tenant
    old = world.versions[tenant]
    new = max(old) + 1
    world.versions[tenant] = {*old, new}  # Until the call returns, either.
    done = world.store.invalidate(Scope(tenant=tenant))
    if done.durable:  # Else a next owner may serve the old ones.
        world.versions[tenant] = {new}
    world.note("invalidated all of", tenant, done.blocks, done.durable)


def pin(world: World) -> None:
    engine = world.rng.choice(world.engines)
    sequence = engine.sequence(world.rng, world.rng.randint(1, BLOCKS_MAX))
    pinned = world.store.pin(sequence, ttl_s=world.rng.choice((3.0, 30.0)))
    world.note("pin", type(pinned).__name__)


def resize(world: World) -> None:
    """Another capacity for one tier; it may be refused, and then nothing has changed."""
    host = world.rng.random() < 0.5
    size = world.rng.choice((1, 2, 3, 5)) * SEGMENT + (16 << 10 if host else MIB)
    world.resized = True
    # It writes back what is in its way.
    with world.running_part("writer"), world.running_part("writer"):
        try:
            if host:
                done = world.store.resize(host_bytes=size)
            else:
                done = world.store.resize(disk_bytes=size * len(world.paths))
            world.note("resized", done.host_bytes, done.disk_bytes, done.reason)
        except ConfigError as error:
            world.note("not resized:", str(error)[:60])


def report_bad(world: World) -> None:
    """An engine finds a block bad by a check of its own."""
    engine = world.rng.choice(world.engines)
    sequence = engine.sequence(world.rng, world.rng.randint(1, BLOCKS_MAX))
    world.reported = True
    dropped = world.store.report_bad(sequence, world.rng.randrange(sequence.blocks))
    world.note("reported bad:", dropped)


# --- what goes wrong


def drop_bad(world: World) -> None:
    placement = world.store._placement
    tier = world.rng.choice((TierName.HOST, TierName.DISK))
    rows = placement.index.rows_of(tier=tier).tolist()
    if rows:
        world.note("drop a bad block of", tier)
        placement.drop_bad(world.rng.choice(rows), tier)


def flip(world: World) -> None:
    if flip_on_disk(world):
        world.note("flip a bit on disk")


def faults_on(world: World) -> None:
    name = world.rng.choice([one.name for one in fields(Faults)])
    rare = name in ("device", "sync_error")
    setattr(world.faults, name, world.rng.choice((0.03, 0.15)) * (0.5 if rare else 1.0))
    world.note("faults:", name)


def fill_disk(world: World) -> None:
    """Somebody else takes the rest of the disk."""
    world.disk.capacity_bytes = world.disk.taken_bytes() + world.rng.choice((0, 8, 90)) * 4096
    world.note("the disk is full")


def faults_off(world: World) -> None:
    world.faults.clear()
    world.disk.capacity_bytes = ROOM_BYTES
    world.note("no faults")


# --- starts and stops


def flush(world: World) -> None:
    world.note("flush")
    with world.running_part("saver"), world.running_part("writer"), world.running_part("writer"):
        world.store.flush()


def restart(world: World) -> None:
    """A clean stop, and a start that finds everything that was on disk."""
    world.note("stop")
    world.alone += 1
    store: Store = world.store
    store.flush()
    collect(world)
    for ticket in world.tickets:
        ticket.release()
    while store._loader.step():
        pass
    collect(world)
    world.alone -= 1
    sick = bool({"device", "sync_error"} & world.io.hits.keys()) or bool(world.io.hits)
    world.unsure |= sick
    world.host_kept = False
    world.close()
    world.open()
    check_recovered(world, clean=not sick)


def kill(world: World) -> None:
    """The process ends at one of its next calls."""
    world.power, world.crash_in = False, world.rng.randint(1, 25)


def cut_power(world: World) -> None:
    """The machine ends at one of its next calls."""
    world.power, world.crash_in = True, world.rng.randint(1, 25)


def recover(world: World) -> None:
    """After a crash: open the store again, and look at what it has kept."""
    world.unsure |= bool({"device", "sync_error"} & world.io.hits.keys())
    world.alone = world.depth = 0
    world.host_kept = not world.power and world.config.persist
    if world.host_kept and world.rng.random() < 0.3 and flip_in_arena(world):
        world.note("flip a bit in the arena")
        world.host_kept = False
    for state in world.catalogues.states.values():
        if world.rng.random() < 0.06:
            world.note("the catalogue is unreadable")
            state.readable = False
    if world.rng.random() < 0.8:
        faults_off(world)
    world.open()
    check_recovered(world, clean=False)


Step = Callable[[World], None]
WEIGHTS: tuple[tuple[Step, float], ...] = (
    (save, 16),
    (extend, 6),
    (lookup, 14),
    (load, 13),
    (release, 2),
    (leave_tickets, 1.5),
    (advance, 6),
    (advance_far, 1),
    (saver_step, 16),
    (loader_step, 13),
    (writer_step, 14),
    (drop_bad, 1),
    (invalidate, 0.3),
    (pin, 0.6),
    (resize, 0.4),
    (report_bad, 0.6),
    (flip, 0.7),
    (faults_on, 1.5),
    (fill_disk, 0.4),
    (faults_off, 2.5),
    (flush, 1.5),
    (restart, 0.5),
    (kill, 0.7),
    (cut_power, 1.1),
)
STEPS = tuple(step for step, _ in WEIGHTS)
CHANCES = np.cumsum([weight for _, weight in WEIGHTS]).tolist()
# In the middle of a call: what needs nothing of whoever is in that call.
MEANWHILE = (save, extend, lookup, load, release, advance, saver_step, loader_step, writer_step)
MEANWHILE_CHANCES = np.cumsum([2, 1, 2, 2, 1, 1, 4, 4, 4]).tolist()


def meanwhile(world: World) -> None:
    """Others have a turn, several steps of it."""
    for step in world.rng.choices(MEANWHILE, cum_weights=MEANWHILE_CHANCES, k=2):
        step(world)


def run(world: World, steps: int) -> None:
    """A whole simulation. Raises Violation, or whatever the store raised."""
    world.others = meanwhile
    world.open()
    for number in range(steps):
        step = world.rng.choices(STEPS, cum_weights=CHANCES)[0]
        try:
            step(world)
            collect(world)
            if number % CHECK_EVERY == 0:
                check_state(world)
        except PowerLoss:
            recover(world)
    world.crash_in = 0
    faults_off(world)
    check_end(world)
    world.note("end", sorted(world.store.counters().items()))
    world.close()
