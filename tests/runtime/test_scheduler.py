"""The scheduler: who computes what in the next step, and who gives way when pages run out."""

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.hashing.chain import chain_function
from kvstore.identity import Identity
from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import QueueFullError, Request, SamplingParams, State
from kvstore.runtime.scheduler import Admission, Scheduler
from kvstore.space import Space
from kvstore.tiers.errors import ConfigError

SIZE = 4


class Rig:
    """A scheduler over real pages and requests; computing a step only moves counters."""

    def __init__(self, pages: int, **limits: int) -> None:
        self.pool = PagePool(layers=1, kv_heads=1, head_dim=8, pages=pages, page_tokens=SIZE)
        limits = {"token_budget": 64, "sequences_max": 8} | limits
        self.scheduler = Scheduler(self.pool, self._preempt, **limits)
        identity = Identity(model="none", layout=self.pool.layout, hash="xxh3-128")
        self._space = Space(None, identity, 0, chain_function("xxh3-128"))  # type: ignore[arg-type]
        self._count = 0

    def add(self, tokens: int, cuts: tuple[int, ...] = ()) -> Request:
        request = Request(
            number=self._count,
            sequence=self._space.sequence(np.arange(tokens, dtype=np.int32)),
            prompt_tokens=tokens,
            params=SamplingParams(cuts=cuts),
        )
        self._count += 1
        self.scheduler.add(request)
        return request

    def start(self, request: Request) -> Admission:
        pages = self.pool.allocate(-(-request.sequence.length // SIZE))
        if pages is None:
            return Admission.NO_PAGES
        request.pages, request.state = pages, State.RUNNING
        return Admission.STARTED

    def _preempt(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.computed, request.state = [], 0, State.WAITING

    def step(self, start: Callable[[Request], Admission] | None = None) -> dict[int, int]:
        """One step; returns how many tokens of each request it computed."""
        self.scheduler.admit(start or self.start)
        done = {}
        for work in self.scheduler.schedule():
            request = work.request
            assert len(request.pages) * SIZE >= request.computed + work.length
            request.computed += work.length
            done[request.number] = work.length
            if request.pending == 0:
                request.output.append(1)
                request.sequence.extend([1])
        return done

    def finish(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.state = State.FINISHED
        self.scheduler.remove(request)


def test_a_prompt_is_computed_in_chunks_that_end_at_blocks() -> None:
    rig = Rig(32, token_budget=10)
    rig.add(27)
    assert [rig.step() for _ in range(5)] == [{0: 8}, {0: 8}, {0: 8}, {0: 3}, {0: 1}]


def test_a_budget_below_a_block_still_makes_progress() -> None:
    rig = Rig(32, token_budget=3, sequences_max=1)
    rig.add(8)
    assert [rig.step() for _ in range(3)] == [{0: 3}, {0: 1}, {0: 3}]


def test_decoding_comes_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    rig = Rig(64, token_budget=18)
    rig.add(2)
    rig.add(2)
    assert rig.step() == {0: 2, 1: 2}
    rig.add(40)
    rig.add(5)
    assert rig.step() == {0: 1, 1: 1, 2: 16}
    assert rig.step() == {0: 1, 1: 1, 2: 16}
    assert rig.step() == {0: 1, 1: 1, 2: 8, 3: 5}


def test_cuts_end_a_chunk_wherever_the_caller_wants() -> None:
    rig = Rig(32)
    rig.add(30, cuts=(7, 8, 22))
    assert [rig.step()[0] for _ in range(5)] == [7, 1, 14, 8, 1]


def test_requests_start_in_the_order_they_came() -> None:
    rig = Rig(10)
    first, large, small = rig.add(20), rig.add(32), rig.add(4)
    assert rig.step() == {0: 20}
    # The large one finds no pages; the small one would, and must not overtake it.
    assert rig.step() == {0: 1}
    assert (large.state, small.state) == (State.WAITING, State.WAITING)
    rig.finish(first)
    assert rig.step() == {1: 32, 2: 4}


def test_no_more_sequences_at_once_than_allowed() -> None:
    rig = Rig(32, sequences_max=2)
    requests = [rig.add(4) for _ in range(3)]
    assert rig.step() == {0: 4, 1: 4}
    rig.finish(requests[0])
    assert rig.step() == {1: 1, 2: 4}


def test_the_youngest_gives_way_and_keeps_its_tokens_and_its_turn() -> None:
    rig = Rig(4)
    old, young, waiting = rig.add(8), rig.add(7), rig.add(4)
    assert rig.step() == {0: 8, 1: 7}
    assert rig.step() == {0: 1}  # the old one needs a third page, so the young one left
    assert young.state is State.WAITING and young.pages == [] and young.output == [1]
    assert list(rig.scheduler.waiting) == [young, waiting]
    assert rig.scheduler.preemptions == 1
    rig.finish(old)
    assert rig.step() == {1: 8, 2: 4}  # its seven prompt tokens and the one it had generated


def test_a_request_may_have_to_give_way_itself() -> None:
    rig = Rig(3)
    old, young = rig.add(4), rig.add(8)
    assert rig.step() == {0: 4, 1: 8}
    rig.pool.retain(young.pages)  # somebody else keeps them, so taking them does not help
    assert rig.step() == {}
    assert old.state is State.WAITING and young.state is State.WAITING
    assert list(rig.scheduler.waiting) == [old, young]


def test_a_request_that_joins_another_lets_those_behind_it_pass() -> None:
    rig = Rig(32)
    leader, joiner, other = rig.add(8), rig.add(8), rig.add(4)
    asked: list[int] = []

    def start(request: Request) -> Admission:
        asked.append(request.number)
        if request is joiner and leader.offered < 1:
            request.joins = (leader, 0)
            return Admission.JOINED
        return rig.start(request)

    assert rig.step(start) == {0: 8, 2: 4}
    assert rig.step(start) == {0: 1, 2: 1}
    assert asked == [0, 1, 2]  # while it waits it is not even asked again
    leader.offered = 2
    assert rig.step(start) == {0: 1, 2: 1, 1: 8}
    assert [request.number for request in rig.scheduler.running] == [0, 1, 2]
    assert other.state is State.RUNNING


@pytest.mark.parametrize("state", [State.ABORTED, State.FINISHED, State.WAITING])
def test_a_joiner_goes_on_when_the_one_it_waits_for_is_gone(state: State) -> None:
    rig = Rig(32)
    leader, joiner = rig.add(8), rig.add(8)
    rig.step()
    rig.scheduler.put_back(joiner)
    joiner.joins = (leader, 0)
    assert rig.step() == {0: 1}
    rig.scheduler.remove(leader)
    leader.state = state
    assert rig.step() == {1: 9}


def test_the_waiting_queue_is_bounded_and_a_refused_request_changes_nothing() -> None:
    rig = Rig(32, waiting_max=2)
    rig.add(4)
    rig.add(4)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        rig.add(4)
    assert len(rig.scheduler.waiting) == 2


def test_a_loading_request_takes_no_part_in_a_step() -> None:
    rig = Rig(32)
    request = rig.add(8)
    rig.scheduler.admit(rig.start)
    request.state = State.LOADING
    assert rig.step() == {}
    request.state = State.RUNNING
    assert rig.step() == {0: 8}


@pytest.mark.parametrize(
    "limits", [{"token_budget": 0}, {"sequences_max": 0}, {"waiting_max": 0}, {"token_budget": 7}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Rig(32, **limits)
