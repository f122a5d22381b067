"""One simulated machine: a store, its engines, its files, its clock, and a seed that decides.

The store is the whole real one, without threads. Only files, time and LMDB are replaced. Where the
store calls for files, and at its failpoints, others may have their turn in the middle of the call,
or the process or the machine may end.
"""

import hashlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from kvstore import config as config_module
from kvstore import disk_slots, opening, reads, resizing, saving, writeback
from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.index import Index
from kvstore.store import Store
from kvstore.ticket import Ticket
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import KvstoreError
from kvstore.tiers.failpoints import FAILPOINTS, armed
from support.model_catalogue import ModelCatalogues
from support.sim_disk import SimDisk
from support.sim_engine import LARGE, SMALL, SimEngine
from support.sim_io import Faults, PowerLoss, SimIo

MIB = 1 << 20
ROOM_BYTES = 64 * MIB
SEGMENT = 260 << 10  # what config.segment_bytes makes of SEGMENT_MIN_BYTES
NEST = 0.08  # chance that others have a turn in the middle of a call
DEPTH_MAX = 2
STORE_ID = bytes(range(16))
# So that small worlds have groups, chunks and waves that follow one another.
SIZES: tuple[tuple[object, str, object], ...] = (
    (config_module, "SEGMENT_MIN_BYTES", 256 << 10),
    (config_module, "CAPACITY_MIN_BYTES", SEGMENT),
    (resizing, "CAPACITY_MIN_BYTES", SEGMENT),
    (writeback, "GROUP_BLOCKS", 8),
    (disk_slots, "RESERVE_BLOCKS", 16),
    (saving, "CHUNK_BLOCKS", 6),
    (reads, "WAVE_BLOCKS", 6),
    (reads, "COPY_BLOCKS", 2),
    (opening, "new_store_id", lambda: STORE_ID),
)


class Violation(AssertionError):
    """The store broke a promise."""


