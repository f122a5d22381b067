"""Reads of records, and whose fault it is when one fails: the block's or the device's.

A block that cannot be read is lost, and its descendants with it. A device that does not answer is
another matter: to drop what it holds would lose everything for a loose cable. So after a failed
read, tried twice, the header of the segment is read too; if that fails as well nothing is known of
the block. After five failed reads in a row nothing more is asked of the device but a probe each
second.
"""

import errno
import threading
from dataclasses import replace
from itertools import cycle, islice

from kvstore.tiers.disk_outcomes import BadRun, IoFault, Slots
from kvstore.tiers.guard import GuardState
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.open_files import OpenFiles
from kvstore.tiers.record import ALIGN, HeaderFault
from kvstore.tiers.record_read import RecordCheck, read_record
from kvstore.tiers.segment import HEADER_BYTES
from kvstore.tiers.slab import Slab
from kvstore.tiers.volume import Volume

OFF = IoFault(errno.EIO, "the disk is off: its last reads failed", device=True)
OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # The process ran out of something.
PROBES = 2  # Records that one probe tries to read.


class GuardedReads:
    """Reads over all volumes. Thread-safe; no lock is held over a read. Raises nothing."""

    def __init__(
        self, io: FileIo, files: OpenFiles, slab: Slab, volumes: list[Volume], lock: threading.RLock
    ) -> None:
        """lock: the tier's, for the slab."""
        self._io = io
        self._files = files
        self._slab = slab
        self._volumes = volumes
        self._lock = lock
        self._failed: dict[int, int] = {}  # volume -> the slot whose read failed last
        self._turn = 0

    def read_into(self, slot: int, buffer: memoryview) -> IoFault | None:
        """See DiskTier.read_into."""
        volume, segment, refused = self._place(slot)
        if refused is not None:
            return refused
        fault: IoFault | None = None
        for _ in range(2):
            try:
                with self._files.use(segment) as fd:
                    if self._io.pread(fd, buffer, self._slab.offset_of(slot)) != len(buffer):
                        fault = IoFault(0, "the segment file is too short")
                    else:
                        fault = None
                break
            except OSError as error:
                fault = _io_fault(error)
        if fault is not None:
            return self._judge(volume, slot, fault)
        volume.reads.success()
        return None

    def read_record(
        self, slot: int, buffer: memoryview, check: RecordCheck
    ) -> IoFault | HeaderFault | BadRun | None:
        """See DiskTier.read_record."""
        volume, segment, refused = self._place(slot)
        if refused is not None:
            return refused
        fault: IoFault | HeaderFault | BadRun | None
        try:
            with self._files.use(segment) as fd:
                fault = read_record(self._io, fd, self._slab.offset_of(slot), buffer, check)
        except OSError as error:
            fault = _io_fault(error)
        if isinstance(fault, IoFault):
            return self._judge(volume, slot, fault)
        volume.reads.success()
        return fault

    def readable(self, slots: Slots) -> int:
        """How many leading slots lie in volumes that are read."""
        off = [n for n, v in enumerate(self._volumes) if v.reads.state is not GuardState.CLOSED]
        if not off:
            return len(slots)
        for number, slot in enumerate(slots.tolist()):
            if self._slab.segment_of(slot) % len(self._volumes) in off:
                return number
        return len(slots)

    def probe(self, number: int) -> bool:
        """Try to read from a volume that is off. Returns: whether it is on again."""
        volume = self._volumes[number]
        with self._lock:
            segments = sorted(volume.classes)
            start = self._turn % max(1, len(segments))
            self._turn += 1
            slots = [self._failed[number]] if number in self._failed else []
            for segment in islice(cycle(segments), start, start + len(segments)):
                held = self._slab.slots_of(segment)
                if len(held):
                    slots.append(int(held[self._turn % len(held)]))
                    break
        if not slots or any(self._answers(slot) for slot in slots[:PROBES]):
            volume.reads.success()
            return True
        volume.reads.failure()
        return False

    def _place(self, slot: int) -> tuple[Volume, int, IoFault | None]:
        segment = self._slab.segment_of(slot)
        volume = self._volumes[segment % len(self._volumes)]
        if segment not in volume.segments:
            return volume, segment, IoFault(errno.ENOENT, "the slot lies in no segment")
        if volume.reads.state is not GuardState.CLOSED:
            return volume, segment, OFF
        return volume, segment, None

    def _judge(self, volume: Volume, slot: int, fault: IoFault) -> IoFault:
        """Say whose fault a failed read is, and count it."""
        if fault.errno in {0, errno.ENOENT}:
            volume.reads.success()  # The device answered: the file is too short, or gone.
            return fault
        if fault.errno in OURS:
            return replace(fault, device=True)
        self._failed[volume.identity.volume] = slot
        off = volume.reads.failure()
        return replace(fault, device=off or not self._answers(slot, header=True))

    def _answers(self, slot: int, *, header: bool = False) -> bool:
        """Whether a page of a slot, or of its segment's header, can be read."""
        try:
            with self._files.use(self._slab.segment_of(slot)) as fd:
                page = aligned_buffer(HEADER_BYTES if header else ALIGN)
                at = 0 if header else self._slab.offset_of(slot)
                return self._io.pread(fd, page, at) == len(page)
        except OSError:
            return False


def _io_fault(error: OSError) -> IoFault:
    return IoFault(error.errno or errno.EIO, error.strerror or str(error))
