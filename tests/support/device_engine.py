"""An engine whose pages lie in a device's memory, and whose computing is late.

A prefill is a copy on the compute stream, from a buffer that holds the blocks' bytes; attention is
a copy on it too, from the pages to a buffer that the host reads afterwards.
"""

import random
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.cuda.cpu_device import CpuDevice
from kvstore.loading import Load
from kvstore.sequence import Sequence
from kvstore.space import Space
from support.engine import payload_of
from support.race_checker import RaceChecker

Longs = npt.NDArray[np.int64]


def late_device(seed: int, longest_s: float = 2e-4) -> RaceChecker:
    """A checked device on which any work may happen late."""
    rng = random.Random(seed)

    def delay(_: str) -> None:
        if rng.random() < 0.5:
            time.sleep(rng.random() * longest_s)

    return RaceChecker(CpuDevice(delay=delay))


class DeviceEngine:
    """Pages of one space; one page is one block."""

    def __init__(self, space: Space, pages: int, device: RaceChecker) -> None:
        self.space, self.layout, self.device = space, space.layout, device
        self.pages = pages
        lengths = self.layout.run_lengths.tolist()
        self.memory = [device.allocate(pages * length) for length in lengths]
        arrays = [
            buffer._memory.reshape(pages, length)  # type: ignore[attr-defined]
            for buffer, length in zip(self.memory, lengths, strict=True)
        ]
        self.pool = space.pool(arrays, device=device)
        self.stream = device.stream("compute")

    def _addresses(self, page: int) -> npt.NDArray[np.uint64]:
        found = [
            buffer.address + page * int(length)
            for buffer, length in zip(self.memory, self.layout.run_lengths, strict=True)
        ]
        return np.array(found, np.uint64)

    def compute(self, sequence: Sequence, table: Longs, first: int = 0) -> None:
        """Queue the writing of every full block's pages; returns at once."""
        sizes = self.layout.run_lengths.astype(np.uint64)
        for block in range(first, sequence.blocks):
            source = self.device.allocate_pinned(self.layout.payload_bytes)
            source.view()[:] = payload_of(self.layout, sequence.keys[block].tobytes())
            sources = (source.address + self.layout.run_offsets).astype(np.uint64)
            self.device.copy(self.stream, self._addresses(int(table[block])), sources, sizes)
            self._kept = [*getattr(self, "_kept", [])[-64:], source]

    def attend(self, table: Longs, blocks: int, load: Load | None = None) -> list[bytes]:
        """Queue a read of every page after the load's last layer, and wait for the bytes."""
        if load is not None:
            load.wait_layer(self.layout.layers - 1, 60, stream=self.stream)
        sizes = self.layout.run_lengths.astype(np.uint64)
        found = []
        for block in range(blocks):
            target = self.device.allocate_pinned(self.layout.payload_bytes)
            targets = (target.address + self.layout.run_offsets).astype(np.uint64)
            self.device.copy(self.stream, targets, self._addresses(int(table[block])), sizes)
            found.append(target)
        self.stream.record().wait()
        return [bytes(buffer.view()) for buffer in found]

    def wrong(self, sequence: Sequence, seen: list[bytes]) -> list[int]:
        """Blocks that are not what was computed for these tokens."""
        return [
            block
            for block, data in enumerate(seen)
            if data != payload_of(self.layout, sequence.keys[block].tobytes()).tobytes()
        ]

    def ask(self, tokens: Any, table: Longs) -> tuple[int, list[int]]:
        """Look up, load, read by the compute stream. Returns: (blocks, those that are wrong)."""
        sequence = self.space.sequence(tokens)
        ticket = sequence.lookup()
        load = ticket.load(self.pool, table[: max(1, ticket.blocks)])
        blocks = load.wait_layer(self.layout.layers - 1, 60) // self.layout.block_tokens
        seen = self.attend(table, blocks, load)
        blocks = min(blocks, load.result(60).tokens // self.layout.block_tokens)
        return blocks, self.wrong(sequence, seen[:blocks])
