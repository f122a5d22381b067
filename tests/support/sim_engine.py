"""An engine of the simulation: a few small pages, requests that share prefixes, and the oracle.

The bytes of a block follow from its tenant and all tokens up to its end, and not from any key of
the store: what a page must hold is known without asking the store.
"""

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.loading import Load
from kvstore.pool import PagePool
from kvstore.saving import Save
from kvstore.sequence import Sequence
from kvstore.space import Space
from kvstore.store import Store
from kvstore.ticket import Ticket
from kvstore.tiers.layout import CacheGroup, Layout

UNITS = 48
UNTOUCHED = 0xEE
SMALL = Layout(4, (CacheGroup("full", 2, (1000, 1000), "uint8"),))  # slots of 8 KiB
LARGE = Layout(2, (CacheGroup("opaque", 1, (9000, 31), "page", format="x"),))  # of 16 KiB
Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=4096)
def payload(size: int, tenant: str, version: int, tokens: bytes) -> bytes:
    """The bytes of the block that these tokens end with. The oracle: nothing else is right."""
    seed = xxhash.xxh3_64_intdigest(tokens + bytes([version]), ord(tenant))
    words = np.arange(-(-size // 8), dtype=np.uint64) + np.uint64(seed >> 1)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.tobytes()[:size]


@dataclass(eq=False)
class Request:
    """A sequence whose pages the engine keeps. saves: those under way."""

    engine: "SimEngine"
    sequence: Sequence
    pages: list[int]  # of its blocks
    version: int  # of the bytes that it computes
    saves: list[Save] = field(default_factory=list)

    def collect(self) -> None:
        self.saves = [save for save in self.saves if not save.done]


@dataclass(eq=False)
class LoadUnderWay:
    """A load, the pages that it fills and that the engine may not touch.

    held: blocks that the engine has already, in this version; they may not be touched either.
    """

    engine: "SimEngine"
    ticket: Ticket
    load: Load
    pages: list[int]
    held: int
    version: int


class SimEngine:
    """Pages of one layout, for one tenant. A block is a page, or two: a unit here."""

    def __init__(
        self, layout: Layout, tenant: str, pages_per_block: int, versions: dict[str, set[int]]
    ) -> None:
        """versions: of each tenant's bytes, those that may be served; the last is computed now."""
        self.layout, self.tenant, self.per = layout, tenant, pages_per_block
        self._versions = versions
        self.arrays = [
            np.full((UNITS * pages_per_block, int(length) // pages_per_block), UNTOUCHED, np.uint8)
            for length in layout.run_lengths
        ]
        self.pool = PagePool(layout, self.arrays, layout.block_tokens // pages_per_block)
        self.free = list(range(UNITS))
        self.requests: list[Request] = []
        self.loads: list[LoadUnderWay] = []
        self.space: Space

    def connect(self, store: Store) -> None:
        """The process of a new store: all that was under way is gone."""
        self.space = store.namespace(self.layout, model="m", tenant=self.tenant, mixed=True)
        self.free = list(range(UNITS))
        self.requests.clear()
        self.loads.clear()

    # --- requests

    def tokens(self, rng: random.Random, blocks: int) -> list[int]:
        """Tokens of whole blocks. Few choices for each, so prefixes are shared."""
        codes = [rng.choice((0, 0, 0, 1, 2)) for _ in range(blocks)]
        return [code for code in codes for _ in range(self.layout.block_tokens)]

    def sequence(self, rng: random.Random, blocks: int) -> Sequence:
        """A prompt of whole blocks and one token more."""
        return self.space.sequence(np.array([*self.tokens(rng, blocks), 7], np.int32))

    def start(self, rng: random.Random, blocks: int) -> Request | None:
        """Prefill a prompt; None when there are no pages for it."""
        pages = self._take(blocks)
        if pages is None:
            return None
        request = Request(self, self.sequence(rng, blocks), pages, self.version)
        self.requests.append(request)
        self._compute(request, 0)
        return request

    def extend(self, rng: random.Random, request: Request, blocks: int) -> bool:
        """Decode so many blocks more."""
        pages = self._take(blocks)
        if pages is None:
            return False
        size, sequence = self.layout.block_tokens, request.sequence
        first = sequence.blocks
        tokens = self.tokens(rng, blocks)[sequence.length - first * size :]
        sequence.extend(np.array([*tokens, 7], np.int32))
        request.pages += pages
        self._compute(request, first)
        return True

    def save(self, request: Request) -> Save:
        save = request.sequence.save(self.pool, self._table(request.pages))
        request.saves.append(save)
        return save

    def end(self, request: Request) -> None:
        """Forget a request. Its pages are overwritten by whoever takes them next."""
        request.collect()
        if not request.saves:
            self.requests.remove(request)
            self.free += request.pages

    def _compute(self, request: Request, first: int) -> None:
        for block in range(first, request.sequence.blocks):
            self._fill(request.sequence, block, request.pages[block], request.version)

    # --- loads

    def load(self, ticket: Ticket, skip_blocks: int) -> LoadUnderWay | None:
        """Start a load. Of the first blocks, which the engine says it has, the pages are right."""
        pages = self._take(ticket.blocks)
        if pages is None:
            return None
        for block, page in enumerate(pages):
            if block < skip_blocks:
                self._fill(ticket.sequence, block, page, self.version)
            else:
                for array in self.arrays:
                    array[page * self.per : (page + 1) * self.per] = UNTOUCHED
        skip = min(skip_blocks, ticket.blocks) * self.layout.block_tokens
        load = ticket.load(self.pool, self._table(pages), skip_tokens=skip)
        under_way = LoadUnderWay(self, ticket, load, pages, skip_blocks, self.version)
        self.loads.append(under_way)
        return under_way

    def wrong(self, under_way: LoadUnderWay, tokens: int) -> list[int]:
        """Blocks among the first `tokens` tokens whose pages do not hold exactly their bytes."""
        sequence, bad = under_way.ticket.sequence, []
        for block in range(tokens // self.layout.block_tokens):
            first = under_way.pages[block] * self.per
            held = b"".join([a[first : first + self.per].tobytes() for a in self.arrays])
            versions = self._versions[self.tenant]
            if block < under_way.held:
                versions = {under_way.version}
            if all(held != self._payload(sequence, block, version) for version in versions):
                bad.append(block)
        return bad

    def finish(self, under_way: LoadUnderWay) -> None:
        self.loads.remove(under_way)
        self.free += under_way.pages

    # --- pages

    def _take(self, blocks: int) -> list[int] | None:
        """Units for so many blocks; the oldest requests make room."""
        for request in list(self.requests):
            if len(self.free) >= blocks:
                break
            self.end(request)
        if len(self.free) < blocks:
            return None
        taken, self.free = self.free[:blocks], self.free[blocks:]
        return taken

    def _table(self, pages: list[int]) -> Any:
        return np.array([page * self.per + n for page in pages for n in range(self.per)], np.int64)

    @property
    def version(self) -> int:
        """Of the bytes that are computed now."""
        return max(self._versions[self.tenant])

    def _payload(self, sequence: Sequence, block: int, version: int) -> bytes:
        end = (block + 1) * self.layout.block_tokens
        tokens = sequence.tokens[:end].tobytes()
        return payload(self.layout.payload_bytes, self.tenant, version, tokens)

    def _fill(self, sequence: Sequence, block: int, page: int, version: int) -> None:
        wanted = np.frombuffer(self._payload(sequence, block, version), np.uint8)
        at = 0
        for array in self.arrays:
            size = array.shape[1] * self.per
            array[page * self.per : (page + 1) * self.per] = wanted[at : at + size].reshape(
                self.per, -1
            )
            at += size
