"""`kvstore chat`: over a pipe and on a terminal; what was said before is not computed again."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.stored import Ran, assert_one_sentence
from support.tiny_chat_model import CONTEXT, write_chat_model

FIRST = "Tell me about the cellars of Great Varrin, and why they need no machine to stay cold."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


def command(model: Path, *more: str | Path) -> list[str]:
    fixed = [sys.executable, "-m", "kvstore.cli", "chat", "--model", model, "--max-tokens", "20"]
    usual = ("--threads", "1", "--kv-memory", "16MiB", "--eager")
    return [str(part) for part in (*fixed, *usual, *more)]


def chat(model: Path, typed: bytes, *more: str | Path) -> Ran:
    ran = subprocess.run(
        command(model, *more), input=typed, capture_output=True, timeout=120, check=False
    )
    return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def turns(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.mark.slow
def test_a_turn_reuses_the_turns_before_it_and_another_process_the_disk(
    model: Path, tmp_path: Path
) -> None:
    typed = f"{FIRST}\n\nAnd then?\n/new\n{FIRST}\n/exit\nnever answered\n".encode()
    first = turns(chat(model, typed, "--json", "--store", tmp_path / "kv"))
    assert [turn["reused_tokens"] > 0 for turn in first] == [False, True, True]
    # The second turn's prompt has the first one's prompt and reply, and computes only what is new.
    assert first[1]["reused_tokens"] >= (first[0]["prompt_tokens"] - 1) // 16 * 16
    assert first[2]["prompt_tokens"] == first[0]["prompt_tokens"]
    assert first[2]["tokens"] == first[0]["tokens"]
    second = turns(chat(model, f"{FIRST}\n".encode(), "--json", "--store", tmp_path / "kv"))
    assert second[0]["tokens"] == first[0]["tokens"]
    assert second[0]["tier_tokens"]["disk"] == (first[0]["prompt_tokens"] - 1) // 16 * 16


@pytest.mark.slow
def test_for_people_replies_are_on_stdout_and_figures_on_stderr(model: Path) -> None:
    typed = b"One line.\nAnother line without an end"
    machine, person = chat(model, typed, "--json"), chat(model, typed)
    assert "".join(turn["text"] + "\n" for turn in turns(machine)) == person.out
    figures = person.err.splitlines()
    assert len(figures) == 2
    for turn, line in zip(turns(machine), figures, strict=True):
        assert f"{turn['reused_tokens']} of {turn['prompt_tokens']} prompt tokens reused" in line
        assert "first token after" in line


@pytest.mark.slow
def test_on_a_pipe_what_cannot_be_answered_is_one_sentence(model: Path) -> None:
    assert_one_sentence(chat(model, b"word " * CONTEXT + b"\n"))
    assert_one_sentence(chat(model, "Grüße\n".encode("latin-1")))


@pytest.mark.slow
def test_a_model_without_a_template_is_one_sentence(tmp_path: Path) -> None:
    ran = chat(write_chat_model(tmp_path / "base", template=False), b"hello\n")
    assert_one_sentence(ran)
    assert "template" in ran.err


@pytest.mark.slow
def test_on_a_terminal_a_turn_that_fails_is_forgotten_and_the_talk_goes_on(model: Path) -> None:
    controller, terminal = pty.openpty()
    small = command(model, "--json", "--max-tokens", str(CONTEXT - 40))
    with subprocess.Popen(
        small, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        os.write(controller, b"word " * 60 + b"\n" + b"/new\n/exit\n")
        out, err = process.communicate(timeout=120)
    os.close(controller)
    assert process.returncode == 0, err.decode()
    assert b"kvstore: " in err and b"context" in err and b"Traceback" not in err
    assert b"/exit" in err  # the greeting tells how to leave
    assert b"tokens" not in out
