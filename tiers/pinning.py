"""The arena page-locked for a device, segment by segment, in the background.

A device copies to and from page-locked memory without a detour, and its kernels reach no other.
Locking is cheaper once the pages are there, so they are touched first, by several threads. Nobody
waits for it: copies of what is not locked yet take the slower way.

A driver that refuses is counted, and the arena stays as it is.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.cuda.device import Device, DeviceError, UInt64s
from kvstore.tiers.arena import Arena

LOG = logging.getLogger(__name__)
TOUCH_THREADS = 4
FAILURES_MAX = 3  # After so many the driver is not asked again.


@dataclass(frozen=True)
class PinnedMemory:
    """What is page-locked now, and what it took.

    seconds, summed_bytes: of all registrations so far, the first touch included. failures: of the
    driver.
    """

    bytes: int
    seconds: float
    summed_bytes: int
    failures: int

    def gauges(self) -> dict[str, int]:
        """As the store's counters have them."""
        return {
            "page_locked_bytes": self.bytes,
            "page_locked_ns": int(self.seconds * 1e9),
            "page_locked_sum_bytes": self.summed_bytes,
            "page_lock_failures": self.failures,
        }


class Pinning:
    """Registers segments of one arena with a device, in a thread of its own.

    clock: seconds, monotonic. Without `threads` whoever calls `step` does the work. Thread-safe.
    """

    def __init__(
        self, arena: Arena, device: Device, clock: Callable[[], float], *, threads: bool = True
    ) -> None:
        self._arena = arena
        self._device = device
        self._clock = clock
        self._first = arena.address + arena.segments_at
        self._registered: npt.NDArray[np.bool_] = np.zeros(arena.segments, np.bool_)
        self._queue: deque[int] = deque()
        self._changed = threading.Condition()
        self._under_way: int | None = None
        self._closed = False
        self._seconds, self._summed, self._failures = 0.0, 0, 0
        self._thread: threading.Thread | None = None
        if threads:
            self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
            self._thread.start()

    def want(self, segments: Iterable[int]) -> None:
        """Segments whose memory is taken: register those that are not. Never waits."""
        with self._changed:
            for segment in segments:
                known = self._registered[segment] or segment == self._under_way
                if not known and segment not in self._queue:
                    self._queue.append(segment)
            self._changed.notify_all()

    def drop(self, segment: int) -> None:
        """A segment's memory is about to go: end its registration. Waits for one under way."""
        with self._changed:
            if segment in self._queue:
                self._queue.remove(segment)
            self._changed.wait_for(lambda: self._under_way != segment)
            self._unregister(segment)

    def covers(self, addresses: UInt64s) -> bool:
        """Whether all of these addresses lie in registered segments. Never waits.

        It stays so while the slots there are occupied, for no other segment is given back.
        """
        offsets = addresses.astype(np.int64) - self._first
        segments = offsets // self._arena.segment_bytes
        if len(segments) and not 0 <= int(segments.min()) <= int(segments.max()) < len(
            self._registered
        ):
            return False
        return bool(self._registered[segments].all())

    def memory(self) -> PinnedMemory:
        """What is registered now."""
        with self._changed:
            size = int(self._registered.sum()) * self._arena.segment_bytes
            return PinnedMemory(size, self._seconds, self._summed, self._failures)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all that is wanted was tried. Returns: whether it was, in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (not self._queue and self._under_way is None), timeout_s
            )

    def close(self) -> None:
        """End all registrations. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            for segment in np.flatnonzero(self._registered).tolist():
                self._unregister(segment)

    def step(self, wait: bool = False) -> bool:
        """Register the next segment; `wait` for one if there is none.

        Returns: whether there was one. With `wait` False means that it was closed.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or bool(self._queue))
            if self._closed or not self._queue:
                return False
            segment = self._under_way = self._queue.popleft()
        began, registered = self._clock(), False
        try:
            if self._failures < FAILURES_MAX and self._arena.populate_segment(
                segment, TOUCH_THREADS
            ):
                self._device.register(self._address(segment), self._arena.segment_bytes)
                registered = True
        except Exception as failure:
            self._failures += 1
            if not isinstance(failure, DeviceError):
                LOG.exception("a segment was not page-locked")
        with self._changed:
            self._under_way = None
            self._registered[segment] = registered
            if registered:
                self._seconds += self._clock() - began
                self._summed += self._arena.segment_bytes
            self._changed.notify_all()
        return True

    # --- inside

    def _run(self) -> None:
        while self.step(wait=True):
            pass

    def _unregister(self, segment: int) -> None:
        if not self._registered[segment]:
            return
        self._registered[segment] = False
        try:
            self._device.unregister(self._address(segment))
        except DeviceError:
            self._failures += 1  # Of a device that has failed: its registrations ended with it.

    def _address(self, segment: int) -> int:
        return self._first + segment * self._arena.segment_bytes
