"""Other capacities while a store is in use, both ways: see Store.resize.

To grow costs nothing but what is written down. To shrink, segments are emptied one by one, the one
whose latest used block is the oldest first: its blocks leave with all that follows them in their
chains, deepest first. No block is moved. Saves and loads go on; what is leased or loaded stays, and
is waited for.

On disk the blocks' removal is committed before their segment's file goes, and the new capacity is
written down last (tiers/disk_sizing.py has the order), so a store that is killed on the way opens
with the old one or the new one. Host memory's capacity is what the next owner opens it with.
"""

import threading
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kvstore.config import CAPACITY_MIN_BYTES
from kvstore.eviction import Evictor
from kvstore.opening import Opened
from kvstore.tiers.base import TierName
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.errors import ConfigError, StoreError
from kvstore.tiers.failpoints import reach
from kvstore.writeback import Writer

WAIT_S = 10.0  # So long what keeps a segment from being emptied is waited for.
PAUSE_S = 0.02


class ResizeStop(StrEnum):
    """Why a tier did not get to the capacity that was asked for."""

    IN_USE = "in_use"  # leases, loads or unwritten blocks kept all segments that were left
    DEVICE = "device"  # a device, or the system, did not take a change
    CLOSED = "closed"  # the store was closed meanwhile


@dataclass(frozen=True)
class Resized:
    """What a resize came to. host_bytes, disk_bytes: the capacities now; 0 for a disk without one.

    reason: None when both are what was asked for. Otherwise they are what was reached, and hold.
    """

    host_bytes: int
    disk_bytes: int
    evicted_blocks: int
    seconds: float
    reason: ResizeStop | None = None

    def document(self) -> dict[str, Any]:
        """As `kvstore resize --json` prints it."""
        return asdict(self)


