"""What brings a disk tier back by itself: probes, catalogues opened anew, files of lost segments.

Nothing here is urgent, and all of it waits for devices: it runs on a thread that writes back, one
at a time, never under a lock that a lookup, a save or a load takes.
"""

import logging
import threading
from collections.abc import Callable

import numpy as np

from kvstore.tiers.disk_outcomes import NO_SLOTS, Slots
from kvstore.tiers.disk_room import Room
from kvstore.tiers.errors import KvstoreError
from kvstore.tiers.guard import GuardState
from kvstore.tiers.guarded_reads import GuardedReads
from kvstore.tiers.open_files import OpenFiles
from kvstore.tiers.slab import Slab
from kvstore.tiers.volume import Volume

LOG = logging.getLogger(__name__)


class Upkeep:
    """The upkeep of all volumes. Thread-safe; raises nothing."""

    def __init__(
        self,
        volumes: list[Volume],
        slab: Slab,
        files: OpenFiles,
        room: Room,
        reads: GuardedReads,
        *,
        lock: threading.RLock,
        reopen_catalogue: Callable[[Volume], Slots],
    ) -> None:
        self._volumes = volumes
        self._slab = slab
        self._files = files
        self._room = room
        self._reads = reads
        self._lock = lock
        self._reopen_catalogue = reopen_catalogue
        self._busy = threading.Lock()
        self.reopened = 0  # catalogues so far
        self.failed = 0  # tries to
        self.reclaimed = 0  # segments so far

    def run(self) -> Slots:
        """Do what is due. A call beside another one does nothing.

        Returns: slots of blocks that are lost; drop them from the index.
        """
        if not self._busy.acquire(blocking=False):
            return NO_SLOTS
        try:
            lost = NO_SLOTS
            for number, volume in enumerate(self._volumes):
                if volume.reads.state is GuardState.HALF_OPEN:
                    self._reads.probe(number)
                if volume.catalogue_failed and volume.writes.state is not GuardState.OPEN:
                    lost = np.concatenate([lost, self._reopen(volume)])
            if len(self._slab.quarantined()):
                self._reclaim()
            return lost
        finally:
            self._busy.release()

    def _reopen(self, volume: Volume) -> Slots:
        try:
            lost = self._reopen_catalogue(volume)
        except (OSError, KvstoreError) as error:
            LOG.warning("the catalogue of %s cannot be opened anew yet: %s", volume.path, error)
            volume.writes.failure(final=True)
            self.failed += 1
            return NO_SLOTS
        LOG.warning("the catalogue of %s was made anew; %d blocks lost", volume.path, len(lost))
        volume.writes.success()
        volume.commit(None)  # What was to be removed meanwhile.
        self.reopened += 1
        return lost

    def _reclaim(self) -> None:
        """Remove the files of abandoned segments that nobody reads; their room is free again."""
        for segment in self._slab.quarantined().tolist():
            volume = self._volumes[segment % len(self._volumes)]
            if volume.journal.removing() and volume.writable:
                volume.commit(None)  # What leaves the segment may wait for just this.
            with self._room.growing:
                with self._lock:
                    used = len(self._slab.slots_of(segment)) > 0
                if used or self._files.in_use(segment) or not volume.writes.allows():
                    continue
                try:
                    volume.remove_segment(segment)
                except OSError:
                    volume.writes.failure()
                    continue
                with self._lock:
                    self._slab.reclaim(segment)
                self.reclaimed += 1
                volume.growth.retry_now()
