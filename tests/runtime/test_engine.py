"""The engine on its pages alone: the same tokens with reuse as without, and nothing left behind."""

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvstore.runtime.engine import Engine
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.request import (
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    SamplingParams,
    State,
)
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import TokenError
from support.tiny_llama import VOCAB, load_model, make_pool, write_model

B = 16
LENGTHS = [1, B - 1, B, B + 1, 4 * B, 7 * B + 5, 333]
Prompt = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_model(write_model(tmp_path_factory.mktemp("tiny")))


def prompt(length: int, seed: int = 0) -> Prompt:
    return np.random.default_rng([seed, length]).integers(2, VOCAB, length).astype(np.int32)


def engine(model: LlamaModel, pages: int = 128, **options: int) -> Engine:
    return Engine(model, make_pool(pages), **options)


def cold(model: LlamaModel, tokens: Prompt, params: SamplingParams) -> Request:
    """Alone, in one chunk, on fresh pages, with nothing to reuse."""
    alone = Engine(model, make_pool(128), device_reuse=False, token_budget=4096)
    return alone.generate([tokens], params)[0]


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, keep_logits=True)


def assert_same(got: Request, expected: Request) -> None:
    """Equal tokens; where they fork, the step was a near-tie of the ordinary run."""
    for step, (ours, theirs) in enumerate(zip(got.output, expected.output, strict=True)):
        if ours != theirs:
            best = torch.topk(expected.logits[step], 2).values
            assert float(best[0] - best[1]) < 1e-4, f"step {step}: {ours} instead of {theirs}"
            return


@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeated_prompt_reuses_its_full_blocks_and_gives_the_same_tokens(
    model: LlamaModel, length: int
) -> None:
    expected = cold(model, prompt(length), greedy())
    warm = engine(model)
    first, second = (warm.generate([prompt(length)], greedy())[0] for _ in range(2))
    usable = (length - 1) // B * B  # at least one token is always computed
    assert (first.reused_tokens, first.computed_tokens) == (0, length)
    assert (second.reused_tokens, second.computed_tokens) == (usable, length - usable)
    assert second.tier_tokens[TierName.DEVICE] == usable
    assert_same(first, expected)
    assert_same(second, expected)
    warm.check_integrity()


@pytest.mark.parametrize("chunks,budget", [(1, 4096), (3, 64), (10, 16)])
def test_what_can_be_reused_does_not_depend_on_the_chunks(
    model: LlamaModel, chunks: int, budget: int
) -> None:
    tokens = prompt(10 * B + 3)
    warm = engine(model, token_budget=budget, sequences_max=1)
    first, second = (warm.generate([tokens], greedy())[0] for _ in range(2))
    assert len(first.chunks) >= chunks and second.reused_tokens == 10 * B
    expected = cold(model, tokens, greedy())
    assert_same(first, expected)
    assert_same(second, expected)


def test_prompts_that_diverge_in_the_middle_of_a_block_share_what_comes_before(
    model: LlamaModel,
) -> None:
    one, two = prompt(100), prompt(100)
    two[70:] = prompt(30, seed=5)
    warm = engine(model)
    warm.generate([one], greedy())
    request = warm.generate([two], greedy())[0]
    assert request.reused_tokens == 64  # the block of tokens 64..79 differs
    assert_same(request, cold(model, two, greedy()))


def test_the_check_above_can_fail(model: LlamaModel) -> None:
    warm = engine(model)
    warm.generate([prompt(100)], greedy())
    warm.pool.values[0][warm.pool.find(*_chain(warm, prompt(100)))[2]] += 1.0
    request = warm.generate([prompt(100)], greedy())[0]
    expected = cold(model, prompt(100), greedy())
    assert not torch.allclose(request.logits[0], expected.logits[0], atol=1e-3)


def _chain(owner: Engine, tokens: Prompt) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    sequence = owner._space.sequence(tokens)
    return sequence.keys, sequence.block_tokens(0, sequence.blocks)


