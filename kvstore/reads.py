"""Reads from disk, each block once: loads that want a block already being read wait for that read.

A wave is up to WAVE_BLOCKS blocks of one load that are read at the same time into reserved host
slots. A block is checked (header, identity, every run) before a byte of it reaches a page. At the
end of a wave its blocks are published in host memory, root first; those whose parent is not there
give their slot back.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
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
    landed: bool = False


class Reads:
    """Single flight over the disk tier."""

    def __init__(self, placement: Placement, disks: ThreadPoolExecutor) -> None:
        self._placement = placement
        self._disks = disks
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
                if waited > WAITS_MAX:
                    load.cut(at, MissReason.NO_ROOM)
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
        """Read, check and copy the flights, in parallel; then publish them, root first."""
        list(self._disks.map(lambda flight: self._one(load, flight), own))
        read = [flight for flight in own if flight.reserved]
        with self._placement.lock:
            for flight in read:
                del self._flights[flight.row]
            self._placement.publish_reads(
                np.array([f.row for f in read], np.int32),
                np.array([f.host_slot for f in read], np.int64),
                np.array([f.fault is None for f in read], bool),
            )
            self._wave_ended.notify_all()

    def _one(self, load: "Load", flight: Flight) -> None:
        """Read and check one block, then copy it for everyone who waits."""
        placement = self._placement
        if flight.reserved:
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
            if flight.fault is not None:
                placement.drop_bad(flight.row, TierName.DISK)
        copied = 0
        while True:
            with placement.lock:
                # Loads may join while others are being served.
                waiting = flight.waiters[copied:]
                if not waiting:
                    flight.landed = True
                    return
            for waiter, block in waiting:
                self._deliver(flight, waiter, block)
            copied += len(waiting)

    def _deliver(self, flight: Flight, load: "Load", block: int) -> None:
        if flight.fault is not None:
            load.cut(block, flight.fault)
        elif block < load.limit:
            record = load.ticket.sequence.space.record
            slots = np.array([flight.host_slot], np.int64)
            payload = self._placement.host.payload_addresses(slots, record.header_bytes)
            load.copy(block, payload, (0, None))
        load.flight_ended()
