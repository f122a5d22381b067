"""Opening and closing the parts of a store; one that fails to open leaves nothing behind."""

from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import numpy as np

from kvstore.clock import Clock
from kvstore.config import Config, segment_bytes, with_defaults
from kvstore.counters import Counters
from kvstore.floors import BOOT_SHIFT, Floors, floors_without_file, read_floors
from kvstore.home import (
    INVALIDATED_FILE,
    OVERHEAD_BYTES,
    STORE_FILE,
    STORE_ID_BYTES,
    Home,
    StoreFacts,
    new_store_id,
    sentence,
)
from kvstore.index import Index
from kvstore.inline import InlineExecutor
from kvstore.invalidation import SETTLE_S, Invalidator
from kvstore.pins_file import reserved_bytes
from kvstore.placement import Placement
from kvstore.starting import Starter
from kvstore.ticket import Leases
from kvstore.tiers.base import TierName
from kvstore.tiers.catalogues import Catalogues
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.errors import ConfigError, StoreError
from kvstore.tiers.host import HostTier
from kvstore.tiers.io import FileIo, open_own_directory
from kvstore.tiers.segment import VOLUME_FILE
from kvstore.write_budget import WriteBudget

ROWS_EXPECTED_MAX = 1 << 20
SLOT_TYPICAL_BYTES = 256 << 10
HOST_GROWTH_MAX = 8  # Host memory may grow to so many times what it is at start: address space.


@dataclass
class Opened:
    """The parts of a store that is open."""

    config: Config
    home: Home | None
    counters: Counters
    host: HostTier
    disk: DiskTier | None
    disks: Executor
    placement: Placement
    starter: Starter
    invalidator: Invalidator

    def start(self) -> None:
        """Fill the index from the tiers; what it raises is kept in `starter.failure`."""
        self.starter.start()
        if self.starter.failure is None:
            self.invalidator.settle()

    def check_integrity(self) -> None:
        """AssertionError if index and tiers disagree. Under the placement's lock."""
        index = self.placement.index
        index.check_integrity()
        self.placement.pins.check_integrity()
        self.host.check_integrity()
        tiers: list[tuple[TierName, HostTier | DiskTier]] = [(TierName.HOST, self.host)]
        if self.disk is not None:
            self.disk.check_integrity()
            tiers.append((TierName.DISK, self.disk))
        for name, tier in tiers:
            rows = index.rows_of(tier=name)
            slots = index.slots(name, rows)
            assert len(np.unique(slots)) == len(slots), f"two blocks share a {name} slot"
            assert tier.slab.is_occupied(slots).all(), f"a block lies in a free {name} slot"

    def close(self) -> None:
        """Give everything back; a persistent arena whose blocks are all on disk is removed."""
        with self.placement.lock:
            self.placement.write_gauges()
            self.counters.set("host_used_bytes", 0)
            self.counters.set("host_blocks", 0)
        self.placement.pins.close()
        self.disks.shutdown()
        self.invalidator.settle()
        self.host.close(keep=False)
        if self.disk is not None:
            self.disk.close()
            self.placement.budget.charge(self.disk.room.written_bytes)
        self.counters.close()
        if self.home is not None:
            self.home.close()


def open_parts(
    config: Config,
    io: FileIo,
    clock: Clock,
    *,
    threads: bool = True,
    catalogues: Catalogues | None = None,
) -> Opened:
    """Open or make a store. Nothing stays open, and nothing was lost, when this raises."""
    with ExitStack() as undo:
        home, facts = None, None
        if config.home is not None:
            home = Home(config.home, io)
            undo.callback(home.close)
            facts = home.facts()
            config = _settle(config, facts, io)
            facts = facts or _new_facts(config)
        else:
            config = with_defaults(config, free_bytes=None)
        disks: Executor = InlineExecutor()
        if threads:
            disks = ThreadPoolExecutor(config.io_threads, "kvstore-disk")
        undo.callback(disks.shutdown)
        counters = _counters(home, io)
        undo.callback(counters.close)
        boot = counters.next_boot(clock.time())
        floors, boot = _floors(home, facts, counters, boot)
        host = HostTier(
            config.host_capacity_bytes,
            segment_bytes(config.host_capacity_bytes),
            store_id=facts.store_id if facts else new_store_id(),
            persist=config.persist,
            directory=config.arena_directory,
            io=io,
            threads=threads,
            most_bytes=HOST_GROWTH_MAX * config.host_capacity_bytes,
        )
        undo.callback(host.close, keep=True)
        disk = None
        if home is not None and facts is not None:
            if home.facts() is None:
                # Before the volumes, which name the store's id: without it they are nobody's.
                home.write_facts(facts)
                undo.callback(home.forget_unless, home.path / "disk0" / VOLUME_FILE)
            disk = open_disk(config, facts, io, disks, clock, catalogues)
            undo.callback(disk.close)
        placement = _placement(config, host, disk, counters, boot, clock, home)
        starter = Starter(placement, floors)
        settle_s = SETTLE_S if threads else 0.0
        invalidator = Invalidator(placement, starter.numbers, home, floors, settle_s=settle_s)
        undo.pop_all()
        return Opened(config, home, counters, host, disk, disks, placement, starter, invalidator)


