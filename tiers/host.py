"""The host tier: records in slots of shared memory. Knows no keys; the index says what lies where.

A slot holds one record (tiers/record.py), so its row is its header, in the arena itself: an owner
that takes the arena over finds every published block by `scan`. A block exists from the moment its
magic is written, which is the last of all its bytes, until that magic is zeroed:

    reserve -> payload -> publish: header, then magic -> release: magic zeroed
"""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.cuda.device import Device
from kvstore.tiers.arena import SHARED_MEMORY, Arena
from kvstore.tiers.arena_file import ArenaStart
from kvstore.tiers.errors import ClosedError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.host_scan import MAGIC_WORD, FoundRecords, find_records, merged
from kvstore.tiers.io import FileIo
from kvstore.tiers.pinning import PinnedMemory, Pinning
from kvstore.tiers.record import Bytes
from kvstore.tiers.slab import Slab, Slots
from kvstore.tiers.touch_ahead import TouchAhead


class HostTier:
    """Slots in one arena of at most `capacity_bytes`, its header included.

    reserve, release, reassign and scan belong under the owner's lock; views, addresses and publish
    of different slots may run side by side. `slab` is for reading: what frees or moves slots goes
    through this class. The capacity may move, up to `most_bytes`. Without `threads` no memory is
    touched ahead of its use. Raises what Arena raises, and ClosedError after close.
    """

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int,
        *,
        store_id: bytes,
        persist: bool = False,
        directory: Path = SHARED_MEMORY,
        io: FileIo | None = None,
        threads: bool = True,
        most_bytes: int = 0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.arena = Arena(
            capacity_bytes,
            segment_bytes,
            store_id=store_id,
            persist=persist,
            directory=directory,
            io=io,
            most_bytes=most_bytes,
        )
        self.slab = Slab(self.arena.segments, self.arena.segment_bytes, 0)
        self.slab.segments_limit = self.arena.segments_within(capacity_bytes)
        self._bytes = np.frombuffer(self.arena.buffer, np.uint8)
        self._words = self._bytes.view(np.uint64)
        taken_over = self.arena.start is ArenaStart.TAKEN_OVER
        self._scanned = not taken_over
        self._threads = threads
        self._pin_lock = threading.Lock()
        self._pinning: Pinning | None = None
        self._touch_ahead = TouchAhead(self.arena, threads=threads, then=self._want_pinned)
        # What a former owner left is counted first, see scan.
        self._touch_ahead.limit(0 if taken_over else self.slab.segments_limit)
        self._touch_ahead.in_use(0)
        # Segments that may hold old bytes where slots of another class would have their magic.
        self._used = np.full(self.arena.segments, taken_over, np.bool_)

    @property
    def taken_over(self) -> bool:
        """Whether the arena is a former owner's: call `scan` before anything else."""
        return self.arena.start is ArenaStart.TAKEN_OVER

    # --- slots

    def fits(self, slot_bytes: int) -> bool:
        """Whether a segment can hold a slot of this size; check it before the first reserve."""
        return self.slab.fits(slot_bytes)

    def reserve(self, slot_bytes: int, count: int) -> Slots:
        """Up to `count` slots, unpublished: int64 [<= count]. Takes new segments as needed.

        Never evicts and never waits: fewer slots mean that the tier is full for this class. Their
        magics are zero: a free slot's always is, see release and `_begin_class`.
        """
        self._refuse_closed()
        if not self._scanned:
            raise ValueError("this arena was taken over; call scan() before reserve()")
        slots = self.slab.reserve(slot_bytes, count)
        while len(slots) < count and self._grow(slot_bytes):
            more = self.slab.reserve(slot_bytes, count - len(slots))
            slots = np.concatenate([slots, more])
        return slots

    def publish(self, slots: Slots, headers: Bytes) -> None:
        """Make reserved slots, whose payloads are complete, into blocks. The magics come last.

        headers: uint8 [n, header_bytes], sealed; at most the room before the payload.
        """
        self._refuse_closed()
        if len(slots) != len(headers):
            raise ValueError(f"{len(slots)} slots need as many headers; got {len(headers)}")
        size = headers.shape[1]
        offsets = self._offsets(slots)
        for at, header in zip(offsets.tolist(), headers, strict=True):
            self._bytes[at + 8 : at + size] = header[8:]
        self._words[offsets // 8] = headers[:, :8].view(np.uint64)[:, 0]

    def unpublish(self, slots: Slots) -> None:
        """Slots that somebody still reads are no blocks any more: no new owner finds them."""
        self._refuse_closed()
        self._words[self._offsets(slots) // 8] = 0

    def release(self, slots: Slots) -> None:
        """Free slots, published or not. ValueError, and no change, if one is not occupied."""
        self._refuse_closed()
        self.slab.release(slots)
        self._words[self._offsets(slots) // 8] = 0

    def reassign(self, segment: int, slot_bytes: int) -> None:
        """Give a segment without occupied slots to another class."""
        self._refuse_closed()
        self.slab.reassign(segment, slot_bytes)
        self._begin_class(segment, slot_bytes)

    # --- views

    def header_view(self, slot: int, header_bytes: int) -> Bytes:
        """The header of a slot, in place: uint8 [header_bytes]."""
        at = self._offset(slot)
        return self._bytes[at : at + header_bytes]

    def record_view(self, slot: int, slot_bytes: int) -> memoryview:
        """The whole record of a slot, in place; starts on a page, so fit for O_DIRECT."""
        at = self._offset(slot)
        return self.arena.buffer[at : at + slot_bytes]

    def record_addresses(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """Where the records start in this process: uint64 [n]."""
        return self._offsets(slots).astype(np.uint64) + np.uint64(self.arena.address)

    def payload_addresses(self, slots: Slots, header_bytes: int) -> npt.NDArray[np.uint64]:
        """Where the payloads start in this process: uint64 [n]."""
        return self.record_addresses(slots) + np.uint64(header_bytes)

    # --- a device

    def pin(self, device: Device, clock: Callable[[], float]) -> Pinning:
        """Page-lock the arena for a device, in the background: see tiers/pinning.py.

        clock: seconds, monotonic. A second device of this process finds the
        memory locked for itself, too.
        """
        self._refuse_closed()
        with self._pin_lock:
            if self._pinning is None:
                self._pinning = Pinning(self.arena, device, clock, threads=self._threads)
                # Whoever takes a segment from now on says so itself.
                self._pinning.want(range(self._touch_ahead.touched()))
                self._pinning.want(self.slab.assigned().tolist())
            return self._pinning

    def pinned(self) -> PinnedMemory:
        """What is page-locked now."""
        return self._pinning.memory() if self._pinning is not None else PinnedMemory(0, 0.0, 0, 0)

    # --- takeover

    def scan(self) -> list[FoundRecords]:
        """The blocks of the former owner, by format; all their slots are occupied afterwards.

        Once, before the first reserve; [] for an arena that is new. Headers are whole; payloads are
        unverified until first read. The caller releases the slots of blocks that it does not want.
        """
        self._refuse_closed()
        if self._scanned:
            return []
        parts: list[FoundRecords] = []
        for segment, slot_bytes in enumerate(self.arena.classes().tolist()):
            full = len(self.slab.assigned()) >= self.slab.segments_limit
            if full or not self.slab.fits(slot_bytes):
                if slot_bytes:
                    self.arena.set_class(segment, 0)
                continue
            rows = self._rows(segment, slot_bytes)
            first = segment * self.slab.slots_per_segment_max
            found = list(find_records(rows, first))
            slots = np.concatenate([np.zeros(0, np.int64), *(part.slots for part in found)])
            torn = np.ones(len(rows), np.bool_)
            torn[slots - first] = False
            rows[torn, :8] = 0
            self.slab.restore(segment, slot_bytes, slots)
            parts += found
        self._scanned = True
        self.fit_memory()
        return merged(parts)

    # --- another capacity

    def limit_segments(self, capacity_bytes: int) -> int:
        """Assign no more segments than fit a capacity. Returns: how many must be given back first.

        The caller sets capacity_bytes once that is done.
        """
        self.slab.segments_limit = self.arena.segments_within(capacity_bytes)
        return len(self.slab.assigned()) - self.slab.segments_limit

    def give_back(self, segment: int) -> bool:
        """Take a segment without occupied slots from its class, and give its memory back.

        Returns: True, or False where the system does not take it.
        """
        self._refuse_closed()
        self.slab.unassign(segment)
        self.arena.set_class(segment, 0)
        reach("resize.give_back")
        self._used[segment] = not (given := self._release_memory(segment))
        return given

    def fit_memory(self) -> bool:
        """Give back what was touched ahead beyond the limit; touch no more than fits it.

        Returns: True, or False where the system does not take some of it.
        """
        assigned, limit = self.slab.assigned(), self.slab.segments_limit
        # Assigned segments anywhere, and all before `ahead`, are at most as many as the limit says;
        # it stays so, because the lowest segment is always assigned first.
        firsts = np.arange(self.arena.segments + 1)
        beyond = len(assigned) - np.searchsorted(assigned, firsts)
        ahead = int(firsts[firsts + beyond <= max(limit, len(assigned))][-1])
        self._touch_ahead.limit(ahead)
        loose = np.setdiff1d(np.arange(ahead, self.arena.segments), assigned).tolist()
        given = all([self._release_memory(segment) for segment in loose])
        self._touch_ahead.in_use(int(assigned[-1]) + 1 if len(assigned) else 0)
        return given

    # --- sums

    @property
    def blocks(self) -> int:
        """Occupied slots, reserved ones included."""
        return self.slab.occupied()

    @property
    def used_bytes(self) -> int:
        """Bytes of the occupied slots."""
        return self.slab.used_bytes()

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the machine: header and segments with a class (`populate` takes all)."""
        return self.arena.segments_at + self.slab.allocated_bytes()

    def check_integrity(self) -> None:
        """AssertionError if slab and arena disagree, or a free slot could be found as a block."""
        self.slab.check_integrity()
        assert self.used_bytes <= self.allocated_bytes <= self.capacity_bytes
        for segment, slot_bytes in enumerate(self.arena.classes().tolist()):
            assert slot_bytes == self.slab.class_of(segment), f"segment {segment}: class differs"
            if slot_bytes:
                magics = self._rows(segment, slot_bytes)[:, :8].view(np.uint64)[:, 0]
                published = np.flatnonzero(magics == MAGIC_WORD)
                ids = published + segment * self.slab.slots_per_segment_max
                assert np.isin(ids, self.slab.slots_of(segment)).all(), "a free slot is published"

    def close(self, keep: bool) -> None:
        """End: `keep` leaves a persistent arena to the next owner, else its file is removed."""
        self._touch_ahead.close()
        if self._pinning is not None:
            self._pinning.close()
        if not self.arena.closed:
            del self._words, self._bytes
            self.arena.close(keep)

    # --- inside

    def _grow(self, slot_bytes: int) -> bool:
        """Give one more segment to a class, if there is one and memory for it."""
        segment = self.slab.assign(slot_bytes)
        if segment is None:
            return False
        if not self.arena.commit(segment):
            self.slab.unassign(segment)
            return False
        self._begin_class(segment, slot_bytes)
        self._touch_ahead.in_use(segment + 1)
        self._want_pinned(segment)
        return True

    def _want_pinned(self, segment: int) -> None:
        if self._pinning is not None:
            self._pinning.want([segment])

    def _release_memory(self, segment: int) -> bool:
        """Give a segment's memory back, unlocked before: a device may not keep it."""
        if self._pinning is not None:
            self._pinning.drop(segment)
        return self.arena.release(segment)

    def _begin_class(self, segment: int, slot_bytes: int) -> None:
        """Record a segment's class. Old bytes at the new places of magics are zeroed before.

        They can be another class's payload, and a payload may look like a header.
        """
        if self._used[segment]:
            self.arena.set_class(segment, 0)
            self._rows(segment, slot_bytes)[:, :8] = 0
        self._used[segment] = True
        self.arena.set_class(segment, slot_bytes)

    def _rows(self, segment: int, slot_bytes: int) -> Bytes:
        """The slots of a segment, in place: uint8 [slots, slot_bytes]."""
        at = self.arena.segments_at + segment * self.slab.segment_bytes
        slots = self.slab.slots_in_segment(slot_bytes)
        return self._bytes[at : at + slots * slot_bytes].reshape(slots, slot_bytes)

    def _offsets(self, slots: Slots) -> npt.NDArray[np.int64]:
        return self.slab.positions_of(slots, self.arena.segments_at)

    def _offset(self, slot: int) -> int:
        self._refuse_closed()
        start = self.arena.segments_at + self.slab.segment_of(slot) * self.slab.segment_bytes
        return start + self.slab.offset_of(slot)

    def _refuse_closed(self) -> None:
        if self.arena.closed:
            raise ClosedError("the host tier is closed; open the store again")
