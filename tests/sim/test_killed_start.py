"""A store whose owner was killed while it was made: what the next owner writes outlives the power.

The dead owner's files are there, but nobody knows whether their names ever got to the device.
"""

import random
from itertools import count
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.store import Store
from kvstore.tiers.base import TierName
from support.engine import Engine, prompt
from support.layouts import small_layout
from support.model_catalogue import ModelCatalogues
from support.sim_disk import SimDisk
from support.sim_io import Faults, PowerLoss, SimIo

BLOCKS = 6
CONFIG = Config(
    host_capacity_bytes=4 << 20, disk_paths=(Path("/sim/s"),), disk_capacity_bytes=16 << 20
)


class LosesAll(random.Random):
    """Whatever can be lost is lost."""

    def random(self) -> float:
        return 0.0

    def randint(self, low: int, high: int) -> int:
        return low


class Machine:
    def __init__(self) -> None:
        self.disk = SimDisk(64 << 20)
        self.disk.add_directory("/sim")
        self.disk.add_directory("/dev/shm", volatile=True)
        self.catalogues = ModelCatalogues()
        self.left = 1 << 30  # calls until the process is killed
        self.io: SimIo

    def before(self, call: str) -> None:
        self.left -= 1
        if self.left < 0:
            self.disk.kill()
            self.io.dead = True
            raise PowerLoss

    def open(self) -> Store:
        self.io = SimIo(self.disk, LosesAll(1), Faults(), self.before)
        self.catalogues.io = self.io
        return Store(CONFIG, io=self.io, threads=False, catalogues=self.catalogues)


def save_and_flush(store: Store) -> None:
    engine = Engine(store.namespace(small_layout(), model="m"), 16)
    sequence = engine.space.sequence(prompt(4 * BLOCKS + 1))
    table = engine.table(BLOCKS)
    engine.compute(sequence, table)
    sequence.save(engine.pool, table)
    store.flush()


def test_blocks_outlive_the_power_after_an_owner_was_killed_at_any_call() -> None:
    for left in count():
        machine = Machine()
        machine.left = left
        try:
            save_and_flush(machine.open())
            killed = False
        except PowerLoss:
            killed = True
        machine.left = 1 << 30
        if killed:
            save_and_flush(machine.open())
        machine.disk.lose_power(LosesAll(1))
        machine.io.dead = True
        store = machine.open()
        found = store._placement.index.blocks(TierName.DISK)
        store.close()
        if found != BLOCKS:
            pytest.fail(f"killed at call {left}: {found} of {BLOCKS} synced blocks are left")
        if not killed:
            break
    assert left > 15, "there were calls to be killed at"