def test_blocks_filled_by_decoding_serve_the_next_turn(model: LlamaModel) -> None:
    warm = engine(model)
    first = warm.generate([prompt(40)], greedy(60))[0]
    turn = np.concatenate([prompt(40), np.array(first.output, np.int32), prompt(20, seed=3)])
    second = warm.generate([turn], greedy())[0]
    assert second.reused_tokens == 96  # 99 tokens had their KV; the last one sampled had none
    assert_same(second, cold(model, turn, greedy()))


def test_a_batch_of_eight_gives_what_each_gives_alone(model: LlamaModel) -> None:
    prompts = [prompt(length, seed=9) for length in (1, 15, 16, 17, 33, 64, 100, 200)]
    together = engine(model).generate(prompts, greedy(16))
    for request, tokens in zip(together, prompts, strict=True):
        assert_same(request, cold(model, tokens, greedy(16)))


def test_eight_equal_prompts_at_once_are_computed_once(model: LlamaModel) -> None:
    warm = engine(model, token_budget=64)
    requests = warm.generate([prompt(200)] * 8, greedy())
    assert [request.computed_tokens for request in requests] == [200] + [8] * 7
    assert warm.counters()["planner.joined"] == 7
    for request in requests:
        assert_same(request, cold(model, prompt(200), greedy()))


def test_those_who_join_go_on_when_the_one_they_wait_for_is_aborted(model: LlamaModel) -> None:
    warm = engine(model, token_budget=64)
    requests = [warm.submit(prompt(200), greedy()) for _ in range(4)]
    warm.step()
    assert [r.state for r in requests] == [State.RUNNING] + [State.WAITING] * 3
    warm.abort(requests[0])
    warm.run()
    assert [r.reused_tokens for r in requests[1:]] == [64, 192, 192]
    for request in requests[1:]:
        assert_same(request, cold(model, prompt(200), greedy()))


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model: LlamaModel) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=20, temperature=0.8, seed=seed)

    alone = engine(model).generate([prompt(50)], params(7))[0].output
    crowd = engine(model, token_budget=40)
    others = [crowd.submit(prompt(length, seed=1), params(length)) for length in (3, 80, 130)]
    crowd.step()
    mine = crowd.submit(prompt(50), params(7))
    crowd.run()
    assert mine.output == alone and len(alone) == 20
    assert all(request.ended for request in others)
    assert engine(model).generate([prompt(50)], params(8))[0].output != alone


def test_a_stop_token_ends_the_answer_and_is_its_last(model: LlamaModel) -> None:
    whole = cold(model, prompt(30), greedy(20)).output
    stop = whole[5]
    params = SamplingParams(max_tokens=20, stop_ids=frozenset({stop}))
    request = engine(model).generate([prompt(30)], params)[0]
    assert request.output == whole[: whole.index(stop) + 1]
    assert request.finish_reason is FinishReason.STOP


def test_tokens_come_one_by_one_and_leaving_early_aborts(model: LlamaModel) -> None:
    owner = engine(model)
    request = owner.submit(prompt(30), greedy(20))
    stream = owner.tokens(request)
    assert [next(stream), next(stream)] == request.output[:2]
    stream.close()
    assert request.state is State.ABORTED
    assert owner.pool.in_use == 0
    assert list(owner.tokens(owner.submit(prompt(30), greedy(20)))) == (
        cold(model, prompt(30), greedy(20)).output
    )


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_in_any_state_leaves_nothing_and_disturbs_nobody(
    model: LlamaModel, steps: int
) -> None:
    """Waiting, in the middle of its prefill, decoding, finished: one by one, by the step count."""
    owner = engine(model, pages=24, token_budget=32, sequences_max=2)
    requests = [owner.submit(prompt(length, seed=2), greedy(4)) for length in (90, 60, 70)]
    for _ in range(steps):
        owner.step()
    victim = requests[steps % 3]
    was = victim.state
    owner.abort(victim)
    owner.abort(victim)  # a second time does nothing
    owner.run()
    owner.check_integrity()
    assert owner.pool.in_use == 0 and not owner.scheduler.running and not owner.scheduler.waiting
    assert victim.state is (State.FINISHED if was is State.FINISHED else State.ABORTED)
    for request in requests:
        if request.state is State.FINISHED:
            assert_same(
                request, cold(model, request.sequence.tokens[: request.prompt_tokens], greedy(4))
            )


