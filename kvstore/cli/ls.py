"""`kvstore ls`: which blocks lie on disk."""

from itertools import islice
from typing import Annotated

import typer

from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, print_table
from kvstore.inspect import list_blocks
from kvstore.sizes import format_size

SHOWN_DEFAULT = 50


def ls(
    store: StoreOption,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="How many blocks to list; 0 for all.")
    ] = SHOWN_DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """List the blocks on disk, in the order of their places. The store may be in use."""
    blocks = list_blocks(store)
    shown = list(islice(blocks, limit or None))
    left = sum(1 for _ in blocks)
    if as_json:
        documents = [block.document() for block in shown]
        print_json({"blocks": documents, "not_listed": left})
        return
    rows = [
        [
            block.key,
            block.label,
            f"{block.first_token}-{block.first_token + block.block_tokens - 1}",
            format_size(block.slot_bytes),
            block.place,
        ]
        for block in shown
    ]
    print_table("Blocks", ["key", "model and tenant", "tokens", "size", "place"], rows)
    print_lines(f"{len(shown)} blocks listed, {left} more")
