"""`kvstore resize`: other capacities, while the store is in use or without an owner."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.alone import opened_alone
from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines
from kvstore.clock import Clock
from kvstore.control import call
from kvstore.home import owner_alive, require_store
from kvstore.resizing import Resizer
from kvstore.sizes import format_size, parse_size
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo

EXIT_NOT_REACHED = 1
ANSWER_S = 3600.0  # Each segment that goes may have to be waited for.


def resize(
    store: StoreOption,
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory, until the owner ends.", show_default=False),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes on disk over all paths, from now on.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give a store more room or less, such as 20GiB; requests go on meanwhile.

    The store's owner does it while it runs; without one the disk's capacity is changed by opening
    the store for the moment. To shrink, what was used longest ago goes. Exit code 1 if blocks in
    use or a device kept the store from getting there: it says how far it came.
    """
    sizes = {
        name: parse_size(text, option)
        for name, text, option in (("host_bytes", host, "--host"), ("disk_bytes", disk, "--disk"))
        if text is not None
    }
    if not sizes:
        raise ConfigError("say what to resize: --host SIZE, --disk SIZE or both")
    done = _carry_out(store, sizes)
    if as_json:
        print_json(done)
    else:
        print_lines(
            f"host memory {format_size(done['host_bytes'])}, disk "
            f"{format_size(done['disk_bytes'])}; {done['evicted_blocks']} blocks gave way in "
            f"{done['seconds']:.1f} s"
        )
    if done["reason"] is not None:
        sys.stderr.write(
            f"kvstore: not all of it was reached ({done['reason']}); what is said above holds, "
            "ask again for the rest\n"
        )
        raise typer.Exit(EXIT_NOT_REACHED)


def _carry_out(directory: Path, sizes: dict[str, int]) -> dict[str, Any]:
    io = FileIo()
    require_store(directory, io)
    if owner_alive(directory, io):
        return call(directory, "resize", sizes, ANSWER_S)
    if "host_bytes" in sizes:
        raise ConfigError(
            "no process owns this store, so it has no host memory to resize; give --disk alone"
        )
    with opened_alone(directory, io, Clock()) as parts:
        return Resizer(parts, None).resize(None, sizes["disk_bytes"]).document()
