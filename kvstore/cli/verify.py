"""`kvstore verify`: read every stored block and check it."""

import typer

from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, print_table, progress
from kvstore.inspect import verify_store
from kvstore.sizes import format_size

EXIT_BAD = 1
BAD_SHOWN_MAX = 50


def verify(store: StoreOption, as_json: JsonOption = False) -> None:
    """Read every block on disk and check it. Changes nothing; the store may be in use.

    A block is bad when its bytes are not those that were saved. The store serves none of these: it
    finds them out itself, at the latest when they are asked for. Exit code 1 if any block is bad.
    """
    with progress("Reading", shown=not as_json) as advance:
        found = verify_store(store, advance)
    if as_json:
        print_json(found.document())
    else:
        rate = format_size(found.bytes / found.seconds) if found.seconds else "0 B"
        print_lines(
            f"{found.blocks} blocks, {format_size(found.bytes)}, read in {found.seconds:.1f} s "
            f"({rate}/s); {len(found.bad)} bad"
        )
        if found.unchecked:
            print_lines(
                f"Of {found.unchecked} only the header was checked: their layout was lost with the "
                "catalogue and comes back when their model is served again."
            )
        if found.bad:
            rows = [[bad.key, bad.reason, bad.place] for bad in found.bad[:BAD_SHOWN_MAX]]
            print_table("Bad blocks", ["key", "reason", "place"], rows)
        if len(found.bad) > BAD_SHOWN_MAX:
            print_lines(f"and {len(found.bad) - BAD_SHOWN_MAX} more; --json lists all")
    if found.bad:
        raise typer.Exit(EXIT_BAD)
