"""What a request need not compute: blocks that the store brings into its pages.

    begin    look up what the store has beyond the device's prefix, plan, start the load
    ready    the load's first layer has landed: the request may take part in a step
    hook     called by the model before each layer: waits until that layer has landed
    settle   after the step: the load is over; count it and learn from it
    abandon  the request goes away; its pages stay taken until the copy is done

A load that fails ends the prefix where it failed, and the engine computes the rest.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.planner import Planner
from kvstore.pool import PagePool as StorePool
from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import Request, State
from kvstore.ticket import Ticket
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from kvstore.loading import Load

PATIENCE = 10.0  # a load may take this many times what the plan said, and PATIENCE_MIN_S
PATIENCE_MIN_S = 2.0
SERVED = (TierName.HOST, TierName.DISK)  # in the order of a prefix: host holds its first blocks


class Prefixes:
    """Loads of one engine. Belongs to the engine's thread.

    pool: the engine's pages; store_pool: the same as the store sees them, None without a store.
    """

    def __init__(self, pool: PagePool, store_pool: StorePool | None, planner: Planner) -> None:
        self._pool = pool
        self._store_pool = store_pool
        self._planner = planner
        # Attention over layer 0 may start while layer 1 is on its way, if somebody else moves it.
        # Pages in host memory are filled by the very cores that compute: there the step waits for
        # the whole load, for a step that is interrupted costs more than the copy.
        self._start_at = len(pool.keys) - 1 if pool.compute is None else 0
        # There the device's stream waits for a layer, and this thread goes on queueing.
        self._stream = pool.compute.stream if pool.compute is not None else None

    def begin(self, request: Request) -> None:
        """Start what is worth loading beyond `request.computed`; now it is LOADING or RUNNING."""
        request.state = State.RUNNING
        request.sound = request.computed
        if self._store_pool is not None and not request.bypass:
            self._plan(request, self._store_pool, probed=False)

    def _plan(self, request: Request, store_pool: StorePool, probed: bool) -> None:
        have, size = request.computed, self._pool.page_tokens
        ticket = request.sequence.lookup(skip_tokens=have)
        plan = self._planner.plan(
            have=have,
            total=request.sequence.length,
            spans=_spans(ticket, have, size),
            block_tokens=size,
            block_bytes=self._pool.layout.payload_bytes,
            probed=probed,
        )
        if plan.tokens <= have:
            ticket.release()
            return
        pages = request.pages[: plan.tokens // size]
        load = ticket.load(
            store_pool, pages, skip_tokens=have, stop_tokens=plan.tokens, probe=plan.again
        )
        self._pool.hold_for(load, pages[have // size :])
        request.load = load
        request.probing = plan.again
        request.state = State.LOADING
        request.patience_s = PATIENCE_MIN_S + PATIENCE * plan.load_s
        request.load_until = time.perf_counter() + request.patience_s

    def ready(self, request: Request, timeout_s: float = 0.0) -> bool:
        """Whether a LOADING request may run now; waits for it up to `timeout_s`."""
        load = request.load
        assert load is not None and self._store_pool is not None
        try:
            if request.probing:
                load.result(timeout_s)
            else:
                request.computed = max(request.sound, load.wait_layer(self._start_at, timeout_s))
        except TimeoutError:
            return False
        request.state = State.RUNNING
        if request.probing:
            self.settle(request)
            if request.computed == _asked(load, self._pool.page_tokens):
                self._plan(request, self._store_pool, probed=True)
                return request.load is None or self.ready(request, timeout_s)
        return True

    def late(self, request: Request) -> bool:
        """Whether a LOADING request has waited longer than a load can reasonably take."""
        return time.perf_counter() > request.load_until

    def hook(self, requests: Sequence[Request]) -> Callable[[int], None] | None:
        """What the model calls before each layer; None when no request of the step is loading."""
        loading = [r for r in requests if r.load is not None and not r.load.done]
        if not loading:
            return None

        def before_layer(layer: int) -> None:
            for request in loading:
                try:
                    assert request.load is not None
                    request.load.wait_layer(layer, request.patience_s, self._stream)
                except TimeoutError:
                    request.stalled = True

        return before_layer

    def settle(self, request: Request) -> bool:
        """End a request's load after a step that used it.

        Returns False when less was loaded than the step believed: what it computed is void, and
        `computed` is back at the end of what is sound.
        """
        load, believed = request.load, request.computed
        if load is None:
            return True
        if request.stalled and not load.done:
            return False
        try:
            result = load.result(request.patience_s)
        except TimeoutError:
            request.stalled = True
            return False
        request.load, request.probing = None, False
        request.sound = request.computed = max(request.sound, result.tokens)
        size = self._pool.page_tokens
        blocks = {str(tier): result.by_tier.get(tier, 0) // size for tier in SERVED}
        moved = {str(tier): result.bytes_by_tier.get(tier, 0) for tier in SERVED}
        self._planner.observe_load(moved, blocks, result.seconds)
        for tier in SERVED:
            request.bytes_moved[tier] += moved[tier]
            if request.first_token is None:
                request.tier_tokens[tier] += result.by_tier.get(tier, 0)
        request.failed_loads += request.computed < _asked(load, size)
        return request.computed >= believed

    def abandon(self, request: Request) -> None:
        """Forget a request's load. The pool keeps its pages until the copy is done."""
        if request.load is not None:
            request.load.cancel()
        request.load, request.probing, request.stalled = None, False, False


def _spans(ticket: Ticket, have: int, page_tokens: int) -> list[tuple[str, int]]:
    """(tier, blocks) of what a ticket has beyond the first `have` tokens, in the prompt's order."""
    spans, skip = [], have
    for tier in SERVED:
        tokens = ticket.by_tier.get(tier, 0)
        spans.append((str(tier), max(0, tokens - skip) // page_tokens))
        skip = max(0, skip - tokens)
    return spans


def _asked(load: "Load", page_tokens: int) -> int:
    """Tokens of the prefix that a load was to bring the pages to."""
    return (load.skip + load.asked) * page_tokens
