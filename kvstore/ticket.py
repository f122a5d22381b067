"""The answer to a lookup: the longest stored prefix, kept by leases that expire."""

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.clock import Clock
from kvstore.tiers.base import MissReason, TierName

if TYPE_CHECKING:
    from kvstore.loading import Load
    from kvstore.pool import PagePool
    from kvstore.sequence import Sequence
    from kvstore.store import Store

SWEEP_MIN = 1024


@dataclass
class Lease:
    """Rows that may not move while it is live: until a load, a release, or its deadline."""

    rows: npt.NDArray[np.int32]
    live: bool = True


class Ticket:
    """What the store has of a sequence's prefix. Give it back with `release` or `with`.

    blocks, tokens: length of the stored prefix; at least one token is always left to compute.
    by_tier: its tokens by the tier that would serve them.
    misses: tokens of whole blocks that were asked for and not found, by reason.
    """

    def __init__(
        self,
        store: "Store",
        sequence: "Sequence",
        rows: npt.NDArray[np.int32],
        generations: npt.NDArray[np.uint32],
        by_tier: Mapping[TierName, int],
        misses: Mapping[MissReason, int],
        skip_tokens: int,
        lease: "Lease",
    ) -> None:
        self._store = store
        self.sequence = sequence
        self.rows = rows
        self.generations = generations
        self.blocks = len(rows)
        self.tokens = len(rows) * sequence.space.layout.block_tokens
        self.by_tier = by_tier
        self.misses = misses
        self.skip_tokens = skip_tokens
        self.lease = lease

    def load(
        self,
        pool: "PagePool",
        page_ids: Any,
        *,
        skip_tokens: int | None = None,
        stop_tokens: int | None = None,
        probe: bool = False,
    ) -> "Load":
        """Copy the prefix into the engine's pages, asynchronously: see loading.Load.

        page_ids: the block table; page j takes tokens j * page_tokens and on.
        skip_tokens: tokens the engine holds already, a whole number of pages; their pages are not
        touched. Those given to `lookup` unless told.
        stop_tokens: load only this much of the prefix, a whole number of blocks; the rest counts as
        declined, unless this is a probe, after which the rest will be asked for again.
        """
        return self._store.load(self, pool, page_ids, skip_tokens, stop_tokens, probe)

    def release(self) -> None:
        """Give the leases back; what was found counts as declined. Nothing after a load."""
        self._store.release(self)

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """Deadlines of leases, so that a lookup that never loads gives everything back. The store's
    lock guards it.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Lease]] = []
        self._sweep_at = SWEEP_MIN

    def add(self, rows: npt.NDArray[np.int32]) -> Lease:
        """Note the deadline of rows that were just leased."""
        lease = Lease(rows)
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(
            self._heap, (self._clock.monotonic() + self.lease_s, next(self._order), lease)
        )
        return lease

    def expired(self) -> list[npt.NDArray[np.int32]]:
        """Rows of the leases whose time is over, each once; they are not live any more."""
        now, over = self._clock.monotonic(), []
        while self._heap and (self._heap[0][0] <= now or not self._heap[0][2].live):
            lease = heapq.heappop(self._heap)[2]
            if lease.live:
                lease.live = False
                over.append(lease.rows)
        return over

    def __len__(self) -> int:
        """How many are noted; those that ended count until they are swept out."""
        return len(self._heap)

    def _sweep(self) -> None:
        """Forget what ended before its deadline, so that memory follows the leases that live."""
        self._heap = [entry for entry in self._heap if entry[2].live]
        heapq.heapify(self._heap)
        self._sweep_at = max(SWEEP_MIN, 2 * len(self._heap))