def test_preempted_requests_finish_with_the_same_tokens_and_are_counted_once(
    model: LlamaModel,
) -> None:
    prompts = [prompt(40, seed=seed) for seed in range(5)]
    owner = engine(model, pages=14, token_budget=64)
    requests = [owner.submit(tokens, greedy(50)) for tokens in prompts]
    owner.run()
    assert owner.scheduler.preemptions > 0
    assert sum(request.preemptions for request in requests) == owner.scheduler.preemptions
    for request, tokens in zip(requests, prompts, strict=True):
        assert request.computed_tokens + request.reused_tokens == 40
        assert_same(request, cold(model, tokens, greedy(50)))
    assert sum(request.recomputed_tokens for request in requests) > 0
    owner.check_integrity()


def test_a_lone_request_may_fill_the_whole_pool(model: LlamaModel) -> None:
    owner = engine(model, pages=6)
    for _ in range(2):  # the second time its own cached blocks are in the way
        request = owner.generate([prompt(80)], greedy(17))[0]
        assert request.finish_reason is FinishReason.LENGTH and len(request.output) == 17
        assert_same(request, cold(model, prompt(80), greedy(17)))
    owner.check_integrity()


@pytest.mark.parametrize(
    "tokens,max_tokens,text",
    [
        ([], 4, "the prompt is empty"),
        ([VOCAB], 4, "check the tokenizer"),
        ([5] * 90, 8, "give the runtime more pages"),
        ([5] * 2048, 2, "context of 2048"),
    ],
)
def test_what_can_never_be_served_is_refused_in_one_sentence(
    model: LlamaModel, tokens: list[int], max_tokens: int, text: str
) -> None:
    owner = engine(model, pages=6)
    with pytest.raises(RequestError, match=text) as caught:
        owner.submit(tokens, SamplingParams(max_tokens=max_tokens))
    assert len(str(caught.value).splitlines()) == 1
    assert not owner.scheduler.waiting and owner.pool.in_use == 0


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [-1], [[1, 2]], "text"])
def test_tokens_of_the_wrong_kind_are_refused(model: LlamaModel, tokens: object) -> None:
    with pytest.raises(TokenError):
        engine(model).submit(tokens)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"max_tokens": 1 << 30}])
def test_params_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(**bad)


def test_a_full_queue_refuses_and_takes_again_later(model: LlamaModel) -> None:
    owner = engine(model, waiting_max=2)
    first = [owner.submit(prompt(20, seed=seed), greedy(2)) for seed in range(2)]
    with pytest.raises(QueueFullError):
        owner.submit(prompt(20), greedy(2))
    owner.run()
    assert all(request.ended for request in first)
    assert owner.generate([prompt(20)], greedy(2))[0].state is State.FINISHED


@pytest.mark.parametrize("seed", range(3))
def test_random_life_leaves_no_page_behind(model: LlamaModel, seed: int) -> None:
    choose = random.Random(seed)
    owner = engine(model, pages=20, token_budget=48, sequences_max=6)
    stems = [prompt(200, seed=stem) for stem in range(3)]
    live: list[Request] = []
    done: list[Request] = []
    for _ in range(150):
        if choose.random() < 0.4:
            stem = stems[choose.randrange(3)][: choose.randint(1, 120)]
            tail = prompt(choose.randint(1, 20), seed=choose.randrange(4))
            live.append(owner.submit(np.concatenate([stem, tail]), greedy(choose.randint(1, 20))))
        if live and choose.random() < 0.1:
            owner.abort(live[choose.randrange(len(live))])
        owner.step()
        owner.check_integrity()
        done += [request for request in live if request.state is State.FINISHED]
        live = [request for request in live if not request.ended]
    owner.run()
    owner.check_integrity()
    assert owner.pool.in_use == 0
    for request in choose.sample(done, 12):
        tokens = request.sequence.tokens[: request.prompt_tokens]
        params = greedy(request.params.max_tokens)
        assert_same(request, cold(model, tokens, params))
