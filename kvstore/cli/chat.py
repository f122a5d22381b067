"""`kvstore chat`: a conversation whose earlier turns are not computed again."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.generate import NEW_TOKENS_MAX
from kvstore.cli.model import fetch_smollm2
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
)
from kvstore.tiers.errors import ConfigError, KvstoreError

if TYPE_CHECKING:
    from kvstore.runtime.api import Generation, Runtime

GREETING = "Type a message; /new starts over, /exit or Ctrl-D ends."
LINE_BYTES_MAX = 1 << 20
PROMPT = "> "

Messages = list[dict[str, str]]


def chat(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="A GGUF file or a Hugging Face folder of the Llama family. "
            "[default: smollm2, fetched if need be]",
            show_default=False,
        ),
    ] = None,
    store: RuntimeStoreOption = None,
    config: ConfigOption = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="What the model is told before all else."),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", min=1, max=NEW_TOKENS_MAX, help="Tokens of a reply."
        ),
    ] = 256,
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
    """Talk to a model. Each turn computes only what is new, and says so.

    Messages are lines of the terminal or of a pipe. With --store the conversation is saved, and the
    same beginning is found again by another process. With --json each reply is one JSON line.
    """
    opened = chosen_store(store, config)
    model = model or fetch_smollm2(shown=not as_json)
    with open_runtime(
        model,
        dtype,
        threads,
        kv_memory,
        opened,
        eager=eager,
        share=share,
        shown=not as_json,
        device=device,
    ) as runtime:
        talk = _Talk(runtime, system, max_tokens, temperature, seed, as_json)
        talk.run()


class _Talk:
    """One conversation. On a terminal a turn that fails is undone and the talk goes on."""

    def __init__(
        self,
        runtime: "Runtime",
        system: str | None,
        max_tokens: int,
        temperature: float,
        seed: int,
        as_json: bool,
    ) -> None:
        self._runtime = runtime
        self._start: Messages = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._limits = (max_tokens, temperature, seed)
        self._as_json = as_json
        self._terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Read messages and reply until there are no more."""
        if self._terminal:
            _remark(GREETING)
        for message in _lines(self._terminal):
            if message == "/exit":
                return
            if message == "/new":
                self._messages = list(self._start)
            elif message:
                self._turn(message)

    def _turn(self, message: str) -> None:
        self._messages.append({"role": "user", "content": message})
        try:
            answer = self._reply()
        except (KvstoreError, KeyboardInterrupt) as error:
            self._messages.pop()
            if not self._terminal:
                raise
            interrupted = isinstance(error, KeyboardInterrupt)
            _remark("\nStopped; this turn is forgotten." if interrupted else f"kvstore: {error}")
            return
        self._messages.append({"role": "assistant", "content": answer.text})
        if self._as_json:
            print_json(answer_document(answer))
        else:
            self._write("\n")
            _remark(f"({answer_line(answer)})")

    def _reply(self) -> "Generation":
        """The next reply, written as it comes. Leaving early aborts it."""
        max_tokens, temperature, seed = self._limits
        stream = self._runtime.chat(
            self._messages, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        written = ""
        try:
            for piece in stream:
                self._write(piece)
                written += piece
        finally:
            stream.close()
        answer = stream.generation
        assert answer is not None
        if answer.text.startswith(written):  # a last character that was cut off comes only now
            self._write(answer.text[len(written) :])
        return answer

    def _write(self, piece: str) -> None:
        if not self._as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()


def _lines(terminal: bool) -> Iterator[str]:
    """Messages, one a line, without the space around them, until the input ends."""
    while True:
        if terminal:
            try:
                yield input(PROMPT).strip()
            except EOFError:
                return
            continue
        line = sys.stdin.buffer.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"a message is over {LINE_BYTES_MAX} bytes; send shorter lines")
        try:
            yield line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise ConfigError("a message is not UTF-8 text; convert the input first") from None


def _remark(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
