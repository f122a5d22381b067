"""A daily budget for what is written to disk: a bucket that fills evenly, and is charged.

    fills        limit / 86,400 s a second, by the monotonic clock: a wall clock that is set forward
                 or back changes nothing
    holds        at most a day's limit. At midnight (UTC) what is left over is given up, but for an
                 hour's worth: nobody writes two days' budgets in one
    so           a day gets its limit and at most 1/24 of it more (4.2 %)

The time in which the store has no owner counts too: by the monotonic clock while the machine has
not started anew, else by the wall clock. What is charged is what went to segment files and
catalogues, after it did, so a debt is possible: it is paid before the next write. Not charged: the
page of counters and the few small files of a store.
"""

from kvstore.clock import Clock
from kvstore.counters import Counters

DAY_S = 86_400
SAVED_S = 3_600  # What the bucket has at first, and may keep over midnight.
MIDNIGHT_SLACK_S = 60.0  # By so much the two clocks may disagree about a midnight that passed.
UNLIMITED = 1 << 62


class WriteBudget:
    """The budget of one store. Its owner's lock guards it; the state is in the counters.

    limit_bytes: for a day, 0 for no limit: then what is written is only counted.
    """

    def __init__(self, limit_bytes: int, clock: Clock, counters: Counters) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._counters = counters
        self._saved_bytes = limit_bytes * SAVED_S / DAY_S
        self._planned_bytes = 0
        self._wanted_bytes = 0  # What the last refusal was about: nothing is written before.
        self._charged_bytes = 0  # Of the disk's own sum.
        self._wall_s, self._monotonic_s = clock.time(), clock.monotonic()
        known = counters.get("disk_writes_limit_bytes") == limit_bytes
        if limit_bytes and known and counters.get("disk_writes_wall_ms"):
            self._allowance_bytes = float(limit_bytes - counters.get("disk_writes_spent_bytes"))
            self._resume()
        else:
            today = counters.get("disk_writes_today_bytes")
            same = counters.get("disk_writes_day") == self._day()
            left = limit_bytes - (today if same else 0)
            self._allowance_bytes = max(0.0, min(self._saved_bytes, left))
            self._keep()
            self._name_day(same)
        counters.set("disk_writes_limit_bytes", limit_bytes)
        self._keep()

    def available_bytes(self) -> int:
        """What may be written now, beside what is being written; 0 where there is a debt."""
        if not self.limit_bytes:
            return UNLIMITED
        self._fill()
        return max(0, int(self._allowance_bytes) - self._planned_bytes)

    def ready(self) -> bool:
        """Whether what was refused last could be written now; True if nothing was."""
        if self._wanted_bytes and self.available_bytes() >= self._wanted_bytes:
            self._wanted_bytes = 0
        return not self._wanted_bytes

    def plan(self, slot_bytes: int, blocks: int, *, urgent: bool) -> int:
        """Set aside what a group will write. Every plan ends in `settle`.

        A group is refused until all of it can be written, or an hour's worth: many small groups
        would cost more pages of the catalogue. urgent: take what there is.

        Returns: how many of the blocks may be written; 0 for none.
        """
        if not self.limit_bytes:
            return blocks
        fit = min(blocks, self.available_bytes() // slot_bytes)
        enough = min(blocks * slot_bytes, max(int(self._saved_bytes), slot_bytes))
        if fit < blocks and (not urgent or not fit) and self.available_bytes() < enough:
            self._wanted_bytes = enough
            return 0
        self._planned_bytes += fit * slot_bytes
        return fit

    def settle(self, planned_bytes: int, disk_bytes: int) -> None:
        """A planned group is over. disk_bytes: all that the disk tier has written so far."""
        self._planned_bytes -= planned_bytes
        self.charge(disk_bytes)

    def charge(self, disk_bytes: int) -> None:
        """Charge what was written since the last time. disk_bytes: as for `settle`."""
        size, self._charged_bytes = disk_bytes - self._charged_bytes, disk_bytes
        self._fill()
        self._allowance_bytes -= size
        self._counters.add("disk_writes_bytes", size)
        self._counters.add("disk_writes_today_bytes", size)
        self._keep()

    def _day(self) -> int:
        return max(0, int(self._wall_s // DAY_S))

    def _resume(self) -> None:
        """The time since the last owner's last word."""
        wall_s = self._counters.get("disk_writes_wall_ms") / 1000
        monotonic_s = self._counters.get("disk_writes_monotonic_ms") / 1000
        passed_s = self._monotonic_s - monotonic_s
        if passed_s < 0:  # The machine started anew: only the wall clock knows, if it was not set.
            passed_s = max(0.0, self._wall_s - wall_s)
        self._pass(passed_s)

    def _fill(self) -> None:
        before_s = self._monotonic_s
        self._wall_s, self._monotonic_s = self._clock.time(), self._clock.monotonic()
        self._pass(max(0.0, self._monotonic_s - before_s))

    def _pass(self, seconds: float) -> None:
        """Let time pass up to now: fill, and end the day where a midnight lies in it."""
        rate = self.limit_bytes / DAY_S
        named = self._counters.get("disk_writes_day")
        if self._day() == named and seconds < DAY_S:
            self._allowance_bytes = min(self._allowance_bytes + rate * seconds, self.limit_bytes)
            return
        since_s = self._wall_s % DAY_S  # midnight
        if since_s <= seconds + MIDNIGHT_SLACK_S:
            since_s = min(since_s, seconds)
            left = self._allowance_bytes + rate * (seconds - since_s)
            self._allowance_bytes = min(left, self._saved_bytes) + rate * since_s
        else:  # The wall clock was set: this goes on as the same day under another name.
            since_s = -1.0
            self._allowance_bytes = min(self._allowance_bytes + rate * seconds, self.limit_bytes)
        # In this order: a kill between the two gives nothing twice.
        self._keep()
        self._name_day(since_s < 0)

    def _name_day(self, same: bool) -> None:
        if not same:
            self._counters.set("disk_writes_today_bytes", 0)
        self._counters.set("disk_writes_day", self._day())

    def _keep(self) -> None:
        """The state goes into the counters, so that a kill loses nothing of it."""
        # The times first: a kill between the two gives no time twice.
        self._counters.set("disk_writes_wall_ms", max(0, int(self._wall_s * 1000)))
        self._counters.set("disk_writes_monotonic_ms", max(0, int(self._monotonic_s * 1000)))
        spent = max(0, int(self.limit_bytes - self._allowance_bytes) + 1)
        self._counters.set("disk_writes_spent_bytes", spent if self.limit_bytes else 0)


def written_today_bytes(counters: dict[str, int], now_s: float) -> int:
    """What was written on the day of `now_s`, seconds since 1970, by a store's counters."""
    same = counters["disk_writes_day"] == int(now_s // DAY_S)
    return counters["disk_writes_today_bytes"] if same else 0
