"""What the commands print: JSON for scripts on stdout, tables for people, progress on stderr."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

PROGRESS_AFTER_S = 2.0  # Shorter work shows no bar: it would only flicker.
WIDTH_WITHOUT_TERMINAL = 100


class ProgressCall(Protocol):
    """Called now and then by long work with what is done and what there is to do, in bytes."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None: ...


def print_json(document: dict[str, Any]) -> None:
    """One JSON document, on stdout, on one line: what scripts read."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def print_lines(*lines: str) -> None:
    """Plain lines on stdout, never wrapped or coloured."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout: the first column to the left, the others, being numbers, to the right."""
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=width, highlight=False, markup=False).print(table)


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[ProgressCall]:
    """A bar on stderr for work that takes longer than PROGRESS_AFTER_S; none when not `shown`."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=None)
    began_s = time.monotonic()

    def advance(done_bytes: int, total_bytes: int) -> None:
        if shown and not bar.live.is_started and time.monotonic() - began_s > PROGRESS_AFTER_S:
            bar.start()
        bar.update(task, completed=done_bytes, total=total_bytes)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
