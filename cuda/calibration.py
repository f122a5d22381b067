"""How fast this device moves blocks, by direction, size of piece and method: measured, then kept.

Measured on completion, from the call to the event, with the compute stream idle and busy; a file
in the cache for every device and driver keeps it. The choice of method and a plan's first costs
come from it. On a machine where nothing was measured the sizes alone decide.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from kvstore.cuda.copy import RunTable
from kvstore.cuda.device import Device
from kvstore.cuda.page_mover import Method, PageMover, choose
from kvstore.native import cache

FORMAT = 1
PIECE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
RUNS = 8
BLOCKS = 8
REPEATS = 5
BUSY_BYTES = 1 << 20
BUSY_COPIES = 64
SECONDS_MAX = 20.0  # of a calibration; sizes that are not reached are left out


class Direction(StrEnum):
    """Which way blocks go."""

    SAVE = "save"  # pages to host memory
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Measured:
    """One combination. seconds: median of a call that moved `size_bytes`."""

    direction: Direction
    piece_bytes: int
    method: Method
    busy: bool
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What was measured on the device of this name. Immutable; may be empty."""

    name: str
    measured: tuple[Measured, ...] = ()

    def method(self, direction: Direction, piece_bytes: int) -> Method:
        """The fastest method for pieces of about this size while the device computes."""
        near = self._near(direction, piece_bytes)
        if not near:
            return choose(piece_bytes)
        return min(near, key=lambda one: one.seconds / one.size_bytes).method

    def bytes_per_s(self, direction: Direction, piece_bytes: int) -> float | None:
        """What that method moves. Returns: bytes a second | None (nothing was measured)."""
        near = self._near(direction, piece_bytes)
        return max((one.size_bytes / one.seconds for one in near), default=None)

    def _near(self, direction: Direction, piece_bytes: int) -> list[Measured]:
        found = [m for m in self.measured if m.direction is direction]
        busy = [m for m in found if m.busy] or found
        if not busy:
            return []
        nearest = min(busy, key=lambda m: abs(np.log(m.piece_bytes / piece_bytes))).piece_bytes
        return [m for m in busy if m.piece_bytes == nearest]

    def document(self) -> dict[str, Any]:
        """As it is kept: JSON."""
        columns = [
            [m.direction, m.piece_bytes, m.method, m.busy, m.size_bytes, m.seconds]
            for m in self.measured
        ]
        return {"format": FORMAT, "name": self.name, "measured": columns}

    @classmethod
    def parse(cls, text: bytes, name: str) -> "Calibration | None":
        """What `document` wrote for this device; None for anything else, never an exception."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT or document["name"] != name:
                return None
            measured = tuple(
                Measured(Direction(d), int(p), Method(m), bool(b), int(s), float(t))
                for d, p, m, b, s, t in document["measured"]
            )
        except (ValueError, KeyError, TypeError):
            return None
        sound = all(m.seconds > 0 and m.size_bytes > 0 and m.piece_bytes > 0 for m in measured)
        return cls(name, measured) if sound else None


def calibration_of(device: Device, *, measure: bool = True) -> Calibration:
    """The device's calibration from the cache, measured first if there is none and `measure`."""
    directory = cache.cache_directory()
    digest = hashlib.sha256(device.name.encode()).hexdigest()[:32]
    path = None if directory is None else directory / f"calibration-{digest}.json"
    if path is not None and (text := cache.read(path)) is not None:
        found = Calibration.parse(text, device.name)
        if found is not None:
            return found
    if not measure:
        return Calibration(device.name)
    made = run_calibration(device, PIECE_BYTES)
    if path is not None:
        cache.publish(path, json.dumps(made.document()).encode())
    return made


def run_calibration(
    device: Device,
    pieces: tuple[int, ...],
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure. Takes SECONDS_MAX at most, and gives back all memory that it took."""
    measured: list[Measured] = []
    until = clock() + SECONDS_MAX
    for piece_bytes in pieces:
        for method in Method:
            if clock() > until:
                break
            measured += _measure(device, piece_bytes, method, clock)
    return Calibration(device.name, tuple(measured))


def _measure(
    device: Device, piece_bytes: int, method: Method, clock: Callable[[], float]
) -> list[Measured]:
    pool = device.allocate(piece_bytes * RUNS * BLOCKS)
    pinned = device.allocate_pinned(piece_bytes * RUNS * BLOCKS)
    run = np.arange(RUNS)
    size = np.full(RUNS, piece_bytes)
    table = RunTable(
        base=(pool.address + run * piece_bytes * BLOCKS).astype(np.uint64),
        page_stride=size,
        rows=np.ones(RUNS, np.int64),
        row_bytes=size,
        row_stride=size,
        payload_offset=run * piece_bytes,
        pages=BLOCKS,
    )
    mover = PageMover(device, table, 1, method=method)
    # Every second page, so that no two are neighbours and become one copy.
    pages = np.concatenate([np.arange(0, BLOCKS, 2), np.arange(1, BLOCKS, 2)])[:, None]
    payloads = pinned.address + RUNS * piece_bytes * np.arange(BLOCKS, dtype=np.uint64)
    found = []
    scratch = device.allocate(2 * BUSY_BYTES)
    for busy in (False, True):
        for direction in Direction:
            times = []
            for _ in range(REPEATS):
                if busy:
                    _keep_busy(device, scratch.address)
                stream = device.stream(direction)
                began = clock()
                if direction is Direction.SAVE:
                    mover.gather(stream, pages, payloads)
                else:
                    mover.scatter(stream, pages, payloads, (0, RUNS))
                stream.record().wait()
                times.append(max(clock() - began, 1e-9))
                device.stream("compute").record().wait()
            total = piece_bytes * RUNS * BLOCKS
            seconds = statistics.median(times[1:])  # The first one loads code.
            found.append(Measured(direction, piece_bytes, method, busy, total, seconds))
    mover.close()
    for buffer in (scratch, pool, pinned):
        buffer.free()
    return found


def _keep_busy(device: Device, scratch: int) -> None:
    """Give the compute stream something to do: copies within the device's memory."""
    sizes = np.full(BUSY_COPIES, BUSY_BYTES, np.uint64)
    sources = np.full(BUSY_COPIES, scratch, np.uint64)
    device.copy(device.stream("compute"), sources + np.uint64(BUSY_BYTES), sources, sizes)
