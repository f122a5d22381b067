"""`kvstore invalidate`: blocks that must not be served again leave every tier."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.alone import opened_alone
from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines
from kvstore.clock import Clock
from kvstore.control import call
from kvstore.home import owner_alive, require_store
from kvstore.invalidation import Invalidated, Scope
from kvstore.labels import shown
from kvstore.sizes import format_size
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo

EXIT_NOT_DURABLE = 1
LABELS_SHOWN_MAX = 20


def invalidate(
    store: StoreOption,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="A namespace: its digest in hex, or the first 8 digits or more.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="All of a model, or with --tenant.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="All of a tenant, or with --model.", show_default=False)
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="A block, by its key as `kvstore ls` prints it, and all computed from it.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks of the store.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Drop blocks from every tier at once, as after new weights; none is served again.

    The store's owner does it while it runs; loads under way end as a miss, and nothing is saved of
    requests that began before. A namespace whose model and tenant were lost with the catalogue
    counts as every model's and every tenant's. Exit code 1 if the disk did not take it: then the
    next owner may serve these blocks again.
    """
    scope = Scope(namespace, model, tenant, prefix, everything)
    if everything and not yes:
        if not sys.stdin.isatty():
            raise ConfigError("--all drops every block of the store; say --yes as well")
        typer.confirm(f"Drop every block of {store}?", abort=True, err=True)
    done, labels = _carry_out(store, scope)
    if as_json:
        print_json(asdict(done))
    else:
        print_lines(
            f"{done.blocks} blocks, {format_size(done.bytes)}, of {done.namespaces} namespaces "
            f"dropped; {'durable' if done.durable else 'not durable'}"
        )
        if not done.blocks and labels:
            listed = ", ".join(labels[:LABELS_SHOWN_MAX])
            print_lines(f"The store has blocks, or had, of: {listed}")
    if not done.durable:
        sys.stderr.write(
            "kvstore: the disk did not take it, so a restart may bring these blocks back; "
            "free some space or check the device, and ask again\n"
        )
        raise typer.Exit(EXIT_NOT_DURABLE)


def _carry_out(directory: Path, scope: Scope) -> tuple[Invalidated, list[str]]:
    """What was done, and which models and tenants the store knows."""
    io = FileIo()
    require_store(directory, io)
    if owner_alive(directory, io):
        given = {name: value for name, value in asdict(scope).items() if value not in (None, False)}
        answer: dict[str, Any] = call(directory, "invalidate", given)
        labels = [str(label) for label in answer.pop("labels")]
        return Invalidated(**answer), labels
    with opened_alone(directory, io, Clock()) as opened:
        done = opened.invalidator.invalidate(scope)
        known = opened.disk.namespaces().values() if opened.disk is not None else ()
        return done, sorted({shown(namespace.label) for namespace in known})
