"""Saving: full blocks go from an engine's pages into host memory, asynchronously and root-first.

One thread does all saves in the order they were asked, so two requests that computed the same
prefix never write it twice, and a block's parent is always there before the block.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.cuda.device import Event
from kvstore.media import media_of
from kvstore.placement import Placement
from kvstore.pool import PagePool
from kvstore.save_placement import SavePlacement
from kvstore.sequence import Sequence
from kvstore.tiers.base import SaveDrop
from kvstore.tiers.failpoints import reach

LOG = logging.getLogger(__name__)
CHUNK_BLOCKS = 64


@dataclass(frozen=True)
class SaveResult:
    """What became of a save, in blocks: every block asked for is under exactly one of the three."""

    saved: int
    present: int
    dropped: Mapping[SaveDrop, int]
    seconds: float


class Save:
    """A save under way. Its pages may be reused only after `done`."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result = SaveResult(0, 0, {}, 0.0)

    @property
    def done(self) -> bool:
        """Whether the pages may be reused."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the end. Raises TimeoutError when `timeout_s` passes first; the save goes on.

        Returns: a SaveResult.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save was not done within {timeout_s} s; its pages are in use")
        return self._result

    def finish(self, result: SaveResult) -> None:
        """Called once, by the saver."""
        self._result = result
        self._done.set()


@dataclass
class Job:
    """Blocks first..last-1 of a sequence, from these pages."""

    sequence: Sequence
    pool: PagePool
    pages: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint8]
    first: int
    last: int
    save: Save
    epoch: int  # of the sequence: under another one, nothing of it is saved
    ready: Event | None  # after it, the pages hold what the engine had computed
    saved: int = 0
    present: int = 0
    dropped: Counter[SaveDrop] = field(default_factory=Counter)


class Saver:
    """The thread that copies pages into host memory. Without `threads` whoever calls `step` is."""

    def __init__(self, placement: Placement, queue_blocks: int, *, threads: bool = True) -> None:
        self._placement = placement
        self._places = SavePlacement(placement)
        self._queue_blocks = queue_blocks
        self._jobs: deque[Job] = deque()
        self._waiting_blocks = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if threads:
            self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
            self._thread.start()

    def submit(self, sequence: Sequence, pool: PagePool, pages: npt.NDArray[np.int64]) -> Save:
        """Queue the blocks of `pages` ([blocks, pages_per_block]); never waits.

        A full queue drops the blocks and counts them.
        """
        save = Save()
        first, last = sequence.saved_blocks, len(pages)
        ready = pool.copies.ready() if last > first else None
        job = Job(sequence, pool, pages, sequence.keys, first, last, save, sequence.epoch, ready)
        with self._changed:
            blocks = max(0, last - first)
            drop = None
            if self._closed:
                drop = SaveDrop.CLOSED
            elif self._waiting_blocks + blocks > self._queue_blocks:
                drop = SaveDrop.QUEUE_FULL
            if drop is None and blocks:
                self._jobs.append(job)
                self._waiting_blocks += blocks
                self._changed.notify_all()
                return save
        if drop is not None:
            job.dropped[drop] += blocks
        self._finish(job, 0.0)
        return save

    def drain(self) -> None:
        """Wait until every save asked for so far is done."""
        while self._thread is None and self.step():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        """Finish what is queued and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.drain()

    def step(self, wait: bool = False) -> bool:
        """Do the next save; `wait` for one if there is none.

        Returns: whether there was one. With `wait` False means that the saver was closed.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return False
            job = self._jobs.popleft()
            self._busy = True
        started = self._placement.clock.monotonic()
        try:
            self._save(job)
        except Exception:
            # Whatever it was, most likely memory: this thread serves the next save.
            LOG.exception("a save failed")
            left = job.last - job.first - job.saved - job.present - job.dropped.total()
            job.dropped[SaveDrop.HOST_FULL] += max(0, left)
        finally:
            self._finish(job, self._placement.clock.monotonic() - started)
            with self._changed:
                self._busy = False
                self._waiting_blocks -= job.last - job.first
                self._changed.notify_all()
        return True

    def _run(self) -> None:
        while self.step(wait=True):
            pass

    def _save(self, job: Job) -> None:
        placement, sequence = self._placement, job.sequence
        with placement.lock:
            at = sequence.saved_blocks
            if at and not self._places.is_tail(sequence.tail):
                # An ancestor left host memory. The whole table is at hand, so save all of it again.
                at = 0
        # What an earlier save of this sequence has brought since this one was asked for.
        job.present += max(0, min(at, job.last) - job.first)
        while at < job.last:
            end = min(at + CHUNK_BLOCKS, job.last)
            if not self._save_chunk(job, at, end):
                break
            at = end

    def _save_chunk(self, job: Job, first: int, last: int) -> bool:
        """Save blocks first..last-1. Returns whether the blocks after them can follow."""
        placement, sequence = self._placement, job.sequence
        with placement.lock:
            if self._is_void(job):
                return self._drop_rest(job, first)
            plan = self._places.plan(sequence, job.keys, first, last)
        job.present += plan.present
        todo = plan.last - plan.first
        headers = None
        if todo:
            try:
                headers = self._copy(job, plan.first, plan.last, plan.slots, plan.generations)
                reach("save.copied")
            except BaseException:
                with placement.lock:
                    self._places.abandon(plan)
                raise
        with placement.lock:
            # Under one lock with the invalidation, so that not even a killed owner leaves a block
            # in its arena that was invalidated before it was whole.
            if self._is_void(job):
                self._places.abandon(plan)
                return self._drop_rest(job, plan.first)
            if headers is not None:
                try:
                    placement.host.publish(plan.slots, headers)
                    reach("save.published")
                except BaseException:
                    self._places.abandon(plan)
                    raise
            saved = self._places.publish(sequence, job.keys, plan)
        reach("save.indexed")
        job.saved += saved
        missing = last - plan.last + (todo - saved)
        if missing:
            job.dropped[plan.drop or SaveDrop.PARENT_GONE] += last - plan.last + (todo - saved)
            job.dropped[plan.drop or SaveDrop.HOST_FULL] += job.last - last
        return not missing

    def _is_void(self, job: Job) -> bool:
        """Whether the job's namespace was invalidated since its sequence began. Under the lock."""
        return job.epoch != self._placement.epochs[job.sequence.space.number]

    @staticmethod
    def _drop_rest(job: Job, first: int) -> bool:
        job.dropped[SaveDrop.INVALIDATED] += job.last - first
        return False

    def _copy(
        self,
        job: Job,
        first: int,
        last: int,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.uint8]:
        """Copy pages into the slots' payloads and return the sealed headers."""
        space = job.sequence.space
        record, keys = space.record, job.keys
        parents = np.empty((last - first, 16), np.uint8)
        parents[0] = np.frombuffer(space.root, np.uint8) if first == 0 else keys[first - 1]
        parents[1:] = keys[first : last - 1]
        headers = record.build(
            keys=keys[first:last],
            parents=parents,
            namespace=space.digest,
            first_depth=first,
            first_generation=0,
            tokens=job.sequence.block_tokens(first, last),
            created_s=int(self._placement.clock.time()),
        )
        record.fixed(headers)["generation"] = generations
        for at, digest in (media_of(job.sequence, first, last) or {}).items():
            headers[at, 96:128] = np.frombuffer(digest, np.uint8)
        sums = np.empty((last - first, record.runs), np.uint64)
        payloads = self._placement.host.payload_addresses(slots, record.header_bytes)
        job.pool.copies.gather(job.pages[first:last], payloads, sums, job.ready)
        record.checksums(headers)[:] = sums
        record.seal(headers)
        return headers

    def _finish(self, job: Job, seconds: float) -> None:
        counters = self._placement.counters
        if job.saved:
            counters.add("saved_blocks", job.saved)
            counters.add("saved_bytes", job.saved * job.sequence.space.layout.payload_bytes)
        if job.present:
            counters.add(f"save_drops.{SaveDrop.PRESENT}", job.present)
        for reason, blocks in job.dropped.items():
            counters.add(f"save_drops.{reason}", blocks)
        job.save.finish(SaveResult(job.saved, job.present, dict(job.dropped), seconds))
