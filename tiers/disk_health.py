"""How the devices of a disk tier are, as far as those above it must know. No I/O, no waiting."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.tiers.disk_outcomes import DiskState
from kvstore.tiers.guard import GuardState, Monotonic
from kvstore.tiers.volume import Volume

STALLED_S = 2.0  # A write that takes longer is counted as one that fails, until it ends.


class Health:
    """The guards of all volumes together. Thread-safe."""

    def __init__(self, volumes: Sequence[Volume], monotonic: Monotonic) -> None:
        self._volumes = volumes
        self._monotonic = monotonic
        self._writing: dict[int, float] = {}  # number of a write -> when it began
        self._numbers = itertools.count()

    @property
    def state(self) -> DiskState:
        """Returns: ON | READ_ONLY | OFF."""
        closed = GuardState.CLOSED
        if any(volume.reads.state is not closed for volume in self._volumes):
            return DiskState.OFF
        if any(
            volume.catalogue_failed or volume.writes.state is not closed for volume in self._volumes
        ):
            return DiskState.READ_ONLY
        return DiskState.ON

    @property
    def takes_writes(self) -> bool:
        """Whether some volume can be written now, be it as a probe."""
        return any(volume.writable for volume in self._volumes)

    @property
    def writes_fail(self) -> bool:
        """Whether the last write to every volume failed, or one takes very long."""
        now = self._monotonic()
        if any(now - since > STALLED_S for since in list(self._writing.values())):
            return True
        return all(volume.catalogue_failed or volume.writes.faulty for volume in self._volumes)

    @property
    def growth_fails(self) -> bool:
        """Whether a segment could not be made although the capacity has room for it."""
        return any(volume.growth.faulty for volume in self._volumes)

    def retry_now(self) -> None:
        """Let whatever failed be tried at once: somebody asks for it, or waits for it."""
        for volume in self._volumes:
            for guard in (volume.writes, volume.growth, volume.reads):
                guard.retry_now()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A write is under way."""
        number = next(self._numbers)
        self._writing[number] = self._monotonic()
        try:
            yield
        finally:
            del self._writing[number]
