"""A clock that goes when it is told to."""

from kvstore.clock import Clock


class HandClock(Clock):
    """Both clocks go together, by `pass_s` alone."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def pass_s(self, seconds: float) -> None:
        """So much time passes."""
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return 1_700_000_000.0 + self.now_s
