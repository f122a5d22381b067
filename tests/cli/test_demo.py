"""`kvstore demo`: the same answers from every tier, and figures as others script against them."""

import json
import re
from pathlib import Path

import pytest

from kvstore.cli.demo_questions import QUESTIONS, document
from kvstore.cli.demo_report import make_document, make_run, summary, table_rows
from support.stored import assert_one_sentence, run
from support.tiny_chat_model import TOKEN_BYTES, write_chat_model

RUNS = ["cold", "device", "host", "disk_after_restart"]
FIELDS = {
    *("name", "ttft_s", "computed_tokens", "reused_tokens", "tier_tokens", "bytes_moved"),
    *("decode_tokens_per_s", "tokens", "same_as_cold"),
}


@pytest.mark.slow
def test_every_tier_gives_the_cold_answers_and_the_figures_say_so(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    output = tmp_path / "build" / "demo.json"
    common = ("--model", model, "--threads", "1", "--max-tokens", "8", "--eager")
    ran = run("demo", "--output", output, *common)
    assert ran.code == 0, ran.err
    found = json.loads(output.read_text("utf-8"))
    assert set(found) == {"model", "prompt_tokens", "runs"}
    assert found["model"] == "model"
    assert [entry["name"] for entry in found["runs"]] == RUNS
    cold = found["runs"][0]
    for entry in found["runs"]:
        assert set(entry) == FIELDS
        assert set(entry["tier_tokens"]) == {"device", "host", "disk"}
        assert entry["computed_tokens"] + entry["reused_tokens"] == found["prompt_tokens"]
        assert entry["tokens"] == cold["tokens"] and entry["same_as_cold"] is True
        assert len(entry["tokens"]) == 8 or entry["tokens"][-1] == 1
        assert entry["ttft_s"] > 0 and entry["decode_tokens_per_s"] > 0
    reused = {entry["name"]: entry["reused_tokens"] for entry in found["runs"]}
    document_tokens = reused["device"]
    # The document is reused in whole blocks, and a question is new to each of the runs.
    assert document_tokens % 16 == 0 and document_tokens > 0.9 * found["prompt_tokens"]
    assert reused == dict(zip(RUNS, [0, *[document_tokens] * 3], strict=True))
    places = [{t: n for t, n in e["tier_tokens"].items() if n} for e in found["runs"]]
    assert places == [{}, *({tier: document_tokens} for tier in ("device", "host", "disk"))]
    moved = document_tokens * TOKEN_BYTES
    assert [entry["bytes_moved"] for entry in found["runs"]] == [0, 0, moved, moved]
    # For people: who did it, the answers, and a table; and nothing is left on the disk.
    assert len(set(re.findall(r"Process (\d+) loads", ran.err))) == 2
    assert all(f"Q: {question}" in ran.out for question in QUESTIONS)
    assert all(name in ran.out for name in ("cold", "device", "host", "disk, restarted"))
    assert "token for token" in ran.out
    assert [path.name for path in output.parent.iterdir()] == ["demo.json"]


@pytest.mark.slow
def test_a_model_that_cannot_chat_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "base", template=False)
    ran = run("demo", "--output", tmp_path / "out" / "demo.json", "--model", model)
    assert ran.code == 2 and ran.out == "" and "Traceback" not in ran.err
    assert ran.err.splitlines()[-1].startswith("kvstore: ") and "template" in ran.err
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_places_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert_one_sentence(run("demo", "--output", tmp_path))
    assert_one_sentence(run("demo", "--output", tmp_path / "file" / "demo.json"))
    assert_one_sentence(run("demo", "--directory", tmp_path / "none"))


def test_the_document_is_long_and_answers_the_questions() -> None:
    text = document()
    assert 1300 < len(text.split()) < 1600
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 3


def answer(tokens: list[int], ttft_s: float, question: int = 0) -> dict[str, object]:
    return {
        "question": question,
        "tokens": tokens,
        "computed_tokens": 10,
        "reused_tokens": 90,
        "tier_tokens": {"device": 0, "host": 90, "disk": 0},
        "tier_bytes": {"device": 0, "host": 5 << 20, "disk": 0},
        "ttft_s": ttft_s,
        "decode_tokens_per_s": 20.0,
        "margins": [1.0, 5e-5, 1.0],
    }


def test_other_answers_are_shown_as_such_with_the_place_where_they_fork() -> None:
    cold = [answer([1, 2, 3], 4.0), answer([4, 5, 6], 6.0, 1), answer([7, 8], 5.0, 2)]
    near = [answer([1, 9, 9], 0.5), answer([4, 5, 6], 0.1, 1), answer([7, 8], 0.2, 2)]
    far = [answer([1, 2, 3], 0.5), answer([4, 5, 7], 0.1, 1), answer([7], 0.2, 2)]
    runs = [make_run(n, a, cold) for n, a in (("cold", cold), ("host", near), ("disk", far))]
    entries = make_document("m", 100, runs)["runs"]
    assert [entry["same_as_cold"] for entry in entries] == [True, False, False]
    assert [entry["ttft_s"] for entry in entries] == [5.0, 0.2, 0.2]
    assert [row[-1] for row in table_rows(runs)] == ["-", "no", "no"]
    first, *others = summary(runs)
    assert "25.0" in first and "not all answers" in first
    assert others == [
        "  host: question 1 differs from token 1 on, where the cold run had a near-tie",
        "  disk: question 2 differs from token 2 on",
        "  disk: question 3 differs from token 1 on, where the cold run had a near-tie",
    ]
    assert "token for token" in summary([runs[0], runs[0]])[0]
