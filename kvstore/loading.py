"""Loading: a found prefix goes into an engine's pages, from host memory and from disk.

Blocks in host memory are copied layer by layer. Blocks on disk are read in waves into host slots,
each block once however many loads want it, verified, copied into the pages of all who wait for it,
and kept in host memory where their parent is there too.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.checking import check_host
from kvstore.cuda.device import Event, Stream
from kvstore.placement import Placement
from kvstore.pool import PagePool
from kvstore.reads import Reads
from kvstore.ticket import Ticket
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.errors import TokenError

LOG = logging.getLogger(__name__)
LOADER_THREADS = 4  # for loads from host memory, and as many for those that need the disk
STEP_BYTES = 8 << 20  # A copy of less is not worth telling anyone.
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LoadResult:
    """What was loaded. The pages of `tokens` tokens, from the prompt's start, are right; no others.

    by_tier, bytes_by_tier: tokens and payload bytes copied, without those the engine held already.
    reason: why the prefix is shorter than the ticket's, or None.
    """

    tokens: int
    by_tier: Mapping[TierName, int]
    bytes_by_tier: Mapping[TierName, int]
    reason: MissReason | None
    seconds: float


class Load:
    """A load under way. The pages may be reused only after `done`.

    Made by `Ticket.load`; a loader's threads drive it.
    """

    def __init__(
        self,
        ticket: Ticket,
        pool: PagePool,
        pages: Longs,
        rows: npt.NDArray[np.int32],
        skip: int,
        partial_tokens: int,
    ) -> None:
        self.ticket = ticket
        self.pool = pool
        self.pages = pages  # of blocks skip..last-1: [n, pages_per_block]
        self.rows = rows  # likewise
        self.skip = skip  # blocks the engine holds wholly
        self.skip_pages = partial_tokens // pool.page_tokens  # of block 0 of `rows`, held too
        self.asked = len(rows)  # blocks the ticket promised from `skip` on
        self.limit = len(rows)  # blocks of `rows` that are good: only ever lowered
        self.reason: MissReason | None = None
        self.from_disk = np.zeros(len(rows), bool)
        self.cancelled = False
        self.pending = 0  # blocks of this load that flights will still copy
        self.started_s = 0.0  # on the store's clock
        self.held = True  # `rows` are held until it ends
        self.ready = pool.copies.ready()  # after it, nobody computes with the pages any more
        self.epoch = 0  # of its namespace, when it began
        self._changed = threading.Condition()
        self._layers = 0
        self._filled: list[
            tuple[int, Event]
        ] = []  # layers, and the event after which they are there
        self._result: LoadResult | None = None

    @property
    def done(self) -> bool:
        """Whether the pages may be reused."""
        return self._result is not None

    def wait_layer(
        self, layer: int, timeout_s: float | None = None, stream: Stream | None = None
    ) -> int:
        """Wait until layer `layer` (in payload order) is in the pages.

        stream: a device's; it waits in our place, and what is queued there next finds the layer.
        Returns: tokens of the prefix that are usable; the same number for every layer.
        Raises TimeoutError when `timeout_s` passes first.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._layers > layer or self._result is not None, timeout_s
            ):
                raise TimeoutError(f"layer {layer} was not loaded within {timeout_s} s")
            filled = next((event for layers, event in self._filled if layers > layer), None)
            tokens = self.tokens()
        if filled is not None and stream is not None:
            stream.wait(filled)
        elif filled is not None:
            filled.wait()
        return tokens

    def result(self, timeout_s: float | None = None) -> LoadResult:
        """Wait for the end. Raises TimeoutError when `timeout_s` passes first; the load goes on.

        Returns: a LoadResult.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, timeout_s)
            if self._result is None:
                raise TimeoutError(f"the load was not done within {timeout_s} s; pages are in use")
            return self._result

    def cancel(self) -> None:
        """Start nothing more. What is under way ends; wait for `done` before reusing pages."""
        self.cancelled = True

    def tokens(self) -> int:
        """Tokens of the prefix that are usable, from what is known so far."""
        held = self.skip * self.pool.layout.block_tokens + self.skip_pages * self.pool.page_tokens
        return max(held, (self.skip + self.limit) * self.pool.layout.block_tokens)

    def copy(
        self, block: int, payloads: npt.NDArray[np.uint64], runs: tuple[int, int | None]
    ) -> Event | None:
        """Fill the pages of blocks `block`.. of `rows` from payloads, for a range of runs.

        Returns: None, they are filled | the event after which they are.
        """
        pages = self.pages[block : block + len(payloads)]
        skip_pages = self.skip_pages if block == 0 else 0
        return self.pool.fill(pages, payloads, runs[0], runs[1], skip_pages, self.ready)

    # What follows is for the loader's threads.

    def cut(self, block: int, reason: MissReason) -> None:
        """Blocks from `block` (of `rows`) on are not usable."""
        with self._changed:
            if block < self.limit:
                self.limit, self.reason = block, reason

    def flights_ended(self, blocks: int) -> None:
        """So many of the blocks that flights copy have been copied, or have failed."""
        with self._changed:
            self.pending -= blocks
            if self.pending == 0:
                self._changed.notify_all()

    def expect_flight(self) -> None:
        """One more block will be copied by a flight."""
        with self._changed:
            self.pending += 1

    def wait_flights(self) -> None:
        """Wait until no flight has anything to copy for this load."""
        with self._changed:
            self._changed.wait_for(lambda: self.pending == 0)

    def layer_ready(self, layers: int, filled: Event | None) -> None:
        """The first `layers` layers of all usable blocks are in the pages, after `filled`."""
        with self._changed:
            self._layers = layers
            if filled is not None:
                self._filled.append((layers, filled))
            self._changed.notify_all()

    def wait_filled(self) -> None:
        """Wait until the device has filled all pages: only then may slots and pages be reused."""
        for _, filled in self._filled:
            filled.wait()

    def end(self, result: LoadResult) -> None:
        """Called once, at the end."""
        with self._changed:
            self._result = result
            self._changed.notify_all()


Queue = queue.Queue["Load | None"]


class Loader:
    """The threads that run loads; without `threads` whoever calls `step`. The queues are bounded.

    Loads that need the disk have threads of their own, and the others never wait behind them: a
    device that stalls holds up only what it holds.
    """

    def __init__(
        self, placement: Placement, disks: Executor, load_queue: int, *, threads: bool = True
    ) -> None:
        """load_queue: loads of either kind that may wait."""
        self._placement = placement
        self._reads = Reads(placement, disks, waits=threads) if placement.disk is not None else None
        self._queues: dict[TierName, Queue] = {TierName.HOST: queue.Queue(load_queue)}
        if placement.disk is not None:
            self._queues[TierName.DISK] = queue.Queue(load_queue)
        self._closing = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(tier,), name=f"kvstore-load-{tier}-{n}")
            for tier in self._queues
            for n in range(LOADER_THREADS if threads else 0)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def submit(self, load: Load) -> bool:
        """Queue a load whose rows are held. Returns False if it is full, or closed."""
        with self._placement.lock:
            slots = self._placement.index.slots(TierName.HOST, load.rows[: load.limit])
        tier = TierName.DISK if (slots < 0).any() else TierName.HOST
        with self._closing:
            if self._closed:
                return False
            try:
                self._queues.get(tier, self._queues[TierName.HOST]).put_nowait(load)
            except queue.Full:
                return False
        return True

    def close(self) -> None:
        """Finish what is queued and stop."""
        with self._closing:
            self._closed = True
        for waiting in self._queues.values():
            for _ in range(len(self._threads) // len(self._queues)):
                waiting.put(None)
        for thread in self._threads:
            thread.join()
        while self.step():
            pass

    def step(self) -> bool:
        """Run the next load. Returns: whether there was one."""
        for waiting in self._queues.values():
            with suppress(queue.Empty):
                load = waiting.get_nowait()
                if load is not None:
                    self._end_to_end(load)
                    return True
        return False

    def _run(self, tier: TierName) -> None:
        while (load := self._queues[tier].get()) is not None:
            self._end_to_end(load)

    def _end_to_end(self, load: Load) -> None:
        try:
            self._load(load)
        except Exception:
            # Whatever it was: no page counts as loaded, and this thread serves the next load.
            LOG.exception("a load failed")
            load.cut(0, MissReason.IO_ERROR)
            load.wait_flights()
            self._wait_filled(load)
        finally:
            self.finish(load)

    @staticmethod
    def _wait_filled(load: Load) -> None:
        """After a failure: what was queued on a device still touches pages and slots."""
        try:
            load.wait_filled()
        except Exception:
            LOG.exception("the device failed too")

    def _load(self, load: Load) -> None:
        if load.cancelled:
            load.cut(0, MissReason.EXPIRED)
            return
        placement = self._placement
        with placement.lock:
            load.limit = min(load.limit, placement.visible_prefix(load.rows))
            if load.limit < len(load.rows):
                load.reason = MissReason.INVALIDATED
            slots = placement.index.slots(TierName.HOST, load.rows[: load.limit])
        in_host = int(np.argmin(slots >= 0)) if (slots < 0).any() else len(slots)
        if self._reads is not None and in_host < load.limit:
            self._reads.run(load, in_host)
        self._verify(load, slots[:in_host])
        load.wait_flights()
        self._copy_layers(load, slots[: min(in_host, load.limit)])

    def _verify(self, load: Load, slots: Longs) -> None:
        """Check blocks of a taken-over arena on their first read."""
        placement = self._placement
        unverified = placement.unverified(load.rows[: len(slots)])
        for block in unverified.tolist():
            fault = check_host(
                placement,
                load.ticket.sequence,
                load.skip + block,
                int(load.rows[block]),
                int(slots[block]),
            )
            if fault is None:
                placement.mark_verified(int(load.rows[block]))
                continue
            if self._cut_invalidated(load) and block >= load.limit:
                break  # Nothing was wrong with it: it left while it was looked at.
            load.cut(block, fault)
            placement.drop_bad(int(load.rows[block]), TierName.HOST)
            break

    def _copy_layers(self, load: Load, slots: Longs) -> None:
        """Host memory to pages, layer after layer; small layers go several at a time."""
        layout = load.pool.layout
        record = load.ticket.sequence.space.record
        payloads = self._placement.host.payload_addresses(slots, record.header_bytes)
        layer_bytes = len(slots) * layout.payload_bytes // layout.layers
        step = max(1, STEP_BYTES // max(1, layer_bytes))
        for first in range(0, layout.layers, step):
            last = min(first + step, layout.layers)
            runs = (layout.layer_runs[first][0], layout.layer_runs[last - 1][1])
            load.layer_ready(last, load.copy(0, payloads, runs))
        load.wait_filled()

    def _cut_invalidated(self, load: Load) -> bool:
        """End a load where its first block was invalidated since it began. Returns: whether."""
        placement = self._placement
        with placement.lock:
            if load.epoch == placement.epochs[load.ticket.sequence.space.number]:
                return False
            limit = placement.visible_prefix(load.rows[: load.limit])
        cut = limit < load.limit
        load.cut(limit, MissReason.INVALIDATED)
        return cut

    def finish(self, load: Load) -> None:
        """End a load: give its holds back, count it, and publish its result."""
        placement = self._placement
        with placement.lock:
            self._cut_invalidated(load)
            if load.held:
                placement.unhold(load.rows)
        disk = int(load.from_disk[: load.limit].sum())
        blocks = {TierName.HOST: load.limit - disk, TierName.DISK: disk}
        layout = load.pool.layout
        result = LoadResult(
            tokens=load.tokens(),
            by_tier={tier: count * layout.block_tokens for tier, count in blocks.items()},
            bytes_by_tier={tier: count * layout.payload_bytes for tier, count in blocks.items()},
            reason=load.reason,
            seconds=placement.clock.monotonic() - load.started_s,
        )
        placement.count_load(load.ticket.sequence, load.skip, load.from_disk[: load.limit], result)
        if load.reason is not None:
            first = load.skip + load.limit
            placement.count_misses(load.ticket.sequence, first, load.skip + load.asked, load.reason)
        load.end(result)


def refuse_parts(skip: int, stop: int, block_tokens: int, page_tokens: int) -> None:
    """Raise TokenError where a load would begin inside a page or end inside a block."""
    if skip < 0 or (skip < stop and skip % page_tokens):
        raise TokenError(
            f"skip_tokens={skip} is not a whole number of pages of {page_tokens} tokens; "
            "give what the engine holds in full pages"
        )
    if stop < 0 or stop % block_tokens:
        raise TokenError(
            f"stop_tokens={stop} is not a whole number of blocks of {block_tokens} tokens; "
            "round it down"
        )
