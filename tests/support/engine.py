"""An engine as the store sees one: pages of every run, and bytes that follow from a block's key.

So a test, or another process after a kill, can say what a loaded page must hold without having
kept it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.loading import LoadResult
from kvstore.saving import SaveResult
from kvstore.sequence import Sequence
from kvstore.space import Space
from kvstore.ticket import Ticket
from kvstore.tiers.layout import Layout

WAIT_S = 60.0
UNTOUCHED = 0xEE
Page = npt.NDArray[np.uint8]
MakeArray = Callable[[int, int], Any]


def payload_of(layout: Layout, key: bytes) -> Page:
    """The bytes of the block with this key: uint8 [payload_bytes], as random as they need be."""
    words = np.arange(-(-layout.payload_bytes // 8), dtype=np.uint64)
    words += np.uint64(int.from_bytes(key[:8], "little") ^ int.from_bytes(key[8:], "little"))
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[: layout.payload_bytes]


def plain_array(pages: int, page_bytes: int) -> Page:
    """A contiguous array of pages."""
    return np.full((pages, page_bytes), UNTOUCHED, np.uint8)


class Engine:
    """Pages of one space. `pages` pages of block_tokens / pages_per_block tokens each."""

    def __init__(
        self, space: Space, pages: int, pages_per_block: int = 1, make: MakeArray = plain_array
    ) -> None:
        self.space = space
        self.layout = space.layout
        self.pages_per_block = pages_per_block
        self.pages = pages
        lengths = [int(length) // pages_per_block for length in self.layout.run_lengths]
        self.arrays = [make(pages, length) for length in lengths]
        self.pool = space.pool(self.arrays, self.layout.block_tokens // pages_per_block)

    def table(self, blocks: int, seed: int = 0) -> npt.NDArray[np.int64]:
        """A block table of `blocks` blocks in random order, no page twice."""
        order = np.random.default_rng(seed).permutation(self.pages)
        return order[: blocks * self.pages_per_block].astype(np.int64)

    def write(self, page: int, run: int, piece: Page) -> None:
        """One page's piece of a run."""
        self.arrays[run][page] = piece.reshape(self.arrays[run][page].shape)

    def read(self, page: int, run: int) -> bytes:
        """One page's piece of a run."""
        return bytes(np.ascontiguousarray(self.arrays[run][page]).tobytes())

    def payload(self, key: bytes) -> Page:
        """What this engine computes for the block with this key."""
        return payload_of(self.layout, key)

    def compute(self, sequence: Sequence, table: npt.NDArray[np.int64]) -> None:
        """What a prefill does: every full block's pages get the block's bytes."""
        for block in range(sequence.blocks):
            payload = self.payload(sequence.keys[block].tobytes())
            for run, page, piece in self._pieces(table, block):
                self.write(page, run, payload[piece])

    def wrong(self, sequence: Sequence, table: npt.NDArray[np.int64], tokens: int) -> list[int]:
        """Blocks among the first `tokens` tokens whose pages do not hold exactly their bytes."""
        bad = []
        for block in range(tokens // self.layout.block_tokens):
            payload = self.payload(sequence.keys[block].tobytes())
            pieces = self._pieces(table, block)
            if any(self.read(p, run) != payload[at].tobytes() for run, p, at in pieces):
                bad.append(block)
        return bad

    def clear(self) -> None:
        """Forget everything: no byte of an earlier request is left."""
        for array in self.arrays:
            array[:] = UNTOUCHED

    def _pieces(self, table: npt.NDArray[np.int64], block: int) -> list[tuple[int, int, slice]]:
        """(run, page, where in the payload) of every piece of a block."""
        found = []
        for run, array_bytes in enumerate(self.layout.run_lengths.tolist()):
            size = array_bytes // self.pages_per_block
            for number in range(self.pages_per_block):
                at = int(self.layout.run_offsets[run]) + number * size
                page = int(table[block * self.pages_per_block + number])
                found.append((run, page, slice(at, at + size)))
        return found

    # --- whole requests

    def save(self, tokens: Any, **options: Any) -> tuple[Sequence, SaveResult]:
        """Compute a prompt and save it."""
        sequence = self.space.sequence(tokens, **options)
        table = self.table(sequence.blocks)
        self.compute(sequence, table)
        return sequence, sequence.save(self.pool, table).result(WAIT_S)

    def load(self, ticket: Ticket, seed: int = 1, **options: Any) -> LoadResult:
        """Load a ticket into cleared pages and check every byte of what is said to be usable."""
        self.clear()
        table = self.table(max(ticket.blocks, 1), seed)
        result = ticket.load(self.pool, table, **options).result(WAIT_S)
        held = options.get("skip_tokens", ticket.skip_tokens) // self.layout.block_tokens
        assert all(block < held for block in self.wrong(ticket.sequence, table, result.tokens))
        return result

    def ask(self, tokens: Any, **options: Any) -> LoadResult:
        """Look a prompt up and load what there is."""
        with self.space.sequence(tokens, **options).lookup() as ticket:
            return self.load(ticket)


def prompt(length: int, seed: int = 1) -> npt.NDArray[np.int32]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 50_000, length, dtype=np.int32)
