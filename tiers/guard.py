"""Whether a device is asked at all: a breaker with back-off for one kind of call to it.

    closed --faults_max faults in a row--> open --back-off passed--> half open --success--> closed
                                            ^-------------- fault, doubled ----------|

What fails again and again is left alone for a while, so that nothing waits for it and nothing is
given up for it; whoever finds the guard half open is the probe. It is a value over a clock: no
thread, no I/O.
"""

import threading
from collections.abc import Callable
from enum import StrEnum

Monotonic = Callable[[], float]


class GuardState(StrEnum):
    """What a guard says."""

    CLOSED = "closed"  # calls are made
    OPEN = "open"  # no call is made
    HALF_OPEN = "half_open"  # the back-off is over: the next call is a probe


class Guard:
    """Counts the outcomes of calls. Thread-safe; never waits.

    faults_max: faults in a row that open it. first_s, longest_s: the back-off doubles between them.
    """

    def __init__(
        self, monotonic: Monotonic, *, faults_max: int, first_s: float, longest_s: float
    ) -> None:
        self.opened = 0  # how often it opened
        self._monotonic = monotonic
        self._faults_max = faults_max
        self._first_s = first_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._faults = 0  # in a row
        self._open = False
        self._wait_s = first_s
        self._retry_at = 0.0

    @property
    def state(self) -> GuardState:
        """Returns: CLOSED | OPEN | HALF_OPEN."""
        with self._lock:
            if not self._open:
                return GuardState.CLOSED
            return GuardState.HALF_OPEN if self._due() else GuardState.OPEN

    @property
    def faulty(self) -> bool:
        """Whether the last call failed."""
        return self._faults > 0

    def allows(self) -> bool:
        """Whether a call may be made now, be it as a probe."""
        return not self._open or self._due()

    def success(self) -> None:
        """A call was answered: everything is as in the beginning."""
        if self._faults or self._open:
            with self._lock:
                self._faults, self._open, self._wait_s = 0, False, self._first_s

    def failure(self, *, final: bool = False) -> bool:
        """A call failed. final: so that there is no use in another one now.

        A failure that arrives while it is open began before, and changes nothing.
        Returns: whether the guard is open now.
        """
        with self._lock:
            if self._open and not self._due():
                return True
            self._faults += 1
            if self._open:
                self._wait_s = min(2 * self._wait_s, self._longest_s)
            elif final or self._faults >= self._faults_max:
                self._open, self._wait_s = True, self._first_s
                self.opened += 1
            self._retry_at = self._monotonic() + self._wait_s
            return self._open

    def retry_now(self) -> None:
        """Let the next call be a probe, however long the back-off still is."""
        with self._lock:
            self._retry_at = self._monotonic()

    def _due(self) -> bool:
        return self._monotonic() >= self._retry_at


def write_guard(monotonic: Monotonic) -> Guard:
    """For writes to a volume: back within 5 s of its return, with a probe's own time."""
    return Guard(monotonic, faults_max=2, first_s=0.25, longest_s=2.0)


def growth_guard(monotonic: Monotonic) -> Guard:
    """For new segments: while there is no room for them blocks give way to others at once."""
    return Guard(monotonic, faults_max=1, first_s=0.25, longest_s=2.0)


def read_guard(monotonic: Monotonic) -> Guard:
    """For reads from a volume: one that answers none of 5 is off, and is asked each second."""
    return Guard(monotonic, faults_max=5, first_s=1.0, longest_s=1.0)
