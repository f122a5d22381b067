"""`kvstore export`: blocks of a store as one archive."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, progress
from kvstore.exporting import Exported, Selection, export_store
from kvstore.sizes import format_size
from kvstore.tiers.errors import ConfigError

EXIT_BAD = 1
PIPE = "-"

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="The archive to write; - for standard output.")
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", metavar="HEX", help="Only this one: its digest, or how it begins."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Only blocks of this model, as `ls` shows it.")
]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Only blocks of this tenant.")]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="KEY",
        help="Only the block with this key, those before it, and all that were computed from it.",
    ),
]


def export(
    file: FileArgument,
    store: StoreOption,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write blocks of a store into an archive, which `import` reads. The store may be in use.

    An archive holds the token ids of the blocks, their keys and values, and the names of model and
    tenant; no salt. Each block is checked; one that is bad is left out, with all that was computed
    from it, and the exit code is 1. A FILE that exists is not written over.
    """
    selection = Selection(namespace, model, tenant, prefix)
    if file == PIPE:
        if as_json or sys.stdout.isatty():
            raise ConfigError("the archive itself goes to standard output; give a FILE instead")
        done = export_store(store, sys.stdout.buffer.write, selection)
        sys.stdout.buffer.flush()
        sys.stderr.write("\n".join(_lines(done)) + "\n")
    else:
        done = _to_file(Path(file), store, selection, shown=not as_json)
        if as_json:
            print_json(done.document())
        else:
            print_lines(*_lines(done))
    if done.bad:
        raise typer.Exit(EXIT_BAD)


def _to_file(path: Path, store: Path, selection: Selection, *, shown: bool) -> Exported:
    """Write the file: whole or not at all."""
    if path.exists():
        raise ConfigError(f"{path} exists already; give a name that does not")
    part = path.with_name(path.name + ".part")
    try:
        with progress("Writing", shown=shown) as advance, open(part, "wb") as sink:
            done = export_store(store, sink.write, selection, advance)
        part.rename(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return done


def _lines(done: Exported) -> list[str]:
    lines = [
        f"{done.blocks} blocks of {done.namespaces} namespaces, {format_size(done.bytes)}, "
        f"written in {done.seconds:.1f} s"
    ]
    left_out = {
        "bad": done.bad,
        "that left the store meanwhile": done.gone,
        "below one that was left out": done.below,
        "whose layout was lost": done.unchecked,
    }
    lines += [f"left out: {blocks} blocks {why}" for why, blocks in left_out.items() if blocks]
    return lines
