"""`kvstore verify`: read every stored block and check it."""

import sys
from typing import Annotated

import typer

from kvstore.bad_block import BadBlock
from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, print_table, progress
from kvstore.scrub import RATE_BESIDE_OWNER_BYTES, Verification, verify_store
from kvstore.scrub_repair import Repair, repair_store
from kvstore.sizes import format_size, parse_size

EXIT_BAD = 1
BAD_SHOWN_MAX = 50

RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="SIZE",
        help="Bytes to read in a second at most; 0 for no limit. Unless told there is none, but "
        f"{format_size(RATE_BESIDE_OWNER_BYTES)} while the store is in use.",
        show_default=False,
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on where the last run was interrupted.")
]
RepairOption = Annotated[
    bool,
    typer.Option(
        "--repair",
        help="Drop what is bad, and what was computed from it, so that the next save writes it "
        "again; by the store's owner, or where there is none by opening the store for the moment.",
    ),
]


def verify(
    store: StoreOption,
    rate: RateOption = None,
    resume: ResumeOption = False,
    repair: RepairOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read every block on disk and check it. The store may be in use.

    A block is bad when its bytes are not those that were saved, or when the block before it in its
    prompt is not there. The store serves none of these: it finds them out itself, at the latest
    when they are asked for. Nothing is changed without --repair. Exit code 1 if any block is bad,
    or with --repair if any still is; 130 after an interrupt, which keeps the position for --resume.
    """
    rate_bytes = None if rate is None else parse_size(rate, "--rate")
    try:
        with progress("Reading", shown=not as_json) as advance:
            found = verify_store(store, advance, rate_bytes=rate_bytes, resume=resume)
    except KeyboardInterrupt:
        sys.stderr.write("kvstore: interrupted; verify --resume goes on from here\n")
        raise
    done = repair_store(store, found.bad) if repair and found.bad else None
    if as_json:
        print_json(found.document() | ({} if done is None else {"repair": done.document()}))
    else:
        _print(found)
        if done is not None:
            _print_repair(done)
    if found.bad if done is None else done.left:
        raise typer.Exit(EXIT_BAD)


def _print(found: Verification) -> None:
    rate = format_size(found.bytes / found.seconds) if found.seconds else "0 B"
    print_lines(
        f"{found.blocks} blocks, {format_size(found.bytes)}, read in {found.seconds:.1f} s "
        f"({rate}/s{', the interrupted run included' if found.resumed else ''}); "
        f"{len(found.bad)} bad"
    )
    if found.unchecked:
        print_lines(
            f"Of {found.unchecked} only the header was checked: their layout was lost with the "
            "catalogue and comes back when their model is served again."
        )
    print_bad(found.bad)


def _print_repair(done: Repair) -> None:
    print_lines(
        f"{done.dropped} bad blocks dropped, and {done.descendants} that were computed from them; "
        "the next save writes them again."
    )
    if done.left:
        print_lines(f"{len(done.left)} could not be repaired:")
        print_bad(done.left)
    else:
        print_lines("All is whole now.")


def print_bad(bad: list[BadBlock]) -> None:
    """A table of bad blocks, the first BAD_SHOWN_MAX of them."""
    if bad:
        rows = [[block.key, block.reason, block.place] for block in bad[:BAD_SHOWN_MAX]]
        print_table("Bad blocks", ["key", "reason", "place"], rows)
    if len(bad) > BAD_SHOWN_MAX:
        print_lines(f"and {len(bad) - BAD_SHOWN_MAX} more; --json lists all")
