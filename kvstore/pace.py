"""Bytes a second, kept: who reads in the background asks before each read."""

from collections.abc import Callable

from kvstore.clock import Clock


class Pace:
    """At most `bytes_per_s` on average, and never more than one read ahead of it. 0: no limit."""

    def __init__(self, bytes_per_s: int, clock: Clock, pause: Callable[[float], None]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._pause = pause
        self._due_s = clock.monotonic()

    def wait(self, size: int) -> None:
        """Wait until `size` bytes may be read. Time that was not used is not saved up."""
        if not self._bytes_per_s:
            return
        now = self._clock.monotonic()
        if self._due_s > now:
            self._pause(self._due_s - now)
        self._due_s = max(now, self._due_s) + size / self._bytes_per_s
