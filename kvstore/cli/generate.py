"""`kvstore generate`: one prompt, one answer, and what the store saved."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.options import JsonOption
from kvstore.cli.output import print_json
from kvstore.cli.runtime_options import (
    KV_MEMORY,
    ConfigOption,
    DeviceName,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    KvMemoryOption,
    RuntimeStoreOption,
    SeedOption,
    ShareOption,
    TemperatureOption,
    ThreadsOption,
    answer_document,
    answer_line,
    chosen_store,
    open_runtime,
    saying,
)
from kvstore.tiers.errors import ConfigError

PROMPT_BYTES_MAX = 64 << 20
NEW_TOKENS_MAX = 1 << 20


def generate(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            metavar="PATH",
            help="A GGUF file or a Hugging Face folder of the Llama family; "
            "see kvstore model fetch.",
            show_default=False,
        ),
    ],
    prompt_file: Annotated[
        Path,
        typer.Option(
            "--prompt-file",
            metavar="FILE",
            help="The prompt, UTF-8 text, taken as it is: no chat template.",
            show_default=False,
        ),
    ],
    store: RuntimeStoreOption = None,
    config: ConfigOption = None,
    no_store: Annotated[
        bool, typer.Option("--no-store", help="Compute everything and save nothing.")
    ] = False,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", min=1, max=NEW_TOKENS_MAX, help="New tokens at most."
        ),
    ] = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    device: DeviceOption = DeviceName.CPU,
    dtype: DtypeOption = Dtype.FLOAT32,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = KV_MEMORY,
    eager: EagerOption = False,
    share: ShareOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer the prompt in a file. What another process computed for the same text is reused.

    Run it twice with one --store: the second run loads what the first one saved.
    """
    _refuse_without_store(store, config, no_store)
    prompt = _read_prompt(prompt_file)
    opened = chosen_store(store, config, no_store)
    shown = not as_json
    how: dict[str, Any] = {"eager": eager, "share": share, "shown": shown, "device": device}
    with open_runtime(model, dtype, threads, kv_memory, opened, **how) as runtime:
        with saying("Generating ...", shown=shown):
            answer = runtime.generate(
                prompt, max_tokens=max_tokens, temperature=temperature, seed=seed
            )
        if as_json:
            print_json(answer_document(answer))
        else:
            sys.stdout.write(f"{answer.text}\n")
            sys.stdout.flush()
            sys.stderr.write(f"({answer_line(answer)})\n")


def _refuse_without_store(store: Path | None, config: Path | None, no_store: bool) -> None:
    if store is None and config is None and not no_store:
        raise ConfigError(
            "generate needs a store: give --store DIR or --config FILE, or --no-store for none"
        )


def _read_prompt(path: Path) -> str:
    """The text of a file. Raises ConfigError, with what to do, when there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(PROMPT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"the prompt file {path} cannot be read ({error.strerror}); "
            "name a text file that exists with --prompt-file"
        ) from None
    if len(data) > PROMPT_BYTES_MAX:
        raise ConfigError(f"the prompt file {path} is over {PROMPT_BYTES_MAX} bytes; shorten it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt file {path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    if not text:
        raise ConfigError(f"the prompt file {path} is empty; write a prompt into it")
    return text
