"""`kvstore import`: blocks of an archive into a store."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, BinaryIO

import typer

from kvstore.cli.export import EXIT_BAD, PIPE
from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, progress
from kvstore.importing import Imported, import_archive
from kvstore.sizes import format_size

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="An archive of `export`; - for standard input.")
]
PartialOption = Annotated[
    bool,
    typer.Option(
        "--partial",
        help="Take what is whole of an archive that is cut off or damaged, block by block.",
    ),
]


def import_(
    file: FileArgument,
    store: StoreOption,
    partial: PartialOption = False,
    as_json: JsonOption = False,
) -> None:
    """Import an archive into a store that is not in use. The store is opened for the moment.

    Without --partial an archive that is not whole imports nothing: a FILE is read twice, and what
    comes from a pipe is first copied to the folder for temporary files. Each block is checked, and
    its key is computed anew. Blocks that are there stay as they are, and none gives way: where the
    disk is full the rest is left out. Exit code 1 if a block was refused for what it is, or with
    --partial if the archive was not whole.

    Import only what you would run: the checks find damage, not a forger.
    """
    shown = not as_json
    with _source(file, staged=not partial) as source, progress("Reading", shown=shown) as advance:
        done = import_archive(store, source, advance, partial=partial)
    if as_json:
        print_json(done.document())
    else:
        _print(done)
    if done.bad:
        raise typer.Exit(EXIT_BAD)


@contextmanager
def _source(file: str, *, staged: bool) -> Iterator[BinaryIO]:
    """The archive to read from; what cannot be read twice is copied, if it must be."""
    if file != PIPE:
        with open(file, "rb") as opened:
            if opened.seekable() or not staged:
                yield opened
                return
            with _copy(opened) as copied:
                yield copied
    elif staged:
        with _copy(sys.stdin.buffer) as copied:
            yield copied
    else:
        yield sys.stdin.buffer


@contextmanager
def _copy(source: BinaryIO) -> Iterator[BinaryIO]:
    sys.stderr.write(
        f"kvstore: copying the archive to {tempfile.gettempdir()} first, to check it; "
        "--partial imports it as it comes\n"
    )
    with tempfile.TemporaryFile() as copied:
        shutil.copyfileobj(source, copied)
        copied.seek(0)
        yield copied


def _print(done: Imported) -> None:
    print_lines(
        f"{done.imported} blocks imported, {done.present} were there already, "
        f"{sum(done.refused.values())} refused; {format_size(done.bytes)} in {done.seconds:.1f} s"
    )
    print_lines(*(f"refused: {blocks} blocks, {why}" for why, blocks in done.refused.items()))
    if not done.complete:
        print_lines(f"The archive is not whole. {done.fault}".rstrip())
