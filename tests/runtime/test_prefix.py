"""The engine over a store: what it loads, what it does when a load fails, and what it leaves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore.planner import PROBE_BLOCKS, Planner
from kvstore.runtime.engine import Engine
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.request import Request, SamplingParams, State
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from support.tiny_llama import VOCAB, load_model, make_pool, write_model

B = 16
LENGTHS = [1, B - 1, B, B + 1, 4 * B, 7 * B + 5, 333]
Prompt = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_model(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with reopened(tmp_path) as store:
        yield store
        assert store.leaks() == {"leases": 0, "holds": 0}
        store.check_integrity()


def reopened(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", host="32MiB", disk_capacity="64MiB")


def prompt(length: int, seed: int = 0) -> Prompt:
    return np.random.default_rng([seed, length]).integers(2, VOCAB, length).astype(np.int32)


def engine(model: LlamaModel, store: Store, pages: int = 128, **options: Any) -> Engine:
    """An engine with empty pages over a store; it loads whatever it finds unless told."""
    pool = make_pool(pages)
    space = store.namespace(pool.layout, model="tiny")
    return Engine(model, pool, space=space, **({"planner": Planner(eager=True)} | options))


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, keep_logits=True)


def cold(model: LlamaModel, tokens: Prompt, max_tokens: int = 8) -> Request:
    alone = Engine(model, make_pool(128), device_reuse=False, token_budget=4096)
    return alone.generate([tokens], greedy(max_tokens))[0]


def assert_same(got: Request, expected: Request) -> None:
    for step, (ours, theirs) in enumerate(zip(got.output, expected.output, strict=True)):
        if ours != theirs:
            best = torch.topk(expected.logits[step], 2).values
            assert float(best[0] - best[1]) < 1e-4, f"step {step}: {ours} instead of {theirs}"
            return


def assert_nothing_left(owner: Engine, store: Store) -> None:
    while owner.pool.copies:
        assert owner.pool.wait_copies()
    owner.check_integrity()
    assert owner.pool.in_use == 0
    assert store.leaks() == {"leases": 0, "holds": 0}


@pytest.mark.parametrize("length", LENGTHS)
def test_another_process_reuses_from_host_and_after_a_restart_from_disk(
    model: LlamaModel, tmp_path: Path, length: int
) -> None:
    expected, usable = cold(model, prompt(length)), (length - 1) // B * B
    with reopened(tmp_path) as store:
        first = engine(model, store).generate([prompt(length)], greedy())[0]
        store.flush()
        second = engine(model, store).generate([prompt(length)], greedy())[0]
    with reopened(tmp_path) as store:
        owner = engine(model, store)
        third = owner.generate([prompt(length)], greedy())[0]
        assert_nothing_left(owner, store)
        store.check_integrity()
    assert first.reused_tokens == 0
    for request, tier in ((second, TierName.HOST), (third, TierName.DISK)):
        assert request.tier_tokens == dict.fromkeys(TierName, 0) | {tier: usable}
        block_bytes = make_pool(1).layout.payload_bytes
        assert request.bytes_moved[tier] == usable // B * block_bytes
        assert request.computed_tokens == length - usable
        assert_same(request, expected)


def test_the_store_gives_what_the_device_lacks_and_touches_nothing_else(
    model: LlamaModel, store: Store
) -> None:
    long = prompt(200)
    engine(model, store).generate([long], greedy())
    store.flush()
    owner = engine(model, store)
    owner.generate([long[:60]], greedy(1))  # three full blocks on the device
    pages = owner.pool.find(*_chain(owner, long))
    before = [part[pages].clone() for part in owner.pool.arrays()]
    request = owner.generate([long], greedy())[0]
    assert request.tier_tokens == {
        TierName.DEVICE: 48,
        TierName.HOST: 144,
        TierName.DISK: 0,
    }
    after = [part[pages] for part in owner.pool.arrays()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert_same(request, cold(model, long))


def _chain(owner: Engine, tokens: Prompt) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    sequence = owner._space.sequence(tokens)
    return sequence.keys, sequence.block_tokens(0, sequence.blocks)


@pytest.mark.parametrize("bad", [0, 7, 19])
def test_a_damaged_block_shortens_the_prefix_and_the_rest_is_computed(
    model: LlamaModel, tmp_path: Path, bad: int
) -> None:
    tokens = prompt(20 * B + 5)
    with reopened(tmp_path) as store:
        engine(model, store).generate([tokens], greedy())
    _damage(tmp_path / "store", tokens[bad * B : (bad + 1) * B])
    with reopened(tmp_path) as store:
        owner = engine(model, store)
        request = owner.generate([tokens], greedy())[0]
        assert request.tier_tokens[TierName.DISK] == bad * B
        assert request.failed_loads == 1
        assert_same(request, cold(model, tokens))
        assert_nothing_left(owner, store)
        store.flush()
        healed = engine(model, store).generate([tokens], greedy())[0]
        assert healed.reused_tokens == 20 * B  # what was computed was saved in its place
        store.check_integrity()


def _damage(directory: Path, block: Prompt) -> None:
    """Flip one bit in the payload of the stored block with these tokens."""
    for path in directory.rglob("*.seg"):
        data = bytearray(path.read_bytes())
        at = data.find(block.tobytes())
        if at >= 0:
            data[(at // 4096 + 1) * 4096 + 1000] ^= 0x40
            path.write_bytes(data)
            return
    raise AssertionError("the block is not on disk")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_many_requests_for_one_prefix_load_it_once(
    model: LlamaModel, tmp_path: Path, tier: str
) -> None:
    tokens = prompt(20 * B + 5)
    with reopened(tmp_path) as store:
        engine(model, store).generate([tokens], greedy())
        store.flush()
        if tier == "host":
            requests = _crowd(model, store, tokens)
    if tier == "disk":
        with reopened(tmp_path) as store:
            requests = _crowd(model, store, tokens)
    assert [r.tier_tokens[TierName(tier)] for r in requests] == [20 * B] + [0] * 31
    assert [r.tier_tokens[TierName.DEVICE] for r in requests] == [0] + [20 * B] * 31
    expected = cold(model, tokens)
    for request in requests:
        assert_same(request, expected)


def _crowd(model: LlamaModel, store: Store, tokens: Prompt) -> list[Request]:
    before = store.counters()
    owner = engine(model, store, pages=256)
    requests = owner.generate([tokens] * 32, greedy())
    after = store.counters()
    moved = sum(after[name] - before[name] for name in after if name.startswith("loaded_bytes"))
    assert moved == 20 * owner.pool.layout.payload_bytes
    assert_nothing_left(owner, store)
    return requests


def test_those_who_wait_for_a_load_still_get_it_when_the_first_is_aborted(
    model: LlamaModel, tmp_path: Path
) -> None:
    tokens = prompt(20 * B + 5)
    with reopened(tmp_path) as store:
        engine(model, store).generate([tokens], greedy())
    with reopened(tmp_path) as store:
        owner = engine(model, store)
        first, second = owner.submit(tokens, greedy()), owner.submit(tokens, greedy())
        owner.admit()
        assert second.state is State.WAITING
        owner.abort(first)
        owner.run()
        assert second.reused_tokens == 20 * B
        assert_same(second, cold(model, tokens))
        assert_nothing_left(owner, store)


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_leaves_no_page_lease_or_hold(
    model: LlamaModel, store: Store, steps: int
) -> None:
    prompts = [prompt(length, seed=4) for length in (150, 100, 120)]
    engine(model, store).generate(prompts, greedy())
    store.flush()
    owner = engine(model, store, pages=24, token_budget=32, sequences_max=2)
    requests = [owner.submit(tokens, greedy(4)) for tokens in prompts]
    owner.admit()  # loads are under way
    for _ in range(steps):
        owner.step()
    owner.abort(requests[steps % 3])
    owner.run()
    assert_nothing_left(owner, store)
    for request, tokens in zip(requests, prompts, strict=True):
        if request.state is State.FINISHED:
            assert_same(request, cold(model, tokens, 4))


def test_lookups_that_are_never_followed_by_a_load_leave_nothing(
    model: LlamaModel, store: Store
) -> None:
    tokens = prompt(100)
    owner = engine(model, store)
    owner.generate([tokens], greedy())
    for number in range(120):  # covered by the device, aborted in the queue, aborted after a step
        request = owner.submit(tokens, greedy(2))
        if number % 3 == 1:
            owner.abort(request)
        elif number % 3 == 2:
            owner.step()
            owner.abort(request)
        owner.run()
    assert_nothing_left(owner, store)
    assert owner.generate([tokens], greedy())[0].reused_tokens == 96


def test_a_page_is_not_given_away_while_its_save_is_still_queued(
    model: LlamaModel, store: Store
) -> None:
    mine, other = prompt(64), prompt(64, seed=1)
    owner = engine(model, store, pages=6, device_reuse=False)
    with store._placement.lock:  # the saver cannot move
        owner.generate([mine], greedy(1))
        waiting = owner.submit(other, greedy(1))
        for _ in range(3):
            owner.step()
        assert waiting.state is State.WAITING and owner.pool.available < 4
    owner.run()
    assert waiting.state is State.FINISHED
    assert_nothing_left(owner, store)
    again = engine(model, store).generate([mine, other], greedy())
    for request, tokens in zip(again, (mine, other), strict=True):
        assert request.tier_tokens[TierName.HOST] == 48
        assert_same(request, cold(model, tokens))


def test_a_load_that_does_not_come_is_given_up_and_its_pages_are_not_reused(
    model: LlamaModel, store: Store
) -> None:
    tokens = prompt(100)
    engine(model, store).generate([tokens], greedy())
    store.flush()
    owner = engine(model, store)
    with store._placement.lock:  # no loader can move
        request = owner.submit(tokens, greedy())
        owner.admit()
        assert request.state is State.LOADING
        stuck = list(request.pages[:6])
        request.load_until = 0.0
        owner.step()
        while request.state is not State.FINISHED:
            owner.step()
            assert not set(stuck) & set(request.pages)
        assert owner.pool.copies > 0
    assert (request.failed_loads, request.reused_tokens) == (1, 0)
    assert_same(request, cold(model, tokens))
    assert_nothing_left(owner, store)


def test_preempted_requests_come_back_through_the_store_and_are_counted_once(
    model: LlamaModel, store: Store
) -> None:
    prompts = [prompt(40, seed=seed) for seed in range(5)]
    owner = engine(model, store, pages=14, token_budget=64)
    requests = owner.generate(prompts, greedy(50))
    assert owner.scheduler.preemptions > 0
    for request, tokens in zip(requests, prompts, strict=True):
        assert (request.computed_tokens, request.reused_tokens) == (40, 0)
        assert_same(request, cold(model, tokens, 50))
    assert_nothing_left(owner, store)


def test_a_tier_that_costs_more_than_computing_is_declined_and_counted(
    model: LlamaModel, store: Store
) -> None:
    tokens = prompt(200)
    engine(model, store).generate([tokens], greedy())
    store.flush()
    owner = engine(model, store, planner=Planner())
    for _ in range(10):
        owner.planner.observe_load({"host": 1 << 20}, {"host": 64}, 60.0)
    request = owner.generate([tokens], greedy())[0]
    assert (request.computed_tokens, request.tier_tokens[TierName.HOST]) == (200, 0)
    counters = owner.counters()
    assert (counters["planner.declined"], counters["planner.declined_tokens"]) == (1, 192)
    assert_nothing_left(owner, store)


def test_a_fresh_process_probes_a_tier_and_uses_its_first_hit_whole(
    model: LlamaModel, tmp_path: Path
) -> None:
    tokens = prompt(20 * B + 5)
    with reopened(tmp_path) as store:
        engine(model, store).generate([tokens], greedy())
    with reopened(tmp_path) as store:
        owner = engine(model, store, planner=Planner())
        for _ in range(10):  # a model for which computing is slow
            owner.planner.observe(64, 0, 30.0)
        request = owner.generate([tokens], greedy())[0]
        assert request.tier_tokens[TierName.DISK] == 20 * B > PROBE_BLOCKS * B
        assert owner.counters()["planner.explored"] == 1
        assert owner.planner.load_s("disk", 1 << 20, 64) is not None
        assert_same(request, cold(model, tokens))
        assert_nothing_left(owner, store)


def test_blocks_that_decoding_filled_serve_the_next_turn_after_a_restart(
    model: LlamaModel, tmp_path: Path
) -> None:
    with reopened(tmp_path) as store:
        first = engine(model, store).generate([prompt(40)], greedy(60))[0]
    turn = np.concatenate([prompt(40), np.array(first.output, np.int32), prompt(20, seed=3)])
    with reopened(tmp_path) as store:
        second = engine(model, store).generate([turn], greedy())[0]
    assert second.tier_tokens[TierName.DISK] == 96
    assert_same(second, cold(model, turn))


@pytest.mark.parametrize("budget", [4096, 64, 16])
def test_every_chunk_of_a_prefill_is_saved(model: LlamaModel, store: Store, budget: int) -> None:
    tokens = prompt(10 * B + 3)
    writer = engine(model, store, token_budget=budget, sequences_max=1)
    writer.generate([tokens], greedy())
    store.flush()
    assert engine(model, store).generate([tokens], greedy())[0].reused_tokens == 10 * B


def test_other_salts_share_nothing_and_equal_ones_do(model: LlamaModel, store: Store) -> None:
    tokens = prompt(100)

    def ask(salt: bytes) -> int:
        pool = make_pool(32)
        space = store.namespace(pool.layout, model="tiny", salt=salt)
        owner = Engine(model, pool, space=space, planner=Planner(eager=True))
        reused = owner.generate([tokens], greedy(1))[0].reused_tokens
        store.flush()
        return reused

    assert [ask(b"a"), ask(b"b"), ask(b"a"), ask(b"")] == [0, 0, 96, 0]


def test_the_store_counts_a_request_once_however_often_it_comes_back(
    model: LlamaModel, store: Store
) -> None:
    prompts = [prompt(40, seed=seed) for seed in range(5)]
    owner = engine(model, store, pages=14, token_budget=64)
    owner.generate(prompts, greedy(30))
    assert owner.scheduler.preemptions > 0
    stats = store.stats()
    hits = sum(stats["tokens_hit"].values())
    # Each asked for its two full blocks, and after a preemption for those it had generated since.
    assert sum(stats["misses"].values()) == 5 * 32
    assert hits == stats["tokens_asked"] - 5 * 32 <= 5 * 32
