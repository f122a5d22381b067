"""`kvstore bench`: how fast this machine looks up, copies and reads blocks."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.measure import measure_disk, measure_host, measure_lookup
from kvstore.cli.options import JsonOption
from kvstore.cli.output import print_json, print_table, progress
from kvstore.sizes import format_size, parse_size


class Part(StrEnum):
    """What to measure."""

    ALL = "all"
    LOOKUP = "lookup"
    HOST = "host"
    DISK = "disk"


def bench(
    part: Annotated[Part, typer.Argument(help="Which part to measure.")] = Part.ALL,
    directory: Annotated[
        Path,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where to make the store that is measured; it is removed at the end.",
        ),
    ] = Path(),
    size: Annotated[
        str, typer.Option("--size", help="Bytes to move in each direction, as 512MiB.")
    ] = "256MiB",
    block: Annotated[str, typer.Option("--block", help="Bytes in a block, as 360KiB.")] = "360KiB",
    as_json: JsonOption = False,
) -> None:
    """Measure lookups, host memory and the disk with a store of its own. Touches no other store.

    Each rate is the median of several rounds, with checksums on. It is payload bytes a second.
    """
    total_bytes, block_bytes = parse_size(size, "--size"), parse_size(block, "--block")
    document: dict[str, object] = {"block_bytes": block_bytes, "size_bytes": total_bytes}
    with progress("Measuring", shown=not as_json) as advance:
        if part in (Part.ALL, Part.LOOKUP):
            document["lookup"] = lookup = measure_lookup(advance)
        if part in (Part.ALL, Part.HOST):
            document["host"] = host = measure_host(block_bytes, total_bytes, advance)
        if part in (Part.ALL, Part.DISK):
            document["disk"] = disk = measure_disk(directory, block_bytes, total_bytes, advance)
    if as_json:
        print_json(document)
        return
    if part in (Part.ALL, Part.LOOKUP):
        rows = [[name, f"{value:.3f}"] for name, value in lookup.items() if name.endswith("_ms")]
        print_table(f"Lookup of {lookup['tokens']:.0f} tokens", ["", "milliseconds"], rows)
    for title, rates in (("Host memory", host), ("Disk", disk)) if part == Part.ALL else ():
        _print_rates(title, rates)
    if part in (Part.HOST, Part.DISK):
        _print_rates(part.value.capitalize(), host if part == Part.HOST else disk)


def _print_rates(title: str, rates: dict[str, float]) -> None:
    rows = [
        [name.removesuffix("_bytes_per_s"), f"{format_size(rate)}/s"]
        for name, rate in rates.items()
        if name.endswith("_bytes_per_s")
    ]
    print_table(title, ["", "rate"], rows)
