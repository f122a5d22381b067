"""Time that goes on only when a test says so."""

from kvstore.clock import Clock


class ManualClock(Clock):
    """Both clocks, moved by `advance`. The wall clock can be set apart, as an administrator may."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s
        self.wall_ahead_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + self.wall_ahead_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
