"""`kvstore pin`: prefixes that are to be kept, whatever else comes."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.alone import opened_alone
from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, print_table
from kvstore.clock import Clock
from kvstore.control import call
from kvstore.home import owner_alive, require_store
from kvstore.pin_outcomes import PinRefusal, document
from kvstore.sizes import format_duration, format_size, parse_duration
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo

EXIT_REFUSED = 1
TTL_DEFAULT = "1d"
SENTENCES = {
    PinRefusal.OVER_BUDGET: "pins may keep only a share of the store, and this one is beyond it; "
    "remove another, or open the store with a larger pin_fraction",
    PinRefusal.NOT_STORED: "no block has this key; `kvstore ls` lists the keys there are",
    PinRefusal.TOO_MANY: "there are as many pins as there may be; remove one first",
    PinRefusal.STARTING: "the store is still starting; try again when it has started",
    PinRefusal.NOT_WRITTEN: "the list of pins cannot be written; free some space or check the disk",
}


def pin(
    store: StoreOption,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Keep this block, by its key as `kvstore ls` prints it, and all before it.",
            show_default=False,
        ),
    ] = None,
    ttl: Annotated[
        str, typer.Option(metavar="TIME", help="How long after its last hit: 90s, 15m, 1h, 2d.")
    ] = TTL_DEFAULT,
    shown: Annotated[bool, typer.Option("--list", help="List the pins.")] = False,
    remove: Annotated[
        int | None,
        typer.Option(metavar="ID", min=1, help="Remove a pin.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a prefix from eviction, list what is kept, or keep it no longer.

    The store's owner does it while it runs; without one the store is opened for the moment. A block
    that is pinned already is renewed with the new time. Exit code 1 if the pin is refused, because
    all pins together keep only a share of each tier, or if there is no pin to remove.
    """
    if sum((prefix is not None, shown, remove is not None)) != 1:
        raise ConfigError("say one of --prefix KEY, --list and --remove ID")
    if prefix is not None:
        asked = {"key": prefix, "ttl_s": parse_duration(ttl, "--ttl")}
        _print_pin(_carry_out(store, "pin", asked), as_json)
    elif remove is not None:
        _print_removed(_carry_out(store, "unpin", {"pin_id": remove}), remove, as_json)
    else:
        _print_list(_carry_out(store, "pins", {})["pins"], as_json)


def _carry_out(directory: Path, command: str, asked: dict[str, Any]) -> dict[str, Any]:
    io = FileIo()
    require_store(directory, io)
    if owner_alive(directory, io):
        return call(directory, command, asked)
    with opened_alone(directory, io, Clock()) as parts:
        pins = parts.placement.pins
        if command == "pin":
            return document(pins.pin(asked["key"], asked["ttl_s"], None))
        if command == "unpin":
            return {"removed": pins.unpin(asked["pin_id"])}
        return {"pins": [asdict(one) for one in pins.pins()]}


def _print_pin(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    if answer["pin"] is None:
        sys.stderr.write(f"kvstore: not pinned: {SENTENCES[PinRefusal(answer['refused'])]}\n")
        raise typer.Exit(EXIT_REFUSED)
    if not as_json:
        one = answer["pin"]
        print_lines(
            f"pin {one['pin_id']}: {one['blocks']} blocks, {format_size(one['bytes'])}, kept until "
            f"{format_duration(one['ttl_s'])} after the last hit"
        )


def _print_removed(answer: dict[str, Any], pin_id: int, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    if not answer["removed"]:
        sys.stderr.write(f"kvstore: there is no pin {pin_id}; --list shows those there are\n")
        raise typer.Exit(EXIT_REFUSED)
    if not as_json:
        print_lines(f"pin {pin_id} removed")


def _print_list(pins: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"pins": pins})
        return
    now_s = Clock().time()
    rows = [
        [
            str(one["pin_id"]),
            one["key"],
            one["label"],
            f"{one['stored_blocks']} of {one['blocks']}",
            format_size(one["bytes"]),
            format_duration(one["ttl_s"]),
            format_duration(one["expires_at"] - now_s),
        ]
        for one in pins
    ]
    columns = ["pin", "key", "model and tenant", "blocks stored", "size", "time", "left"]
    print_table("Pins", columns, rows)
