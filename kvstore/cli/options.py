"""Options that several commands share, so that each has one name and one sentence."""

from pathlib import Path
from typing import Annotated

import typer

StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        metavar="DIR",
        help="The store's directory: the first of its disk paths. It may be in use.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.")
]
