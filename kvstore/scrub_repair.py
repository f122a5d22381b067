"""`kvstore verify --repair`: what a scrub found bad is dropped; the next save writes it again.

The store's owner does it where there is one; else the store is opened for the moment, which also
mends its catalogue. In the end everything that was bad is read once more.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.alone import opened_alone
from kvstore.bad_block import BadBlock
from kvstore.clock import Clock
from kvstore.control import call
from kvstore.home import owner_alive, require_store
from kvstore.repair import Suspect, drop_bad_blocks
from kvstore.store_check import StoreCheck
from kvstore.tiers.io import FileIo

SUSPECTS = 128  # In one request to an owner, which serves other commands in between.
ANSWER_S = 300.0


@dataclass(frozen=True)
class Repair:
    """dropped: bad blocks that were dropped.  descendants: blocks that went with them.

    left: what is bad still.
    """

    dropped: int
    descendants: int
    left: list[BadBlock]

    def document(self) -> dict[str, Any]:
        """As `kvstore verify --json` prints it."""
        return {
            "dropped": self.dropped,
            "descendants": self.descendants,
            "left": [block.document() for block in self.left],
        }


def repair_store(
    directory: Path,
    bad: Sequence[BadBlock],
    io: FileIo | None = None,
    *,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Repair:
    """Drop what a scrub of the store in `directory` found, after reading it again.

    Raises ConfigError or StoreError for what is not a store, or an owner that cannot be asked.
    """
    io = io or FileIo()
    facts = require_store(directory, io)
    suspects = [Suspect(b.segment, b.index, bytes.fromhex(b.key)) for b in bad if b.key]
    parts = [suspects[at : at + SUSPECTS] for at in range(0, len(suspects), SUSPECTS)]
    dropped = descendants = 0
    if owner_alive(directory, io):
        for part in parts:
            blocks = [[one.segment, one.index, one.key.hex()] for one in part]
            answer = call(directory, "drop_bad_blocks", {"blocks": blocks}, ANSWER_S)
            dropped += int(answer["dropped"])
            descendants += int(answer["descendants"])
    else:
        with opened_alone(directory, io, clock or Clock()) as opened:
            for part in parts:
                done = drop_bad_blocks(opened.placement, opened.starter.numbers, part)
                dropped += done.dropped
                descendants += done.descendants
    return Repair(dropped, descendants, StoreCheck(directory, facts, io, pause).still_bad(bad))
