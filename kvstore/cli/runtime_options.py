"""What the commands that run a model share: their options, and how they open runtime and store.

The runtime, and with it torch, is imported when such a command runs and not before.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import kvstore
from kvstore.planner import Planner
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.runtime.api import Generation, Runtime

KV_MEMORY = "512MiB"
THREADS_DEFAULT_MAX = 16  # a small model does not gain from more


class Dtype(StrEnum):
    """What the model computes in, and what its keys and values are stored as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    """What the model computes on."""

    CPU = "cpu"
    CUDA = "cuda"


DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="float32 is exact to the token; bfloat16 takes half.")
]
DeviceOption = Annotated[
    DeviceName,
    typer.Option("--device", help="Where the model computes; cuda is an NVIDIA GPU."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, max=1024, help="Threads of the model. [default: all cores]"
    ),
]
KvMemoryOption = Annotated[
    str,
    typer.Option(
        "--kv-memory", metavar="SIZE", help="Memory of the device tier: the model's own pages."
    ),
]
EagerOption = Annotated[
    bool,
    typer.Option(
        "--eager", help="Load whatever is found, even where computing it again is faster."
    ),
]
ShareOption = Annotated[
    bool,
    typer.Option(
        "--share",
        help="Let this model, or this dtype, share a store that was made for another.",
    ),
]
RuntimeStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="DIR",
        help="The store's directory, made if there is none. What is computed is saved there, "
        "and found by the next process.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The store's settings, a TOML file.", show_default=False
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, max=100.0, help="0 takes the best token.")
]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, max=(1 << 64) - 1, help="Equal seeds give equal tokens."),
]


def default_threads() -> int:
    """The processors that this process may use, and THREADS_DEFAULT_MAX at most."""
    return min(len(os.sched_getaffinity(0)), THREADS_DEFAULT_MAX)


def refuse_without_runtime() -> None:
    """Raise ConfigError when the runtime's packages are not installed."""
    try:
        import kvstore.runtime.api  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvstore"):
            raise
        raise ConfigError(
            f"running a model needs {error.name}, which is not installed; "
            "run pip install 'kvstore[runtime]'"
        ) from None


@contextmanager
def open_runtime(
    model: Path,
    dtype: Dtype,
    threads: int | None,
    kv_memory: str,
    store: AbstractContextManager[kvstore.Store | None],
    *,
    eager: bool,
    share: bool,
    shown: bool,
    device: DeviceName = DeviceName.CPU,
) -> Iterator["Runtime"]:
    """A runtime over a store; both are closed at the end, after all is written.

    Device and model's headers are looked at before the store is opened: what is wrong with them
    makes no store.
    eager: load whatever the store has, whatever it costs.
    share: the store may hold blocks of other models.
    shown: say on stderr what is happening, where stderr is a terminal.
    """
    with ExitStack() as stack:
        with saying("Loading the model ...", shown=shown) as say:
            refuse_without_runtime()
            from kvstore.runtime.api import Runtime  # noqa: PLC0415
            from kvstore.runtime.compute import open_device  # noqa: PLC0415
            from kvstore.runtime.weights import open_checkpoint  # noqa: PLC0415

            open_checkpoint(model)
            compute = open_device(device)
            runtime = Runtime.load(
                model,
                store=stack.enter_context(store),
                device=compute,
                dtype=dtype.value,
                threads=threads or default_threads(),
                kv_memory=kv_memory,
                planner=Planner(eager=eager),
                share=share,
                progress=lambda done, total: say(f"Loading the model: layer {done} of {total} ..."),
            )
        try:
            yield runtime
        finally:
            with saying("Writing to the store ...", shown=shown):
                stack.close()


def chosen_store(
    directory: Path | None, config: Path | None, no_store: bool = False
) -> AbstractContextManager[kvstore.Store | None]:
    """The store that the options name, opened when entered; None for no store.

    Raises ConfigError, and makes nothing, for settings that make no sense.
    """
    if no_store or (directory is None and config is None):
        return nullcontext()
    settings: dict[str, Any] = {} if directory is None else {"disk": [directory]}
    if config is not None and not config.is_file():
        raise ConfigError(f"--config {config} is not a file; give a TOML file with the settings")
    kvstore.config.load_config(config, **settings)
    return _open_later(config, settings)


@contextmanager
def _open_later(config: Path | None, settings: dict[str, Any]) -> Iterator[kvstore.Store]:
    with kvstore.open(config, **settings) as store:
        yield store


@contextmanager
def saying(what: str, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with a sentence; calling what it yields changes the sentence.

    It moves on a terminal only; elsewhere, and when not `shown`, nothing is written.
    """
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(what) as status:
        yield status.update


def answer_document(answer: "Generation") -> dict[str, Any]:
    """What `generate --json` prints of an answer; `chat --json` prints it for each turn."""
    return {
        "tokens": answer.tokens,
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "computed_tokens": answer.computed_tokens,
        "reused_tokens": answer.reused_tokens,
        "tier_tokens": {str(tier): answer.tier_tokens.get(tier, 0) for tier in TierName},
        "ttft_s": answer.ttft_s,
        "decode_s": answer.decode_s,
    }


def answer_line(answer: "Generation") -> str:
    """One line for people: what an answer cost, and what it need not cost."""
    tiers = [
        f"{tokens} from {_PLACES[tier]}" for tier, tokens in answer.tier_tokens.items() if tokens
    ]
    source = f" ({', '.join(tiers)})" if tiers else ""
    speed = answer.decode_tokens_per_s
    decoded = f", then {speed:.1f} tokens/s" if speed else ""
    return (
        f"{answer.reused_tokens} of {answer.prompt_tokens} prompt tokens reused{source}; "
        f"first token after {answer.ttft_s:.2f} s{decoded}"
    )


_PLACES = {
    TierName.DEVICE: "the model's pages",
    TierName.HOST: "host memory",
    TierName.DISK: "disk",
}
