"""The engine: requests in, tokens out, one step at a time.

A step takes back pages of finished copies, admits waiting requests, computes one batch, publishes
and saves the blocks that became full, and samples. Before a prompt is computed it is looked for on
the device and then in the store; at least one token is always computed.

The engine belongs to one thread. `abort` may be called between any two steps.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvstore.hashing.chain import chain_function
from kvstore.identity import Identity
from kvstore.planner import Planner
from kvstore.runtime.attention import Batch
from kvstore.runtime.costs import calibrate, observe_step
from kvstore.runtime.models.model import Model
from kvstore.runtime.pages import PagePool
from kvstore.runtime.prefix import Prefixes
from kvstore.runtime.request import FinishReason, Request, RequestError, SamplingParams, State
from kvstore.runtime.scheduler import (
    SEQUENCES_MAX,
    TOKEN_BUDGET,
    WAITING_MAX,
    Admission,
    Scheduler,
    Work,
)
from kvstore.sequence import as_tokens
from kvstore.space import Space
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from kvstore.store import Store

IDLE_WAIT_S = 0.05  # longest wait of a step that can only wait for a load
PAUSE_S = 0.001  # the same, when several are loading
GRACE_S = 0.02  # a load from host memory has its first layer within this, so the step waits for it


class Engine:
    """Serves one model from one pool of pages, with a store behind it or without.

    space: the model's namespace in a store; None for none.
    planner: decides what to load; its costs are measured by this engine.
    device_reuse: share full blocks between requests through the pool.
    token_budget, sequences_max, waiting_max: see scheduler.Scheduler.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        space: Space | None = None,
        planner: Planner | None = None,
        device_reuse: bool = True,
        token_budget: int = TOKEN_BUDGET,
        sequences_max: int = SEQUENCES_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.model = model
        self.pool = pool
        self.planner = planner or Planner()
        self._space = space or _space_without_store(pool)
        device = pool.compute.device if pool.compute is not None else None
        self._store_pool = (
            space.pool(pool.arrays(), pool.page_tokens, device=device) if space else None
        )
        self._prefixes = Prefixes(pool, self._store_pool, self.planner)
        self._device_reuse = device_reuse
        self.scheduler = Scheduler(
            pool,
            self._preempt,
            token_budget=token_budget,
            sequences_max=sequences_max,
            waiting_max=waiting_max,
        )
        self._epoch = self._space.epoch  # of the blocks that can be found on the device
        self._requests = 0
        self._totals = dict.fromkeys(
            ("finished", "aborted", "prompt_tokens", "output_tokens", "failed_loads"), 0
        )
        self._tier_tokens = dict.fromkeys(TierName, 0)
        if self._store_pool is not None:
            calibrate(model, pool, self._store_pool, self.planner)

    # Requests

    def submit(self, prompt: Any, params: SamplingParams | None = None) -> Request:
        """Queue a prompt (token ids; an int32 buffer is the fast way).

        Raises RequestError for one that this engine can never serve, TokenError for tokens of the
        wrong type, QueueFullError when too many are waiting; then nothing was taken.
        """
        params = params or SamplingParams()
        tokens = as_tokens(prompt)
        self._refuse(tokens, params)
        request = Request(
            number=self._requests,
            sequence=self._space.sequence(tokens),
            prompt_tokens=len(tokens),
            params=params,
        )
        self.scheduler.add(request)
        self._requests += 1
        return request

    def _refuse(self, tokens: np.ndarray[Any, np.dtype[np.int32]], params: SamplingParams) -> None:
        config = self.model.config
        if len(tokens) == 0:
            raise RequestError("the prompt is empty; give it at least one token")
        if int(tokens.max()) >= config.vocab_size:
            raise RequestError(
                f"token {int(tokens.max())} is not in the model's 0..{config.vocab_size - 1}; "
                "check the tokenizer"
            )
        longest = len(tokens) + params.max_tokens - 1  # the last token's KV is never needed
        if longest > config.context_length:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} new ones exceed the model's "
                f"context of {config.context_length}; shorten the prompt or lower max_tokens"
            )
        room = self.pool.pages * self.pool.page_tokens
        if longest > room:
            raise RequestError(
                f"{len(tokens)} prompt tokens and {params.max_tokens} new ones exceed the pool of "
                f"{room} tokens; give the runtime more pages, or lower max_tokens"
            )

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is; does nothing to one that ended."""
        if not request.ended:
            self._end(request, State.ABORTED, FinishReason.ABORT)

    def stop(self, request: Request) -> None:
        """End a request as finished, such as at a stop string that the caller met."""
        if not request.ended:
            self._end(request, State.FINISHED, FinishReason.STOP)

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams | None = None
    ) -> list[Request]:
        """Serve prompts together to their end."""
        requests = [self.submit(prompt, params) for prompt in prompts]
        while not all(request.ended for request in requests):
            self.step()
        return requests

    def tokens(self, request: Request) -> Iterator[int]:
        """A request's new tokens as they come, stepping the engine. Aborts it when left early."""
        sent = 0
        try:
            while sent < len(request.output) or not request.ended:
                if sent == len(request.output):
                    self.step()
                else:
                    yield request.output[sent]
                    sent += 1
        finally:
            self.abort(request)

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    # A step

    def step(self) -> bool:
        """Do one step. Returns whether any request is left."""
        self.admit()
        works = self.scheduler.schedule()
        if works:
            self._compute(works)
        else:
            self._wait()
        return bool(self.scheduler.waiting or self.scheduler.running)

    def admit(self) -> None:
        """Start what can be started, and let those run whose loads have come. Computes nothing."""
        self.pool.reap_copies()
        self.scheduler.admit(self._start)
        for request in list(self.scheduler.running):
            if request.state is not State.LOADING or self._prefixes.ready(request):
                continue
            if self._prefixes.late(request):
                self._give_up(request)

    def settle(self) -> None:
        """Wait until no request is loading or waits for another one's load. Computes nothing."""
        self.admit()
        while any(request.state is State.LOADING for request in self.scheduler.running):
            self._wait()
            self.admit()

    def _wait(self) -> None:
        """Nothing can be computed: wait a little for a load, or for pages of a copy."""
        loading = [r for r in self.scheduler.running if r.state is State.LOADING]
        for request in loading:
            if self._prefixes.ready(request, PAUSE_S if len(loading) > 1 else IDLE_WAIT_S):
                return
        if not loading and self.scheduler.waiting:
            self.pool.wait_copies(IDLE_WAIT_S)

    def _start(self, request: Request) -> Admission:
        """Give a request its pages: those of its prefix on the device, and fresh ones."""
        sequence, size = request.sequence, self.pool.page_tokens
        self._follow()
        sequence.renew()
        usable = (sequence.length - 1) // size  # one token is always computed
        shared: list[int] = []
        if self._device_reuse:
            shared = self.pool.find(sequence.keys[:usable], sequence.block_tokens(0, usable))
            if len(shared) < usable and self._join(request, len(shared)):
                return Admission.JOINED
        self.pool.retain(shared)
        need = -(-sequence.length // size) - len(shared)
        # Requests that decode each want a page soon: do not take the last ones from them.
        fresh = None
        if self.pool.available >= need + len(self.scheduler.running):
            fresh = self.pool.allocate(need)
        if fresh is None:
            self.pool.release(shared)
            return Admission.NO_PAGES
        request.pages = shared + fresh
        request.computed, request.offered = len(shared) * size, len(shared)
        if request.first_token is None:
            request.tier_tokens = dict.fromkeys(TierName, 0)
            request.tier_tokens[TierName.DEVICE] = request.computed
        self._prefixes.begin(request)
        if request.state is State.LOADING:
            self._prefixes.ready(request, GRACE_S)
        return Admission.STARTED

    def _follow(self) -> None:
        """Forget the blocks on the device when their namespace was invalidated.

        Requests that run keep their pages to their end, but nobody else gets them.
        """
        epoch = self._space.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self.pool.clear()

    def _join(self, request: Request, block: int) -> bool:
        """Whether another request is bringing or computing this very block already: then wait."""
        key = request.sequence.keys[block].tobytes()
        for other in self.scheduler.running:
            known = other.sequence
            if known.epoch != request.sequence.epoch:
                continue  # What it computes will not be given to others.
            if other.offered <= block < known.blocks and known.keys[block].tobytes() == key:
                if not request.joined:
                    self.planner.joined()
                request.joins, request.joined = (other, block), True
                return True
        return False

    def _compute(self, works: list[Work]) -> None:
        requests = [work.request for work in works]
        batch = self._batch(works)
        hook = self._prefixes.hook(requests)
        started = time.perf_counter()
        logits = self.model.forward(batch, self.pool, hook)
        wanting = [r for r, wanted in zip(requests, batch.wants_logits, strict=True) if wanted]
        tokens = self.model.sample(
            logits, [r.params.sampling for r in wanting], [len(r.output) for r in wanting]
        )
        if hook is None:  # After the choice, for on a device that is when the step is over.
            observe_step(self.planner, works, time.perf_counter() - started)
        chosen = dict(zip(wanting, zip(tokens, logits, strict=True), strict=True))
        now = time.perf_counter()
        for work in works:
            if self._collect(work) and work.request in chosen:
                token, row = chosen[work.request]
                if work.request.params.keep_logits:
                    work.request.logits.append(row.to("cpu", copy=True))
                self._emit(work.request, token, now)

    def _batch(self, works: list[Work]) -> Batch:
        width = max(len(work.request.pages) for work in works)
        tables = np.zeros((len(works), width), np.int64)
        for row, work in enumerate(works):
            tables[row, : len(work.request.pages)] = work.request.pages
        parts = [w.request.sequence.tokens[w.request.computed :][: w.length] for w in works]
        return Batch(
            tokens=torch.from_numpy(np.concatenate(parts).astype(np.int64)),
            starts=[work.request.computed for work in works],
            lengths=[work.length for work in works],
            tables=torch.from_numpy(tables),
            wants_logits=[work.length == work.request.pending for work in works],
        )

    def _collect(self, work: Work) -> bool:
        """Account for a computed chunk. Returns False if what it stood on did not come."""
        request = work.request
        start = request.computed
        if not self._prefixes.settle(request):
            if request.load is not None:
                self._give_up(request)
            return False
        if not request.decoding:
            request.chunks.append((start, work.length))
        request.computed += work.length
        request.recomputed_tokens += max(0, min(request.computed, request.reached) - start)
        request.reached = max(request.reached, request.computed)
        self._offer(request)
        return True

    def _offer(self, request: Request) -> None:
        """Publish on the device, and save, the blocks that became full."""
        full = request.computed // self.pool.page_tokens
        if full <= request.offered:
            return
        request.offered = full
        sequence, pages = request.sequence, request.pages[:full]
        self._follow()
        if self._device_reuse and sequence.epoch == self._epoch:
            self.pool.publish(sequence.keys[:full], sequence.block_tokens(0, full), pages)
        if self._store_pool is not None:
            save = sequence.save(self._store_pool, pages)
            if not save.done:
                self.pool.hold_for(save, pages)

    def _emit(self, request: Request, token: int, now: float) -> None:
        """Give a request its next token, and end it where it is due."""
        request.output.append(token)
        request.sequence.extend([token])
        request.last_token = now
        if request.first_token is None:
            request.first_token = now
        if token in request.params.stop_ids:
            self._end(request, State.FINISHED, FinishReason.STOP)
        elif len(request.output) >= request.params.max_tokens:
            self._end(request, State.FINISHED, FinishReason.LENGTH)

    # Ends

    def _end(self, request: Request, state: State, reason: FinishReason) -> None:
        self.scheduler.remove(request)
        self._take_pages(request)
        request.state, request.finish_reason, request.joins = state, reason, None
        self._totals["finished" if state is State.FINISHED else "aborted"] += 1
        self._totals["prompt_tokens"] += request.prompt_tokens
        self._totals["output_tokens"] += len(request.output)
        self._totals["failed_loads"] += request.failed_loads
        if request.first_token is not None:
            for tier, tokens in request.tier_tokens.items():
                self._tier_tokens[tier] += tokens

    def _preempt(self, request: Request) -> None:
        self._take_pages(request)
        request.state = State.WAITING
        request.preemptions += 1

    def _give_up(self, request: Request) -> None:
        """A load takes too long: start again with other pages, and without asking the store."""
        request.bypass = True
        request.failed_loads += 1
        self.scheduler.put_back(request)

    def _take_pages(self, request: Request) -> None:
        self._prefixes.abandon(request)
        self.pool.release(request.pages)
        request.pages, request.computed, request.offered = [], 0, 0

    # Counters

    def counters(self) -> dict[str, int | float]:
        """Totals over all requests that ended, and the planner's decisions."""
        return {
            **self._totals,
            **{f"tier_tokens.{tier}": tokens for tier, tokens in self._tier_tokens.items()},
            **{f"planner.{name}": value for name, value in self.planner.counters().items()},
            "preemptions": self.scheduler.preemptions,
            "evicted_pages": self.pool.evicted,
        }

    def check_integrity(self) -> None:
        """AssertionError if pages, requests and copies disagree. For tests."""
        self.pool.check_integrity()
        if not self.scheduler.running and not self.pool.copies:
            assert self.pool.in_use == 0, f"{self.pool.in_use} pages are in use by nobody"


def _space_without_store(pool: PagePool) -> Space:
    """Makes the keys of an engine that has no store: lookups and saves are never asked of it."""
    identity = Identity(model="device only", layout=pool.layout, hash="xxh3-128")
    return Space(cast("Store", None), identity, 0, chain_function("xxh3-128"))
