"""`kvstore demo`: the main job on a real model. Its parts run in processes that really end."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstore.cli.demo_questions import DOCUMENT_TITLE, QUESTIONS
from kvstore.cli.demo_report import COLUMNS, Run, make_document, make_run, summary, table_rows
from kvstore.cli.model import fetch_smollm2
from kvstore.cli.options import JsonOption
from kvstore.cli.output import print_json, print_lines, print_table
from kvstore.cli.runtime_options import (
    DeviceName,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    ThreadsOption,
    default_threads,
    saying,
)
from kvstore.tiers.errors import ConfigError

EXIT_REFUSED = 2
RUNS = ("cold", "device", "host", "disk_after_restart")

Say = Callable[[str], None]
Answers = dict[str, list[dict[str, Any]]]


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Write the figures there as JSON.", show_default=False
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="A GGUF file or a Hugging Face folder with a chat template. "
            "[default: smollm2, fetched if need be]",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where to make the store; it is removed at the end. [default: beside the output]",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, max=512, help="Tokens of an answer.")
    ] = 32,
    device: DeviceOption = DeviceName.CPU,
    dtype: DtypeOption = Dtype.FLOAT32,
    threads: ThreadsOption = None,
    eager: EagerOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a model the same questions over one long document: cold, and from each of three tiers.

    Cold computes everything. Then the document is computed once and found again: in the model's own
    pages, in host memory, and on disk by a new process after the first one has ended.
    """
    target = _target(output)
    where = directory or (target.parent if target else Path())
    if not where.is_dir():
        raise ConfigError(f"--directory {where} is not a folder; name one on the disk to use")
    path = model or fetch_smollm2()
    job = {
        "model": str(path),
        "device": device.value,
        "dtype": dtype.value,
        "threads": threads or default_threads(),
        "max_tokens": max_tokens,
        "eager": eager,
    }
    answers = _ask_all(job, where)
    cold = answers["cold"]
    runs = [make_run(name, answers[name], cold) for name in RUNS]
    document = make_document(path.name, cold[0]["prompt_tokens"], runs)
    if target:
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
        return
    _print(runs, cold, f"{path.name}, {dtype.value}", target)


def _ask_all(job: dict[str, Any], where: Path) -> Answers:
    """Both processes' parts of the job, one after the other, over a store that is removed then."""
    answers: Answers = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory(dir=where, prefix="kvstore-demo-") as store, _teller() as say:
        model = Path(job["model"]).name
        say(f'{len(QUESTIONS)} questions over "{DOCUMENT_TITLE}", asked of {model}.')
        for part in ("first", "second"):
            _run_part({**job, "part": part, "store": store}, answers, say)
    return answers


def _target(output: Path | None) -> Path | None:
    """Where the figures go. Fails now, and not after minutes, when there is no such place."""
    if output is None:
        return None
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file in it")
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


@contextmanager
def _teller() -> Iterator[Say]:
    """Says what is happening, on stderr: a line for each sentence, and a spinner below."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with saying("Starting ...", shown=True) as spin:

        def say(sentence: str) -> None:
            console.print(sentence)
            spin("Working ...")

        yield say


def _run_part(job: dict[str, Any], answers: Answers, say: Say) -> None:
    """Run a job in a new process until it has ended. Raises ConfigError if it is refused there."""
    command = [sys.executable, "-m", "kvstore.cli.demo_run"]
    refusal = ""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
            for line in process.stdout:
                event = json.loads(line)
                if "say" in event:
                    say(event["say"])
                elif "answer" in event:
                    answers[event["answer"]["run"]].append(event["answer"])
                    say(_told(event["answer"]))
                else:
                    refusal = event["error"]
        except BaseException:
            process.kill()
            raise
    if process.returncode == EXIT_REFUSED and refusal:
        raise ConfigError(refusal)
    if process.returncode < 0:
        raise ConfigError(
            f"the demo's process was killed by signal {-process.returncode}; "
            "see that there is memory for the model, then run it again"
        )
    if process.returncode:
        raise RuntimeError(f"the demo's process ended with code {process.returncode}")


def _told(answer: dict[str, Any]) -> str:
    return (
        f"  question {answer['question'] + 1}: first token after {answer['ttft_s']:.2f} s, "
        f"{answer['computed_tokens']} tokens computed, {answer['reused_tokens']} reused"
    )


def _print(runs: list[Run], cold: list[dict[str, Any]], title: str, target: Path | None) -> None:
    for question, answer in zip(QUESTIONS, cold, strict=True):
        print_lines("", f"Q: {question}", f"A: {answer['text'].strip()}")
    print_lines("")
    print_table(f"{title}: prompts of {cold[0]['prompt_tokens']} tokens", COLUMNS, table_rows(runs))
    print_lines(
        *summary(runs),
        f"Times are medians of {len(cold)} questions, the other figures the first question's.",
    )
    if target:
        print_lines(f"Written to {target}.")