class Resizer:
    """Moves the capacities of one store. Thread-safe: one resize at a time, others wait."""

    def __init__(self, parts: Opened, writer: Writer | None, *, threads: bool = True) -> None:
        self._home = parts.home
        self._placement = parts.placement
        self._host = parts.host
        self._disk = parts.disk
        self._writer = writer
        self._threads = threads
        self._lock = threading.Lock()
        self._closed = False
        self._evicted = 0
        self._evict_host = Evictor(parts.placement.index, TierName.HOST)
        self._evict_disk = Evictor(parts.placement.index, TierName.DISK) if parts.disk else None

    def resize(self, host_bytes: int | None, disk_bytes: int | None) -> Resized:
        """See Store.resize."""
        clock = self._placement.clock
        with self._lock:
            began_s, self._evicted = clock.monotonic(), 0
            self._refuse(host_bytes, disk_bytes)
            stops = []
            if self._disk is not None and disk_bytes is not None:
                stops.append(self._resize_disk(self._disk, disk_bytes))
            if host_bytes is not None:
                stops.append(self._resize_host(host_bytes))
            with self._placement.lock:
                self._placement.write_gauges()
            return Resized(
                self._host.capacity_bytes,
                self._disk.capacity_bytes if self._disk is not None else 0,
                self._evicted,
                clock.monotonic() - began_s,
                next((stop for stop in stops if stop is not None), None),
            )

    def close(self) -> None:
        """End a resize that is under way, at what it has reached, and refuse others."""
        self._closed = True
        with self._lock:
            pass

    def _refuse(self, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Raise before anything has changed."""
        if not self._placement.started.is_set():
            raise StoreError("the store is still starting; resize it when it has started")
        for size in (host_bytes, disk_bytes):
            if size is not None and size < CAPACITY_MIN_BYTES:
                raise ConfigError(f"{size} bytes are too few; give the tier {CAPACITY_MIN_BYTES}")
        if host_bytes is not None:
            self._host.arena.refuse(host_bytes)
        if disk_bytes is not None:
            if self._disk is None:
                raise ConfigError("this store has no disk tier; open one with disk=")
            self._disk.sizing.refuse(disk_bytes)

    def _wait(self, until_s: float) -> bool:
        """Give others time, or write a group. Returns: whether to look again."""
        placement = self._placement
        if self._closed:
            return False
        with placement.lock:
            if placement.dirty:
                placement.short_of_room = True  # Write now: what is on disk too may go.
                placement.dirty_changed.notify_all()
            if self._threads:
                placement.dirty_changed.wait(PAUSE_S)
        if not self._threads:
            return self._writer is not None and self._writer.step()
        return placement.clock.monotonic() < until_s

    def _stop(self) -> ResizeStop:
        return ResizeStop.CLOSED if self._closed else ResizeStop.IN_USE

    # --- host memory

    def _resize_host(self, capacity_bytes: int) -> ResizeStop | None:
        host, placement = self._host, self._placement
        with placement.lock:
            host.capacity_bytes = max(host.capacity_bytes, capacity_bytes)
            host.limit_segments(capacity_bytes)
        stop, given = None, True
        until_s = placement.clock.monotonic() + WAIT_S
        while True:
            with placement.lock:
                placement.expire_leases()
                if host.limit_segments(capacity_bytes) <= 0:
                    break
                emptied = self._empty_host_segment()
                given &= emptied is not False
            if emptied is not None:
                until_s = placement.clock.monotonic() + WAIT_S
            elif not self._wait(until_s):
                stop = self._stop()
                capacity_bytes = host.allocated_bytes
                break
        with placement.lock:
            host.limit_segments(capacity_bytes)
            given &= host.fit_memory()
            host.capacity_bytes = capacity_bytes
        return stop or (None if given else ResizeStop.DEVICE)

    def _empty_host_segment(self) -> bool | None:
        """Give the coldest segment back. Under the lock.

        Returns: None, no segment may go now | what HostTier.give_back says.
        """
        placement, host = self._placement, self._host
        clean = placement.only_clean()
        segment = self._evict_host.coldest_segment(host.slab, 0, clean_only=clean)
        if segment is None:
            return None
        first = segment * host.slab.slots_per_segment_max
        end = first + host.slab.slots_per_segment_max
        rows = placement.index.rows_in_slots(TierName.HOST, first, end)
        left = placement.index.drop_subtree(rows, TierName.HOST)
        placement.count_evicted(left.rows)
        self._evicted += len(left.rows)
        placement.release_host_slots(left.free_slots)
        if len(host.slab.slots_of(segment)):
            return None
        return host.give_back(segment)

    # --- disk

    def _resize_disk(self, disk: DiskTier, capacity_bytes: int) -> ResizeStop | None:
        before = disk.capacity_bytes
        if capacity_bytes >= before:
            share = disk.sizing.share_bytes(capacity_bytes)
            if not disk.sizing.write_headers(share):
                return ResizeStop.DEVICE
            reach("resize.grow")
            return self._settle_disk(disk, capacity_bytes)
        disk.sizing.limit(disk.sizing.share_bytes(capacity_bytes))
        stop = self._shrink_disk(disk, capacity_bytes)
        if stop is not None:
            capacity_bytes = min(before, disk.sizing.reached_bytes())
        if not disk.sizing.sync():
            stop = stop or ResizeStop.DEVICE
            capacity_bytes = before
        failed = self._settle_disk(disk, capacity_bytes)
        if failed is None:
            reach("resize.shrink")
            disk.sizing.write_headers(disk.sizing.share_bytes(capacity_bytes))
        return stop or failed

    def _settle_disk(self, disk: DiskTier, capacity_bytes: int) -> ResizeStop | None:
        """Write the capacity into store.toml; from then on it holds."""
        home = self._home
        assert home is not None
        try:
            facts = home.facts()
            assert facts is not None
            home.write_facts(replace(facts, disk_capacity_bytes=capacity_bytes))
        except StoreError:
            disk.sizing.limit(disk.sizing.share_bytes(disk.capacity_bytes))
            return ResizeStop.DEVICE
        disk.capacity_bytes = capacity_bytes
        disk.sizing.limit(disk.sizing.share_bytes(capacity_bytes))
        return None

    def _shrink_disk(self, disk: DiskTier, capacity_bytes: int) -> ResizeStop | None:
        """Remove segments until every volume fits its share."""
        share = disk.sizing.share_bytes(capacity_bytes)
        clock = self._placement.clock
        until_s = clock.monotonic() + WAIT_S
        while (among := disk.sizing.over(share)) is not None:
            with self._placement.lock:
                self._placement.expire_leases()
                assert self._evict_disk is not None
                segment = self._evict_disk.coldest_segment(disk.slab, 0, among=among)
                if segment is not None and not disk.sizing.retire(segment):
                    segment = None
            if segment is None:
                if not self._wait(until_s):
                    return self._stop()
                continue
            stop = self._drop_disk_segment(disk, segment)
            if stop is not None:
                disk.sizing.keep(segment)
                return stop
            until_s = clock.monotonic() + WAIT_S
        return None

    def _drop_disk_segment(self, disk: DiskTier, segment: int) -> ResizeStop | None:
        """Empty a retiring segment and remove it; a write under way may have to end first."""
        placement, per = self._placement, disk.slab.slots_per_segment_max
        until_s = placement.clock.monotonic() + WAIT_S
        while True:
            with placement.lock:
                rows = placement.index.rows_in_slots(
                    TierName.DISK, segment * per, (segment + 1) * per
                )
                left = placement.index.drop_subtree(rows, TierName.DISK)
                placement.counters.add("evicted_blocks.disk", len(left.rows))
                self._evicted += len(left.rows)
                disk.remove(left.free_slots)
            if disk.flush_removals() is not None:
                return ResizeStop.DEVICE
            if disk.sizing.drop(segment):
                return None
            if not self._wait(until_s):
                return self._stop()
