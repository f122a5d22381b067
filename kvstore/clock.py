"""The time, as a thing that is passed in: tests and the simulation bring their own."""

import time


class Clock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back. For deadlines, ages and durations."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since 1970. For what is written down."""
        return time.time()
