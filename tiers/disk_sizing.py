"""Another capacity for a disk tier while it is in use: segments leave, the budgets of volumes move.

The order is what keeps a store that opens at every instant. To shrink: no segment is added that the
lower capacity has no room for; blocks leave by a commit; files go; then the store's file has the
lower capacity, then the volumes' headers. To grow: the headers first, then the store's file. So a
volume's header never says less than the store's file does.
"""

import threading
from collections.abc import Sequence

import numpy as np

from kvstore.tiers.catalogue_tables import SegmentState
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import ALIGN
from kvstore.tiers.slab import SegmentMask, Slab
from kvstore.tiers.volume import Volume
from kvstore.tiers.volume_cost import refuse_too_small


class DiskSizing:
    """The segments and budgets of a tier's volumes. Thread-safe; one caller resizes at a time.

    other_bytes: of the capacity, what the store's own files take.
    """

    def __init__(
        self,
        io: FileIo,
        slab: Slab,
        volumes: Sequence[Volume],
        lock: threading.RLock,
        growing: threading.Lock,
        other_bytes: int,
    ) -> None:
        """lock: the tier's. growing: held by whoever changes segments; taken before `lock`."""
        self._io = io
        self._slab = slab
        self._volumes = volumes
        self._lock = lock
        self._growing = growing
        self._other_bytes = other_bytes

    def share_bytes(self, capacity_bytes: int) -> int:
        """What each volume may take of a capacity."""
        return (capacity_bytes - self._other_bytes) // len(self._volumes) // ALIGN * ALIGN

    def refuse(self, capacity_bytes: int) -> None:
        """Raise ConfigError, in one sentence, for a capacity that cannot be."""
        share, size = self.share_bytes(capacity_bytes), self._slab.segment_bytes
        refuse_too_small(share, size)
        most = self._slab.segments_max * size
        if capacity_bytes > most:
            raise ConfigError(
                f"with segments of {size} bytes the disk tier takes at most {most} bytes; "
                "give less, or make a new store"
            )
        growth: dict[int, int] = {}
        for volume in self._volumes:
            device = self._io.status(volume.path).st_dev
            more = max(0, share - volume.allocated_bytes()) if share > volume.budget_bytes else 0
            growth[device] = growth.get(device, 0) + more
        for volume in self._volumes:
            free = self._io.free_bytes(volume.path)
            wanted = growth[self._io.status(volume.path).st_dev]
            if wanted > free:
                raise ConfigError(
                    f"the disk capacity needs {wanted} more bytes at {volume.path} but {free} are "
                    "free; give less or free some space"
                )

    def limit(self, share_bytes: int) -> None:
        """Let no volume take more than this from now on; what is there already stays."""
        with self._lock:
            for volume in self._volumes:
                volume.budget_bytes = share_bytes

    def over(self, share_bytes: int) -> SegmentMask | None:
        """The segments of a volume that takes more than its share: bool [segments]; None if none.

        Its catalogue's file is cut first.
        """
        with self._growing:
            for number, volume in enumerate(self._volumes):
                if volume.need_bytes({}) > share_bytes and volume.catalogue is not None:
                    volume.catalogue_bytes = volume.catalogue.shrink(volume.map_bytes({}))
                if volume.need_bytes({}) > share_bytes:
                    owners = np.arange(self._slab.segments_max) % len(self._volumes)
                    return np.asarray(owners == number)
        return None

    def reached_bytes(self) -> int:
        """The least capacity that all volumes fit now."""
        with self._lock:
            most = max(volume.need_bytes({}) for volume in self._volumes)
        return -(-most // ALIGN) * ALIGN * len(self._volumes) + self._other_bytes

    def retire(self, segment: int) -> bool:
        """Give out no more slots of a segment; never waits for a device.

        Returns: True | False, where it was abandoned or is changing its class just now.
        """
        with self._lock:
            slab = self._slab
            if slab.is_quarantined(segment) or slab.is_retiring(segment):
                return False
            if not slab.class_of(segment):
                return False
            slab.retire(segment)
            return True

    def keep(self, segment: int) -> None:
        """A segment that did not get empty goes on."""
        with self._lock:
            if self._slab.is_retiring(segment):
                self._slab.keep(segment)

    def drop(self, segment: int) -> bool:
        """Remove a retiring segment and its file.

        Returns: True | False, while a slot of it is taken, or its device fails.
        """
        with self._growing:
            with self._lock:
                if not self._slab.is_retiring(segment) or len(self._slab.slots_of(segment)):
                    return False
            volume = self._volumes[segment % len(self._volumes)]
            reach("resize.drop")
            try:
                volume.remove_segment(segment)
            except OSError:
                return False
            with self._lock:
                self._slab.unassign(segment)
            volume.journal.set_segment(segment, 0, SegmentState.USABLE)
            reach("resize.dropped")
            return True

    def sync(self) -> bool:
        """Returns: whether what was dropped will stay away after a power loss."""
        try:
            for volume in self._volumes:
                volume.sync_names()
        except OSError:
            return False
        return True

    def write_headers(self, share_bytes: int) -> bool:
        """Write a share into the headers of the volumes. Returns: whether that could be."""
        try:
            for volume in self._volumes:
                volume.write_own_header(share_bytes)
        except OSError:
            return False
        return True
