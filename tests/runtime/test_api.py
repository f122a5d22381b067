"""The ten-line use: load, generate, chat, and what a second process reuses."""

from pathlib import Path

import pytest

from kvstore.runtime.api import Generation, Runtime
from kvstore.runtime.request import FinishReason, RequestError
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError
from support.tiny_llama import END, write_model

TEXT = "A long enough prompt, with umlauts: äöü, and some more words after them. "


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runtime(path: Path) -> Runtime:
    return Runtime.load(path, kv_memory="8MiB", threads=1)


def test_text_in_text_out_and_the_second_time_from_the_device(runtime: Runtime) -> None:
    first = runtime.generate(TEXT + "1", max_tokens=12)
    second = runtime.generate(TEXT + "1", max_tokens=12)
    assert first.prompt_tokens == len((TEXT + "1").encode())
    assert (second.text, second.tokens) == (first.text, first.tokens)
    assert second.reused_tokens == second.tier_tokens[TierName.DEVICE] > 60
    assert second.computed_tokens + second.reused_tokens == second.prompt_tokens
    assert first.ttft_s > 0 and first.decode_s > 0 and first.decode_tokens_per_s > 0


def test_a_second_process_reuses_what_the_first_saved(path: Path, tmp_path: Path) -> None:
    answers: list[Generation] = []
    for _ in range(2):
        with Runtime.load(path, store=tmp_path / "store", kv_memory="8MiB", threads=1) as fresh:
            fresh.engine.planner.eager = True  # this model is computed faster than it is loaded
            answers.append(fresh.generate(TEXT, max_tokens=12))
    assert answers[0].reused_tokens == 0
    assert answers[1].tier_tokens[TierName.DISK] == answers[1].reused_tokens > 60
    assert answers[1].bytes_moved[TierName.DISK] > 0
    assert answers[1].tokens == answers[0].tokens


def test_an_open_store_is_used_and_left_open(path: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", host="16MiB", disk_capacity="16MiB") as store:
        with Runtime.load(path, store=store, kv_memory="8MiB", threads=1) as fresh:
            fresh.generate(TEXT, max_tokens=2)
        store.flush()
        assert store.stats()["tiers"]["disk"]["blocks"] == len(TEXT.encode()) // 16


def test_models_dtypes_and_salts_do_not_share_blocks(path: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    with open_store(tmp_path / "store", host="16MiB", disk_capacity="16MiB") as store:

        def reused(model: Path, dtype: str = "float32", salt: bytes = b"") -> int:
            fresh = Runtime.load(
                model,
                store=store,
                dtype=dtype,
                salt=salt,
                kv_memory="8MiB",
                threads=1,
                share=True,
            )
            fresh.engine.planner.eager = True
            answer = fresh.generate(TEXT, max_tokens=1)
            store.flush()
            return answer.reused_tokens

        assert reused(path) == 0
        assert reused(other) == 0
        assert reused(path, dtype="bfloat16") == 0
        assert reused(path, salt=b"x") == 0
        assert reused(path) > 60 and reused(path, salt=b"x") > 60


def test_chat_streams_what_generate_returns(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": TEXT}]
    stream = runtime.chat(messages, max_tokens=20)
    pieces = list(stream)
    whole = runtime.generate(messages, max_tokens=20)
    assert stream.generation is not None and stream.generation.tokens == whole.tokens
    assert stream.generation.text == whole.text
    assert whole.text.startswith("".join(pieces))


def test_the_next_turn_of_a_chat_reuses_this_one(runtime: Runtime) -> None:
    ids = runtime.encode([{"role": "user", "content": "turn " + TEXT}])
    first = runtime.generate(ids, max_tokens=40)
    second = runtime.generate([*ids, *first.tokens, *runtime.encode("and now?")], max_tokens=4)
    assert second.reused_tokens == (len(ids) + len(first.tokens) - 1) // 16 * 16


def test_leaving_a_stream_early_aborts_it(runtime: Runtime) -> None:
    stream = runtime.chat([{"role": "user", "content": TEXT}], max_tokens=200)
    next(iter(stream))
    stream.close()
    assert not runtime.engine.scheduler.running and runtime.engine.pool.in_use == 0
    assert runtime.generate(TEXT, max_tokens=1).finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_the_answer_before_it_wherever_tokens_lie(runtime: Runtime) -> None:
    whole = runtime.generate(TEXT, max_tokens=60).text
    readable = next(
        i for i in range(8, 50) if whole[i : i + 2].isascii() and whole[i].isprintable()
    )
    stop = whole[readable : readable + 2]
    answer = runtime.generate(TEXT, max_tokens=60, stop=["never this", stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason is FinishReason.STOP and len(answer.tokens) < 60
    assert runtime.engine.pool.in_use == 0


def test_a_stop_token_of_the_model_ends_the_answer(runtime: Runtime) -> None:
    for seed in range(200):
        answer = runtime.generate(TEXT, max_tokens=60, temperature=2.0, seed=seed)
        if answer.finish_reason is FinishReason.STOP:
            assert answer.tokens[-1] == END and END not in answer.tokens[:-1]
            return
    raise AssertionError("no answer of 200 met the stop token")


def test_equal_seeds_give_equal_answers(runtime: Runtime) -> None:
    def ask(seed: int) -> list[int]:
        return runtime.generate(TEXT, max_tokens=12, temperature=1.0, seed=seed).tokens

    assert ask(1) == ask(1) != ask(2)


def test_what_cannot_be_is_refused_in_one_sentence(path: Path, tmp_path: Path) -> None:
    cases = [
        {"dtype": "int3"},
        {"threads": 0},
        {"kv_memory": "1KiB"},
        {"kv_memory": "much"},
    ]
    for options in cases:
        with pytest.raises(ConfigError) as caught:
            Runtime.load(path, **options)  # type: ignore[arg-type]
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError, match="no model at"):
        Runtime.load(tmp_path / "nowhere")


def test_a_prompt_longer_than_the_pages_is_refused(path: Path) -> None:
    small = Runtime.load(path, kv_memory="64KiB", threads=1)
    with pytest.raises(RequestError, match="more pages"):
        small.generate(TEXT * 3)
    with pytest.raises(ConfigError, match="stop="):
        small.generate("x", stop="text")
