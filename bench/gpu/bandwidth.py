"""How fast blocks move, as fractions of plain copies that are measured in the same run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.gpu.pages import Pages
from bench.gpu.place import MIB, Place, one
from bench.gpu.results import Figure
from kvstore.cuda.calibration import Direction
from kvstore.cuda.device import Buffer, Stream
from kvstore.cuda.page_mover import GRID, Method, PageMover

PIECES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB)
GOALS = {16 << 10: "0.85", 256 << 10: "0.95", MIB: "0.95", 4 * MIB: "0.95"}
RUNS = 8


@dataclass(frozen=True)
class Limits:
    """Bytes a second of plain copies: host to device, device to host, both at once in sum, and
    within the device, counted once."""

    load: float
    save: float
    both: float
    device: float

    def of(self, direction: Direction) -> float:
        """The limit of one direction."""
        return self.load if direction is Direction.LOAD else self.save


def limits(place: Place) -> Limits:
    """Measured once for each process."""
    if "limits" not in place.kept:
        place.kept["limits"] = _measure_limits(place)
    found: Limits = place.kept["limits"]
    return found


def _measure_limits(place: Place) -> Limits:
    device, size = place.device, place.pick(512 * MIB, MIB)
    pinned = [device.allocate_pinned(size) for _ in range(2)]
    own = [device.allocate(size) for _ in range(2)]
    for buffer in pinned:
        buffer.view()[:] = 1
    load, save = device.stream("load"), device.stream("save")

    def copy(to: Buffer, source: Buffer, stream: str) -> None:
        device.copy(device.stream(stream), one(to.address), one(source.address), one(size))

    def both() -> None:
        copy(own[0], pinned[0], "load")
        copy(pinned[1], own[1], "save")
        load.wait(save.record())

    found = Limits(
        size / place.seconds(load, lambda: copy(own[0], pinned[0], "load")),
        size / place.seconds(save, lambda: copy(pinned[1], own[1], "save")),
        2 * size / place.seconds(load, both),
        size / place.seconds(load, lambda: copy(own[0], own[1], "load")),
    )
    for buffer in (*pinned, *own):
        buffer.free()
    return found


def plain_copies(place: Place) -> list[Figure]:
    """The limits themselves."""
    found = limits(place)
    names = ("host to device", "device to host", "both at once, in sum", "within the device")
    values = (found.load, found.save, found.both, found.device)
    return [
        Figure(f"plain copy {name}", round(value / 1e9, 2), "GB/s")
        for name, value in zip(names, values, strict=True)
    ]


class Blocks:
    """A pool of blocks of `runs` pieces on the device, and as many payloads beside it."""

    def __init__(self, place: Place, piece_bytes: int, total: int, pinned: bool) -> None:
        device = self.device = place.device
        count = max(2, total // (piece_bytes * RUNS))
        self.pool = Pages.make(device, ((1, piece_bytes, 0),) * RUNS, count)
        self.size = count * self.pool.payload_bytes
        self.payloads_memory = (device.allocate_pinned if pinned else device.allocate)(self.size)
        if pinned:
            self.payloads_memory.view()[:] = 1
        self.payloads = self.payloads_memory.address + self.pool.payload_bytes * np.arange(
            count, dtype=np.uint64
        )
        self.pages = np.random.default_rng(1).permutation(count)[:, None]

    def mover(self, method: Method, grid: int = GRID) -> PageMover:
        return PageMover(self.device, self.pool.table, 1, method=method, grid=grid)

    def queue(self, mover: PageMover, direction: Direction) -> Callable[[], None]:
        stream = self.device.stream(direction)
        if direction is Direction.SAVE:
            return lambda: mover.gather(stream, self.pages, self.payloads)
        return lambda: mover.scatter(stream, self.pages, self.payloads, (0, RUNS))

    def close(self) -> None:
        self.pool.memory.free()
        self.payloads_memory.free()


def host_copies(place: Place) -> list[Figure]:
    """Every size of piece, by every method, in both directions."""
    figures, found = [], limits(place)
    for piece in place.pick(PIECES, PIECES[:2]):
        blocks = Blocks(place, piece, place.pick(256 * MIB, 64 << 10), pinned=True)
        for direction in Direction:
            speeds: dict[str, float] = {}
            for method in Method:
                if method is Method.STAGED and piece > MIB:
                    continue  # Its staging buffers would take gigabytes, and win nothing.
                mover = blocks.mover(method)
                seconds = place.seconds(
                    place.device.stream(direction), blocks.queue(mover, direction), 3
                )
                speeds[method] = blocks.size / seconds / found.of(direction)
                mover.close()
            name = f"{direction} in pieces of {piece >> 10} KiB, of the plain copy"
            words = ", ".join(f"{method} {speed:.3f}" for method, speed in speeds.items())
            figures.append(
                Figure(name, round(max(speeds.values()), 3), words, GOALS.get(piece, ""))
            )
        blocks.close()
    return figures


def both_directions(place: Place) -> list[Figure]:
    """Saves beside loads, as fractions of plain copies both ways at once."""
    figures, limit = [], limits(place).both
    for piece in place.pick((16 << 10, 256 << 10), (4 << 10,)):
        total = place.pick(256 * MIB, 64 << 10)
        out, back = (Blocks(place, piece, total, pinned=True) for _ in range(2))
        save, load = (place.device.stream(direction) for direction in Direction)
        speeds = {}
        for method in Method:
            movers = out.mover(method), back.mover(method)
            queues = (
                out.queue(movers[0], Direction.SAVE),
                back.queue(movers[1], Direction.LOAD),
            )

            queue = _together(queues, save, load)
            speeds[method] = 2 * out.size / place.seconds(load, queue, 3) / limit
            for mover in movers:
                mover.close()
        words = ", ".join(f"{method} {speed:.3f}" for method, speed in speeds.items())
        name = f"both ways at once in pieces of {piece >> 10} KiB, of plain copies both ways"
        figures.append(Figure(name, round(max(speeds.values()), 3), words, GOALS.get(piece, "")))
        out.close()
        back.close()
    return figures


def _together(
    queues: tuple[Callable[[], None], ...], save: Stream, load: Stream
) -> Callable[[], None]:
    """Both at once; whoever waits for `load` waits for both."""

    def queue() -> None:
        for work in queues:
            work()
        load.wait(save.record())

    return queue


def within_device(place: Place) -> list[Figure]:
    """gather_pages and scatter_pages to contiguous payloads in the device's own memory: 2 MiB."""
    blocks = Blocks(
        place, place.pick(256 << 10, 4 << 10), place.pick(2048 * MIB, 64 << 10), pinned=False
    )
    limit, figures = limits(place).device, []
    processors = place.compute.processors
    for direction in Direction:
        for grid in place.pick((GRID, processors, 4 * processors), (GRID,)):
            mover = blocks.mover(Method.DIRECT, grid)
            seconds = place.seconds(
                place.device.stream(direction), blocks.queue(mover, direction), 3
            )
            name = "gather" if direction is Direction.SAVE else "scatter"
            figures.append(
                Figure(
                    f"{name} of 2 MiB blocks with {grid} blocks of threads, of a copy within it",
                    round(blocks.size / seconds / limit, 3),
                    goal="0.85" if grid > GRID else "",
                )
            )
            mover.close()
    blocks.close()
    return figures
