"""Which tokens the next step computes: continuous batching with chunked prefill.

Requests are served in the order they came. Every running request that decodes gets its one token
first; what is left of the token budget goes to prefill, oldest first. A request is admitted when
its whole prompt has pages, so only decoding can run out of them; then the youngest request gives
way: it loses its pages, keeps its tokens, and waits at the front of the queue.

The scheduler knows pages and requests, and nothing of models, tokens' values or the store.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import QueueFullError, Request, State
from kvstore.tiers.errors import ConfigError

TOKEN_BUDGET = 512
SEQUENCES_MAX = 32
WAITING_MAX = 1024


class Admission(Enum):
    """What became of an attempt to start a request."""

    STARTED = auto()  # it has its pages
    JOINED = auto()  # it waits for a block that another request is producing
    NO_PAGES = auto()  # it waits for pages, and all behind it wait too


@dataclass(frozen=True)
class Work:
    """The next `length` tokens of a request are computed in this step."""

    request: Request
    length: int


class Scheduler:
    """Queues and budgets. Belongs to the engine's thread.

    token_budget: tokens a step computes at most. sequences_max: requests that hold pages at once.
    waiting_max: length of the waiting queue; preempted requests may exceed it.
    preempt: called to take a request's pages away; the engine ends its copies.
    """

    def __init__(
        self,
        pool: PagePool,
        preempt: Callable[[Request], None],
        *,
        token_budget: int = TOKEN_BUDGET,
        sequences_max: int = SEQUENCES_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        for name, value in (
            ("token_budget", token_budget),
            ("sequences_max", sequences_max),
            ("waiting_max", waiting_max),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if token_budget < sequences_max:
            raise ConfigError("token_budget is below sequences_max; every sequence needs a token")
        self._pool = pool
        self._preempt = preempt
        self.token_budget = token_budget
        self.sequences_max = sequences_max
        self.waiting_max = waiting_max
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by age; holds pages, LOADING or RUNNING
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a new request. Raises QueueFullError, and takes nothing, when the queue is full."""
        if len(self.waiting) >= self.waiting_max:
            raise QueueFullError(
                f"{self.waiting_max} requests are waiting already; submit again when some are done"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that ended, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def admit(self, start: Callable[[Request], Admission]) -> None:
        """Start waiting requests, oldest first, until one finds no pages.

        A request that joins another one's work lets those behind it pass: it needs no pages yet.
        """
        passed: list[Request] = []
        while self.waiting and len(self.running) < self.sequences_max:
            request = self.waiting.popleft()
            outcome = Admission.JOINED if _joins(request) else start(request)
            if outcome is Admission.STARTED:
                insort(self.running, request, key=lambda other: other.number)
                continue
            passed.append(request)
            if outcome is Admission.NO_PAGES:
                break
        self.waiting.extendleft(reversed(passed))

    def schedule(self) -> list[Work]:
        """The next step's work, decoding first, with pages for all of it; may be empty."""
        budget, works = self.token_budget, []
        for request in list(self.running):
            if request.state is State.RUNNING and request.decoding and self._has_page(request):
                works.append(Work(request, 1))
                budget -= 1
        for request in self.running:
            if request.state is State.RUNNING and not request.decoding and budget > 0:
                length = self._chunk(request, budget)
                works.append(Work(request, length))
                budget -= length
        return works

    def _chunk(self, request: Request, budget: int) -> int:
        """How much of a prefill to compute. Chunks end at blocks, where prefixes are cut too."""
        end = request.computed + min(request.pending, budget)
        if end < request.sequence.length:
            aligned = end - end % self._pool.page_tokens
            end = aligned if aligned > request.computed else end
        for cut in request.params.cuts:
            if request.computed < cut < end:
                end = cut
        return end - request.computed

    def _has_page(self, request: Request) -> bool:
        """Make room for one more token; younger requests give way, or the request itself."""
        while len(request.pages) * self._pool.page_tokens <= request.computed:
            page = self._pool.allocate(1)
            if page is not None:
                request.pages += page
            elif not self._pool.wait_copies():
                victim = self.running[-1]
                self.put_back(victim)
                if victim is request:
                    return False
        return request.state is State.RUNNING

    def put_back(self, request: Request) -> None:
        """Take a running request's pages away and let it wait at the front of the queue."""
        self.running.remove(request)
        self._preempt(request)
        self.preemptions += 1
        self.waiting.appendleft(request)


def _joins(request: Request) -> bool:
    """Whether the block that a request waits for is still being produced."""
    if request.joins is None:
        return False
    other, block = request.joins
    if other.state in (State.LOADING, State.RUNNING) and other.offered <= block:
        return True
    request.joins = None
    return False