class SimClock(Clock):
    """Time passes when the simulation says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_800_000_000.0 + self.now


@dataclass
class Life:
    """What happened since the store was opened: what may be lost in its crash."""

    rebuilt: bool = False  # from the headers, because a catalogue was damaged


class World:
    """See the module. Made and used inside `installed`."""

    def __init__(self, seed: int, hub: "Hub") -> None:
        hub.between = self.between
        self.hub = hub
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = SimClock()
        self.faults = Faults()
        self.tickets: list[Ticket] = []
        self.suspects: set[bytes] = set()  # keys of blocks of which a bit was flipped, ever
        self.show: Callable[[str], None] = lambda line: None
        self.live = False  # the store is open
        self.alone = 0  # nobody has a turn in the middle of a call
        self.depth = 0
        self.running: list[str] = []  # parts of the store whose steps are under way
        self.crash_in = 0  # calls until the process, or the machine, ends
        self.power = False  # which of both
        self.on_disk: set[bytes] = set()  # keys, at the last crash
        self.in_host: set[bytes] = set()
        self.removing = False  # rows of blocks that had left the disk were still in a catalogue
        self.others: Callable[[World], None] = lambda world: None
        self.life = Life()
        self.resized = False  # ever: host memory is as large as configured in each new owner
        self.reported = False  # a block was, ever: a rebuild leaves out what is older
        self.unsure = False  # faults may have cost blocks that the index still had
        self.host_kept = False  # the arena outlived the last crash, as it was
        self._digest = hashlib.sha256()
        self.io: SimIo
        self.store: Store
        rng = self.rng
        self.paths = tuple(Path(f"/sim/store{n}") for n in range(rng.choice((1, 1, 2))))
        segments = rng.choice((3, 4, 6)) * len(self.paths)
        self.config = Config(
            host_capacity_bytes=rng.choice((2, 3, 4)) * SEGMENT + (16 << 10),
            disk_paths=self.paths,
            disk_capacity_bytes=segments * (SEGMENT + (64 << 10)) + len(self.paths) * MIB,
            persist=rng.random() < 0.5,
            direct=rng.random() < 0.8,
            lease_s=5.0,
            dirty_age_s=rng.choice((0.0, 2.0)),
            save_queue_blocks=40,
            load_queue=6,
        )
        self.disk = SimDisk(ROOM_BYTES)
        self.disk.add_directory("/sim")
        self.disk.add_directory("/dev/shm", volatile=True)
        self.catalogues = ModelCatalogues(self._chance)
        kinds = [(SMALL, "a", 1), (SMALL, "b", 2), (LARGE, "a", 1), (SMALL, "a", 2)]
        self.versions: dict[str, set[int]] = {"a": {0}, "b": {0}}
        self.engines = [SimEngine(*kind, self.versions) for kind in kinds[: rng.randint(2, 4)]]

    # --- the trace

    def note(self, *words: object) -> None:
        """Add a line to the trace."""
        line = f"{'  ' * self.depth}{self.clock.now:.3f} " + " ".join(map(str, words))
        self.show(line)
        self._digest.update(line.encode())

    def trace_hash(self) -> str:
        """Of all lines so far: equal for equal runs."""
        return self._digest.hexdigest()

    # --- one life of the store after the other

    def open(self) -> None:
        """Open the store as a new process would; where that fails by a fault, once more without."""
        self.live = False
        self.alone = 1
        while True:
            self.io = SimIo(self.disk, self.rng, self.faults, self.between, self._slow_down)
            self.catalogues.io = self.io
            self.life = Life()
            try:
                self.store = self._opened()
                break
            except PowerLoss:
                self.note("died while it started")
                self.unsure |= bool(self.io.hits)
            except KvstoreError as error:
                self.unsure |= bool(self.io.hits)  # What it could not read it may have left out.
                self.note("does not open:", type(error).__name__)
                if not self.io.hits and self.disk.capacity_bytes == ROOM_BYTES:
                    raise Violation(f"refuses to open without any fault: {error}") from error
                if self.disk.open:
                    raise Violation("a store that did not open left descriptors") from error
                self.faults.clear()
                self.disk.capacity_bytes = ROOM_BYTES
        self.life.rebuilt = self.catalogues.unreadable() > 0
        for state in self.catalogues.states.values():
            state.readable = True
        for engine in self.engines:
            engine.connect(self.store)
        self.tickets.clear()
        self.running.clear()
        self.live = True
        # What store.toml says counts from now on: a resize may change it.
        self.config = replace(self.config, disk_capacity_bytes=0)
        self.alone = 0

    def _opened(self) -> Store:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            store = Store(
                self.config,
                io=self.io,
                clock=self.clock,
                threads=False,
                catalogues=self.catalogues,
            )
        if warned and not self.io.hits:
            raise Violation(f"warns without any fault: {warned[0].message}")
        return store

    def close(self) -> None:
        """A clean stop."""
        self.alone += 1
        parts = self.store._parts
        close_parts = parts.close

        def note_and_close() -> None:
            self.on_disk, self.in_host = self.stored()  # Nothing is written or evicted any more.
            close_parts()

        parts.close = note_and_close  # type: ignore[method-assign]
        self.store.close()
        self.live = False
        self.alone -= 1
        if self.disk.open:
            raise Violation(f"a closed store left {len(self.disk.open)} descriptors")

    def die(self) -> None:
        """The process ends now, or the whole machine. Raises PowerLoss."""
        self.crash_in = 0
        if self.live:
            self.on_disk, self.in_host = self.stored()
            disk = self.store._placement.disk
            self.removing = any(v.journal._removed for v in disk._volumes) if disk else False
        if self.power:
            self.disk.lose_power(self.rng)
        else:
            self.disk.kill()
        self.io.dead = True
        raise PowerLoss

    def stored(self) -> tuple[set[bytes], set[bytes]]:
        """Keys of the blocks that the index has on disk, and in host memory."""
        index = self.store._placement.index
        return keys_in(index, TierName.DISK), keys_in(index, TierName.HOST)

    # --- turns of others

    def between(self, place: str) -> None:
        """Called in the middle of the store's work."""
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                self.note("dies at", place)
                self.die()
        if self.alone or self.depth >= DEPTH_MAX or self.rng.random() >= NEST:
            return
        if self.locked():
            return
        self.depth += 1
        try:
            self.note("meanwhile, at", place)
            self.others(self)
        finally:
            self.depth -= 1

    def locked(self) -> bool:
        """Whether the call under way has a lock that the others would wait for."""
        placement = self.store._placement
        disk = placement.disk
        assert disk is not None
        locks = (placement.lock, disk._lock)
        return any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]

    def may_write(self) -> bool:
        """Whether another group may be written in the middle of the call under way."""
        disk = self.store._placement.disk
        assert disk is not None
        locks = [disk._writer._sync_lock, disk.room.growing]
        locks += [volume.journal._commit_lock for volume in disk._volumes]
        return (
            not any(lock.locked() for lock in locks)
            and self.running.count("writer") < writeback.WRITERS
        )

    @contextmanager
    def running_part(self, part: str) -> Iterator[None]:
        """A step of a part of the store."""
        self.running.append(part)
        try:
            yield
        finally:
            if part in self.running:
                self.running.remove(part)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """No faults, and nobody else has a turn."""
        faults, self.io.faults = self.io.faults, Faults()
        self.alone += 1
        try:
            yield
        finally:
            self.io.faults = faults
            self.alone -= 1

    def _chance(self, name: str) -> bool:
        return self.io.chance(name)

    def _slow_down(self) -> None:
        self.clock.now += self.rng.choice((0.01, 0.5, 3.0))

    def refuse_logged(self) -> None:
        """An exception that the store swallowed is one that should not have been."""
        if self.hub.logged:
            raise Violation(f"the store logged an exception: {self.hub.logged[0]}")


def keys_in(index: Index, tier: TierName) -> set[bytes]:
    """Keys of the blocks that a tier has."""
    rows = index.rows_of(tier=tier)
    words = np.stack([index.rows.key0[rows], index.rows.key1[rows]], axis=1).tobytes()
    return {words[at : at + 16] for at in range(0, len(words), 16)}


class Hub(logging.Handler):
    """Where failpoints lead, and what the store only logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.between: Callable[[str], None] = lambda place: None
        self.logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.logged.append(self.format(record))


@contextmanager
def installed() -> Iterator[Hub]:
    """Small sizes, failpoints and a listener for what the store only logs."""
    hub, logger = Hub(), logging.getLogger("kvstore")
    with ExitStack() as undo:
        for module, name, value in SIZES:
            undo.enter_context(mock.patch.object(module, name, value))
        for name in FAILPOINTS:
            undo.enter_context(armed(name, partial(_reach, hub, name)))
        logger.addHandler(hub)
        undo.callback(logger.removeHandler, hub)
        undo.enter_context(mock.patch.object(logger, "propagate", False))
        yield hub


def _reach(hub: Hub, name: str) -> None:
    hub.between(name)
