"""Blocks between an engine's pages and host memory: by this CPU, or by the engine's device.

A gather waits until the bytes are in host memory, for they are checksummed there. A scatter to a
device only queues its work: the event that it returns says when the pages are filled, and until
then neither they nor the host slots that are read may be given to anyone else.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.cuda.calibration import Calibration, Direction
from kvstore.cuda.copy import RunTable, gather, scatter
from kvstore.cuda.device import Buffer, Device, Event
from kvstore.cuda.page_mover import Method, PageMover
from kvstore.hashing.checksum import run_checksums
from kvstore.tiers.layout import Layout

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
# Whether a device reaches these payloads in host memory by itself: they are page-locked.
Reaches = Callable[[UInt64s], bool]


class PageCopies(Protocol):
    """How the blocks of one pool are copied."""

    def ready(self) -> Event | None:
        """The point after which the pages hold what the engine has computed so far.

        Asked for by the engine's own thread. None where what was written is there at once.
        """

    def gather(
        self, pages: Longs, payloads: UInt64s, checksums: UInt64s | None, ready: Event | None
    ) -> None:
        """Copy blocks from pages [n, pages_per_block] to payloads [n], and checksum their runs."""

    def scatter(
        self,
        pages: Longs,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int = 0,
        ready: Event | None = None,
    ) -> Event | None:
        """Copy runs first..last-1 of payloads into pages, after `ready`: who had the pages before
        may still compute with them. None when that is done on return."""

    def buffers(self, count: int, size_bytes: int) -> AbstractContextManager[list[Bytes]]:
        """As a context: host memory that both calls can reach, zeroed."""


class HostCopies:
    """Pages in host memory: the bytes are moved by whoever calls."""

    def __init__(self, table: RunTable, pages_per_block: int) -> None:
        self._table = table
        self._pages_per_block = pages_per_block
        self._piece_bytes = table.piece_bytes

    def ready(self) -> None:
        """What was written is there."""

    def gather(
        self, pages: Longs, payloads: UInt64s, checksums: UInt64s | None, ready: Event | None
    ) -> None:
        """Copy and checksum in one pass."""
        gather(self._table, pages, payloads, checksums)

    def scatter(
        self,
        pages: Longs,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int = 0,
        ready: Event | None = None,
    ) -> None:
        """Copy; the pages are filled on return."""
        if skip_pages and len(pages):
            for piece in range(skip_pages, self._pages_per_block):
                offset = self._table.payload_offset + piece * self._piece_bytes
                table = replace(self._table, payload_offset=offset)
                scatter(table, pages[:1, piece : piece + 1], payloads[:1], *runs)
            pages, payloads = pages[1:], payloads[1:]
        if len(pages):
            scatter(self._table, pages, payloads, *runs)

    @contextmanager
    def buffers(self, count: int, size_bytes: int) -> Iterator[list[Bytes]]:
        """Ordinary memory."""
        yield [np.zeros(size_bytes, np.uint8) for _ in range(count)]


class DeviceCopies:
    """Pages in a device's memory. Saves and loads have a stream each.

    The methods are those that were fastest for this layout's pieces on this device; payloads that
    it does not reach go by the copy engine, which is right for any memory.
    """

    def __init__(
        self,
        device: Device,
        table: RunTable,
        layout: Layout,
        calibration: Calibration,
        reaches: Reaches = lambda payloads: False,
    ) -> None:
        pages_per_block = int(layout.run_lengths[0]) // int(table.piece_bytes[0])
        self._device = device
        self._layout = layout
        self._save, self._load = device.stream(Direction.SAVE), device.stream(Direction.LOAD)
        piece = int(table.row_bytes.min())
        self._reaches = reaches
        self._buffers: list[Buffer] = []
        self._movers = {
            direction: PageMover(
                device, table, pages_per_block, method=calibration.method(direction, piece)
            )
            for direction in Direction
        }
        self._copies = PageMover(device, table, pages_per_block, method=Method.COPIES)

    def ready(self) -> Event:
        """The point that the compute stream has been given work up to."""
        return self._device.stream("compute").record()

    def gather(
        self, pages: Longs, payloads: UInt64s, checksums: UInt64s | None, ready: Event | None
    ) -> None:
        """Copy after `ready`, wait for the bytes, and checksum them in host memory."""
        if ready is not None:
            self._save.wait(ready)
        self._mover(Direction.SAVE, payloads).gather(self._save, pages, payloads)
        self._save.record().wait()
        if checksums is None:
            return
        offsets, lengths = self._layout.run_offsets, self._layout.run_lengths
        for block, address in enumerate(payloads.tolist()):
            payload = _memory(address, self._layout.payload_bytes)
            checksums[block] = run_checksums(payload, offsets, lengths)

    def scatter(
        self,
        pages: Longs,
        payloads: UInt64s,
        runs: tuple[int, int],
        skip_pages: int = 0,
        ready: Event | None = None,
    ) -> Event:
        """Queue the copy after `ready`."""
        if ready is not None:
            self._load.wait(ready)
        mover = self._mover(Direction.LOAD, payloads)
        mover.scatter(self._load, pages, payloads, runs, skip_pages)
        return self._load.record()

    @contextmanager
    def buffers(self, count: int, size_bytes: int) -> Iterator[list[Bytes]]:
        """Pinned memory."""
        made = [self._device.allocate_pinned(size_bytes) for _ in range(count)]
        self._buffers = made
        try:
            for buffer in made:
                buffer.view()[:] = 0
            yield [buffer.view() for buffer in made]
        finally:
            self._buffers = []
            for buffer in made:
                buffer.free()

    def _mover(self, direction: Direction, payloads: UInt64s) -> PageMover:
        own = {buffer.address for buffer in self._buffers}
        if set(payloads.tolist()) <= own or self._reaches(payloads):
            return self._movers[direction]
        return self._copies


def _memory(address: int, size_bytes: int) -> Bytes:
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return np.ndarray((size_bytes,), np.uint8, memoryview(memory))
