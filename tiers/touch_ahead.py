"""Memory touched before it is needed: the first write to a page of an arena costs a fault.

At about half a second a GiB that would be more than the read from disk that lands in it.
"""

import threading
from collections.abc import Callable
from typing import Protocol

AHEAD_BYTES = 128 << 20  # Touched beyond what is in use: more than one long prompt takes.


class Segments(Protocol):
    """What is touched, segment by segment."""

    segments: int
    segment_bytes: int

    def populate_segment(self, segment: int) -> bool: ...


class TouchAhead:
    """A thread that keeps AHEAD_BYTES of an arena touched beyond the segments in use.

    It never waits for anyone and nobody waits for it, except `close`, for one step at most. Without
    `threads` it does nothing. then: called with each segment that was touched, by that thread.
    """

    def __init__(
        self,
        arena: Segments,
        *,
        threads: bool = True,
        then: Callable[[int], None] = lambda segment: None,
    ) -> None:
        self._arena = arena
        self._then = then
        self._ahead = -(-AHEAD_BYTES // arena.segment_bytes)
        self._changed = threading.Condition()
        self._wanted = 0
        self._most = arena.segments
        self._done = 0
        self._touching = False
        self._closed = False
        self._thread: threading.Thread | None = None
        if threads:
            self._thread = threading.Thread(target=self._run, name="kvstore-touch", daemon=True)
            self._thread.start()

    def in_use(self, segments: int) -> None:
        """So many segments, from the first on, are in use now."""
        with self._changed:
            self._wanted = min(segments + self._ahead, self._most)
            self._changed.notify_all()

    def limit(self, segments: int) -> None:
        """Only the first so many segments are touched from now on. Waits for one under way."""
        with self._changed:
            self._most = segments
            self._wanted = min(self._wanted, segments)
            self._done = min(self._done, segments)
            self._changed.wait_for(lambda: not self._touching)

    def touched(self) -> int:
        """So many segments, from the first on, have been touched."""
        with self._changed:
            return self._done

    def close(self) -> None:
        """Stop. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done < self._wanted)
                if self._closed:
                    return
                segment = self._done
                self._touching = True
            touched = self._arena.populate_segment(segment)
            if touched:
                self._then(segment)
            with self._changed:
                self._touching = False
                self._done = min(segment + 1, self._most)
                self._changed.notify_all()
            if not touched:
                return  # Memory ran out, or the arena is closing: the tier will find out.
