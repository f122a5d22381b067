"""Reads from disk, each block once: loads that want a block already being read wait for that read.

A wave is up to WAVE_BLOCKS blocks of one load that are read at the same time into reserved host
slots. A block is checked (header, identity, every run) before a byte of it reaches a page. At the
end of a wave its blocks are published in host memory, root first; those whose parent is not there
give their slot back.
"""

import logging
import threading
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.checking import read_block
from kvstore.placement import Placement
from kvstore.tiers.base import MissReason, TierName

if TYPE_CHECKING:
    from kvstore.loading import Load

LOG = logging.getLogger(__name__)
WAVE_BLOCKS = 128
COPY_BLOCKS = 16  # copied at a time, as they land
WAIT_S = 0.05
WAITS_MAX = 200


@dataclass(eq=False)
class Flight:
    """One block on its way from disk into a host slot, and the loads that wait for it.

    reserved: the host slot was taken for this flight, and is its to publish or give back.
    landed: every waiter was served; no load can join any more.
    """

    row: int
    disk_slot: int
    host_slot: int
    reserved: bool
    waiters: list[tuple["Load", int]] = field(default_factory=list)
    fault: MissReason | None = None
    served: int = 0  # of the waiters
    landed: bool = False


class Reads:
    """Single flight over the disk tier. waits: other threads may make room meanwhile."""

    def __init__(self, placement: Placement, disks: Executor, *, waits: bool = True) -> None:
        self._placement = placement
        self._disks = disks
        self._waits_max = WAITS_MAX if waits else 0
        self._flights: dict[int, Flight] = {}
        self._wave_ended = threading.Condition(placement.lock)

    def run(self, load: "Load", first: int) -> None:
        """Bring blocks first.. of a load into its pages; returns when its own reads are over.

        Blocks that other loads are reading may still be under way then: load.wait_flights.
        """
        at, waited = first, 0
        while at < load.limit and not load.cancelled:
            own, end = self._start_wave(load, at, min(at + WAVE_BLOCKS, load.limit))
            if own:
                self._fly(load, own)
            if end > at:
                at, waited = end, 0
            elif at < load.limit:
                # Slots are held, or a flight has just landed: both end with somebody's wave.
                waited += 1
                if waited > self._waits_max:
                    load.cut(at, MissReason.NO_ROOM)
                    break
                with self._wave_ended:
                    self._wave_ended.wait(WAIT_S)
        if load.cancelled:
            load.cut(at, MissReason.EXPIRED)

    def _start_wave(self, load: "Load", first: int, last: int) -> tuple[list[Flight], int]:
        """Join the flights there are and start those there is room for: blocks first..end-1."""
        placement, own, end = self._placement, [], first
        slot_bytes = load.ticket.sequence.space.record.slot_bytes
        with placement.lock:
            rows = load.rows[first:last]
            hosts = placement.index.slots(TierName.HOST, rows).tolist()
            disks = placement.index.slots(TierName.DISK, rows).tolist()
            flying = [self._flights.get(row) for row in rows.tolist()]
            wanted = sum(f is None and host < 0 for f, host in zip(flying, hosts, strict=True))
            slots = placement.host_slots(slot_bytes, wanted).tolist()
            for block, row, host, disk, known in zip(
                range(first, last), rows.tolist(), hosts, disks, flying, strict=True
            ):
                flight = known
                if flight is None:
                    if host < 0 and disk < 0:
                        load.cut(block, MissReason.INVALIDATED)
                        break
                    if host < 0 and not slots:
                        break
                    # With a host slot another load brought it since: nothing to read, only to copy.
                    flight = Flight(row, disk, host if host >= 0 else slots.pop(0), host < 0)
                    if flight.reserved:
                        self._flights[row] = flight
                    own.append(flight)
                elif flight.landed:
                    break
                else:
                    placement.counters.add("joined_reads")
                flight.waiters.append((load, block))
                load.from_disk[block] = flight.reserved
                load.expect_flight()
                end = block + 1
            if slots:
                placement.release_host_slots(np.array(slots, np.int64))
        return own, end

    def _fly(self, load: "Load", own: list[Flight]) -> None:
        """Read and check the flights in parallel, copy them as they land, then publish them."""
        reading = [self._disks.submit(self._read, load, flight) for flight in own]
        for first in range(0, len(own), COPY_BLOCKS):
            last = first + COPY_BLOCKS
            for read in reading[first:last]:
                read.result()
            self._serve(own[first:last])
        read_now = [flight for flight in own if flight.reserved]
        with self._placement.lock:
            for flight in read_now:
                del self._flights[flight.row]
            self._placement.publish_reads(
                np.array([f.row for f in read_now], np.int32),
                np.array([f.host_slot for f in read_now], np.int64),
                np.array([f.fault is None for f in read_now], bool),
            )
            self._wave_ended.notify_all()

    def _read(self, load: "Load", flight: Flight) -> None:
        """Read and check one block. On a disk thread, which does nothing but this."""
        placement = self._placement
        if not flight.reserved:
            return
        block = load.skip + flight.waiters[0][1]
        try:
            flight.fault = read_block(
                placement,
                load.ticket.sequence,
                block,
                flight.row,
                flight.disk_slot,
                flight.host_slot,
            )
        except Exception:
            # Whoever waits for this flight must hear of its end.
            LOG.exception("a read failed")
            flight.fault = MissReason.IO_ERROR
        if flight.fault not in {None, MissReason.OFF}:
            placement.drop_bad(flight.row, TierName.DISK)

    def _serve(self, flights: list[Flight]) -> None:
        """Copy blocks that were read for everyone who waits; others may join meanwhile."""
        while True:
            waiting: dict[Load, list[tuple[int, Flight]]] = {}
            with self._placement.lock:
                for flight in flights:
                    for load, block in flight.waiters[flight.served :]:
                        waiting.setdefault(load, []).append((block, flight))
                    flight.served = len(flight.waiters)
                if not waiting:
                    for flight in flights:
                        flight.landed = True
                    return
            for load, blocks in waiting.items():
                blocks.sort(key=lambda pair: pair[0])
                try:
                    self._deliver(load, blocks)
                except Exception:
                    # One load's pages must not keep the others, nor the wave's slots, waiting.
                    LOG.exception("a copy failed")
                    load.cut(blocks[0][0], MissReason.IO_ERROR)
                finally:
                    load.flights_ended(len(blocks))

    def _deliver(self, load: "Load", blocks: list[tuple[int, Flight]]) -> None:
        """Copy good blocks into a load's pages, blocks that follow one another in one call."""
        header_bytes = load.ticket.sequence.space.record.header_bytes
        first, slots, filled = 0, list[int](), None
        for block, flight in [*blocks, (-1, None)]:
            if slots and (
                flight is None or flight.fault is not None or block != first + len(slots)
            ):
                payloads = self._placement.host.payload_addresses(np.array(slots), header_bytes)
                filled = load.copy(first, payloads, (0, None)) or filled
                slots.clear()
            if flight is not None and flight.fault is not None:
                load.cut(block, flight.fault)
            elif flight is not None and block < load.limit:
                first = first if slots else block
                slots.append(flight.host_slot)
        if filled is not None:
            filled.wait()  # In order on one stream, so the last one is enough.