def _placement(
    config: Config,
    host: HostTier,
    disk: DiskTier | None,
    counters: Counters,
    boot: int,
    clock: Clock,
    home: Home | None,
) -> Placement:
    tiers = (TierName.HOST, TierName.DISK) if disk else (TierName.HOST,)
    rows = (config.host_capacity_bytes + config.disk_capacity_bytes) // SLOT_TYPICAL_BYTES
    return Placement(
        Index(tiers, rows_expected=min(max(rows, 1024), ROWS_EXPECTED_MAX)),
        host,
        disk,
        counters,
        boot=boot,
        leases=Leases(config.lease_s, clock),
        clock=clock,
        budget=WriteBudget(config.disk_writes_per_day_bytes, clock, counters),
        pin_fraction=config.pin_fraction,
        home=home,
    )


def _floors(
    home: Home | None, facts: StoreFacts | None, counters: Counters, boot: int
) -> tuple[Floors, int]:
    """What was invalidated, and this owner's number: larger than any that was invalidated."""
    if home is None or facts is None:
        return Floors(bytes(STORE_ID_BYTES)), boot
    floors = read_floors(home, facts.store_id)
    if floors is None:
        floors = floors_without_file(home, facts.store_id, boot)
        with suppress(OSError):  # Else the next owner finds it damaged, too.
            home.replace(INVALIDATED_FILE, floors.pack())
        return floors, boot
    if floors.highest() >= boot << BOOT_SHIFT:  # The counters were lost, and the clock went back.
        boot = (floors.highest() >> BOOT_SHIFT) + 1
        counters.set("boot", boot)
    return floors, boot


def _counters(home: Home | None, io: FileIo) -> Counters:
    if home is None:
        return Counters.in_memory()
    with sentence(home.counters_path):
        return Counters.open(home.counters_path, io)


def open_disk(
    config: Config,
    facts: StoreFacts,
    io: FileIo,
    disks: Executor,
    clock: Clock,
    catalogues: Catalogues | None = None,
) -> DiskTier:
    """The disk tier over the store's paths: disk0 in the home, disk1.. in the other paths."""
    for path in facts.paths[1:]:
        io.close(open_own_directory(io, path, "disk path"))
        if io.exists(path / STORE_FILE):
            raise StoreError(f"{path} is the home of a store of its own; choose another disk path")
    return DiskTier(
        [path / f"disk{number}" for number, path in enumerate(facts.paths)],
        facts.disk_capacity_bytes,
        facts.disk_segment_bytes,
        io,
        store_id=facts.store_id,
        submit=disks.submit,
        threads=config.io_threads,
        direct=config.direct,
        other_bytes=OVERHEAD_BYTES + reserved_bytes(facts.disk_capacity_bytes),
        monotonic=clock.monotonic,
        catalogues=catalogues,
    )


def _settle(config: Config, facts: StoreFacts | None, io: FileIo) -> Config:
    """The configuration of this very store: what store.toml says, or the defaults of a new one."""
    assert config.home is not None
    if facts is None:
        free = io.free_bytes(config.home)
        config = with_defaults(config, free_bytes=free)
        if config.disk_capacity_bytes > free:
            raise ConfigError(
                f"disk capacity {config.disk_capacity_bytes} is more than the {free} bytes free "
                f"at {config.home}; lower it or free some space"
            )
        return config
    if config.hash != facts.hash:
        raise ConfigError(
            f"the store in {config.home} was made with hash={facts.hash}; open it with that, "
            "or use another directory"
        )
    paths = tuple(path.resolve() for path in config.disk_paths)
    if len(paths) > 1 and paths != facts.paths:
        listed = ", ".join(str(path) for path in facts.paths)
        raise ConfigError(f"the store in {config.home} lies on {listed}; give these paths")
    wanted = config.disk_capacity_bytes
    if wanted and wanted != facts.disk_capacity_bytes:
        raise ConfigError(
            f"the store in {config.home} has {facts.disk_capacity_bytes} bytes on disk; open it "
            "with that capacity or with none, and change it with `kvstore resize`"
        )
    config = replace(config, disk_paths=facts.paths, disk_capacity_bytes=facts.disk_capacity_bytes)
    return with_defaults(config, free_bytes=None)


def _new_facts(config: Config) -> StoreFacts:
    paths = tuple(path.resolve() for path in config.disk_paths)
    return StoreFacts(
        store_id=new_store_id(),
        hash=config.hash,
        disk_capacity_bytes=config.disk_capacity_bytes,
        disk_segment_bytes=segment_bytes(config.disk_capacity_bytes // len(paths)),
        paths=paths,
    )
