"""What requests notice of a disk that fails: counters that say so, prefixes that end earlier."""

from typing import TYPE_CHECKING

from kvstore.counters import Counters
from kvstore.index import Index
from kvstore.rows import Ints
from kvstore.tiers.base import TierName
from kvstore.tiers.disk_outcomes import DiskState

if TYPE_CHECKING:
    from kvstore.tiers.disk import DiskTier


class DiskWatch:
    """The state of a store's disk tier; one that has none is always on. Waits for nothing."""

    def __init__(self, disk: "DiskTier | None", counters: Counters) -> None:
        self._disk = disk
        self._counters = counters
        self._state = DiskState.ON
        counters.set("disk_state", 0)

    @property
    def writes_fail(self) -> bool:
        """Whether writes fail, or one takes very long."""
        return self._disk is not None and self._disk.health.writes_fail

    def note(self) -> None:
        """Count when the disk became read-only or went off, and show what it is now."""
        if self._disk is None:
            return
        state, before = self._disk.health.state, self._state
        self._state = state
        if state is not before:
            self._counters.set("disk_state", list(DiskState).index(state))
            if state is not DiskState.ON:
                self._counters.add(f"disk_times.{state}")

    def readable(self, index: Index, rows: Ints, in_host: int) -> int:
        """How many leading rows can be read now: from `in_host` on they lie on disk alone."""
        if self._disk is None or self._disk.health.state is not DiskState.OFF:
            return len(rows)
        return in_host + self._disk.readable(index.slots(TierName.DISK, rows[in_host:]))
