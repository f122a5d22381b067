"""A store without threads over a device that fails: every call and every step at a test's word."""

from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import load_config
from kvstore.loading import LoadResult
from kvstore.saving import SaveResult
from kvstore.store import Store
from kvstore.tiers.base import TierName
from kvstore.tiers.layout import Layout
from support.engine import Engine, prompt
from support.failing_catalogues import FailingCatalogues
from support.failing_device import FailingDevice
from support.manual_clock import ManualClock

BLOCK = 4
BACK_S = 5.0  # the bar: writes are back so long after the device is


class Stepping:
    """A store whose prompts, of `blocks` blocks each, are named by seeds."""

    def __init__(
        self,
        path: Path,
        *,
        host: str = "4MiB",
        disk: str = "8MiB",
        blocks: int = 6,
        block_bytes: int = 28_000,
    ) -> None:
        self.blocks = blocks
        self.device, self.clock = FailingDevice(), ManualClock()
        self.catalogues = FailingCatalogues()
        config = load_config(path, host=host, disk_capacity=disk, dirty_age_s=0.0, direct=False)
        self.store = Store(
            config, io=self.device, clock=self.clock, threads=False, catalogues=self.catalogues
        )
        layout = Layout.opaque(
            layers=1, run_bytes=(block_bytes,), dtype="x", format="e-1", block_tokens=BLOCK
        )
        self.engine = Engine(self.store.namespace(layout, model="m"), blocks)
        assert self.store._writer is not None
        self.writer = self.store._writer
        self.wrong = 0
        self.operations = 0  # blocks saved, looked up and loaded

    def tokens(self, seed: int) -> Any:
        return prompt(self.blocks * BLOCK + 1, seed)

    def save(self, seed: int) -> SaveResult:
        sequence = self.engine.space.sequence(self.tokens(seed))
        table = self.engine.table(sequence.blocks)
        self.engine.compute(sequence, table)
        save = sequence.save(self.engine.pool, table)
        while self.store._saver.step():
            pass
        result = save.result(0)
        self.operations += result.saved + result.present
        return result

    def ask(self, seed: int) -> LoadResult:
        """Look a prompt up and load it; what is usable of it is compared byte for byte."""
        engine = self.engine
        engine.clear()
        with engine.space.sequence(self.tokens(seed)).lookup() as ticket:
            table = engine.table(max(ticket.blocks, 1), 1)
            load = ticket.load(engine.pool, table)
            while self.store._loader.step():
                pass
            result = load.result(0)
            self.operations += self.blocks + result.tokens // BLOCK
            self.wrong += len(engine.wrong(ticket.sequence, table, result.tokens))
        return result

    def write(self, steps: int = 8) -> None:
        """Let write-back do what is due."""
        for _ in range(steps):
            if not self.writer.step():
                return

    def written(self) -> int:
        return self.store.counters()["written_blocks"]

    def forget_host(self) -> None:
        """Everything that is on disk leaves host memory."""
        placement = self.store._placement
        with placement.lock:
            rows = placement.index.rows_of(tier=TierName.HOST)
            rows = rows[placement.index.slots(TierName.DISK, rows) >= 0]
            placement.left(TierName.HOST, placement.index.drop_subtree(rows, TierName.HOST))

    def seconds_until_written(self, seed: int) -> float:
        """Save a new prompt and let time pass until some block of it got to disk."""
        before, began = self.written(), self.clock.now_s
        self.save(seed)
        self.write()
        while self.written() == before and self.clock.now_s - began <= 2 * BACK_S:
            self.clock.advance(0.05)
            self.write()
        return self.clock.now_s - began

    def disk_seeds(self, seeds: "np.ndarray[Any, Any] | range") -> list[int]:
        """Which prompts lie on disk whole."""
        found = []
        for seed in seeds:
            with self.engine.space.sequence(self.tokens(int(seed))).lookup() as ticket:
                if ticket.blocks == self.blocks:
                    found.append(int(seed))
        return found
