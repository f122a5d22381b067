"""The device tier: pages of keys and values, who uses them, and which prefixes they hold.

A page holds `page_tokens` consecutive tokens of one sequence in every layer. A page is in exactly
one of three states, and their counts add up to the pool:

    free     nobody uses it and nothing in it can be found
    cached   nobody uses it, and its block can be found and given to the next request that asks
    in use   one or more users: requests, and copies of the store that still read or write it

Full blocks are shared by giving the same page to several requests; nothing is copied. When pages
run out, cached ones are evicted, leaves first and coldest first.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.eviction import Evictor
from kvstore.index import Index
from kvstore.runtime.compute import Compute
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.layout import Layout

PAGES_MAX = 1 << 24
COPY_WAIT_S = 30.0  # longest wait for a copy to give its pages back
PAUSE_S = 0.0005

Ints = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]


class Copy(Protocol):
    """A save or a load of the store that still touches pages."""

    @property
    def done(self) -> bool: ...


class PagePool:
    """Pages of one model. Belongs to one thread; only copies of the store run beside it.

    keys, values: for each layer a tensor [pages, page_tokens, kv_heads, head_dim]; zero at first,
    so that what attention masks out is never a NaN left behind by somebody else.
    compute: the device in whose memory they lie; None for host memory.
    Raises ConfigError for sizes that make no sense or do not fit into memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        compute: Compute | None = None,
    ) -> None:
        if not 1 <= pages <= PAGES_MAX:
            raise ConfigError(f"pages= is {pages}; a pool has 1 to {PAGES_MAX} pages")
        self.layout = Layout.attention(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=str(dtype).removeprefix("torch."),
            block_tokens=page_tokens,
        )
        self.pages = pages
        self.page_tokens = page_tokens
        shape = (layers, 2, pages, page_tokens, kv_heads, head_dim)
        size = pages * self.layout.payload_bytes
        self.compute = compute
        try:
            storage = _storage(size, dtype, shape, compute)
        except (MemoryError, torch.OutOfMemoryError):
            raise ConfigError(f"no memory for {size >> 20} MiB of pages; lower pages=") from None
        self.keys: list[Tensor] = [storage[layer, 0] for layer in range(layers)]
        self.values: list[Tensor] = [storage[layer, 1] for layer in range(layers)]
        self._free = list(range(pages - 1, -1, -1))
        self._users = np.zeros(pages, np.int32)
        self._row = np.full(pages, -1, np.int32)  # the page's row in the index, or -1
        self._cached = 0
        self._copies: deque[tuple[Copy, list[int]]] = deque()
        self._index = Index((TierName.DEVICE,), rows_expected=min(pages, 1 << 20), rows_max=pages)
        self._space = self._index.add_space(page_tokens, self.layout.payload_bytes)
        self._evictor = Evictor(self._index, TierName.DEVICE)
        self.evicted = 0

    def arrays(self) -> list[Tensor]:
        """The tensors in the store's order of runs: K and V of layer 0, K and V of layer 1, ..."""
        return [part for pair in zip(self.keys, self.values, strict=True) for part in pair]

    # Pages and their users

    @property
    def available(self) -> int:
        """Pages that `allocate` may find: the free ones and those that can be evicted."""
        return len(self._free) + self._cached

    @property
    def cached(self) -> int:
        """Pages that nobody uses and whose blocks can be found."""
        return self._cached

    @property
    def in_use(self) -> int:
        """Pages with at least one user."""
        return self.pages - self.available

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one user, evicting cached blocks as needed; None for too few.

        Waits for nothing: pages of copies that are done are taken back first.
        """
        if count > len(self._free):
            self.reap_copies()
            if count > self.available:
                return None
            self._evict(count - len(self._free))
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._users[taken] = 1
        return taken

    def retain(self, pages: Sequence[int]) -> None:
        """One more user for each page, each named once; they are cached or in use."""
        ids = np.array(pages, np.int64)
        idle = ids[self._users[ids] == 0]
        self._users[ids] += 1
        self._cached -= len(idle)
        self._index.hold(self._row[idle])
        assert (self._row[idle] >= 0).all(), "a free page was given to a user without allocate"

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page, each named once. Without users it is cached, or free."""
        ids = np.array(pages, np.int64)
        self._users[ids] -= 1
        assert not len(ids) or self._users[ids].min() >= 0, "a page was given back twice"
        idle = ids[self._users[ids] == 0]
        rows = self._row[idle]
        self._free += idle[rows < 0].tolist()[::-1]
        self._index.unhold(rows[rows >= 0])
        self._cached += int((rows >= 0).sum())

    # Copies of the store

    def hold_for(self, copy: Copy, pages: Sequence[int]) -> None:
        """Make a save or a load a user of pages until it is done."""
        self.retain(pages)
        self._copies.append((copy, list(pages)))

    def reap_copies(self) -> bool:
        """Take back the pages of copies that are done. Returns whether there were any."""
        done = [pages for copy, pages in self._copies if copy.done]
        if done:
            self._copies = deque(entry for entry in self._copies if not entry[0].done)
        for pages in done:
            self.release(pages)
        return bool(done)

    def wait_copies(self, timeout_s: float = COPY_WAIT_S) -> bool:
        """Wait until a copy is done and its pages are back. Returns False if none is under way."""
        deadline = time.monotonic() + timeout_s
        while self._copies and time.monotonic() < deadline:
            if self.reap_copies():
                return True
            time.sleep(PAUSE_S)
        return False

    @property
    def copies(self) -> int:
        """Copies under way."""
        return len(self._copies)

    # Prefixes

    def find(self, keys: Keys, tokens: Ints) -> list[int]:
        """The pages of the longest prefix that can be found, which counts as its use.

        keys uint8 [n, 16], tokens int32 [n, page_tokens]. The pages are not retained yet.
        """
        rows = self._index.find(self._space, keys, tokens).rows
        self._index.touch(rows)
        pages: list[int] = self._index.slots(TierName.DEVICE, rows).tolist()
        return pages

    def publish(self, keys: Keys, tokens: Ints, pages: Sequence[int]) -> None:
        """Make the blocks of a prefix, root first, findable; the caller is a user of the pages.

        A block that another page holds already stays where it is: this page remains its user's
        own. After a hash collision the prefix cannot be extended, and nothing more is published.
        """
        ids = np.array(pages, np.int64)
        contents = np.zeros(len(ids), np.uint64)
        found = self._index.publish(TierName.DEVICE, self._space, -1, keys, tokens, ids, contents)
        new = ids[: len(found.rows)][found.placed]
        rows = found.rows[found.placed]
        self._row[new] = rows
        self._index.hold(rows)
        self._index.touch(found.rows)

    def _evict(self, count: int) -> None:
        """Free up to `count` cached pages, coldest leaves first, then their parents."""
        left = self._index.clear(TierName.DEVICE, self._evictor.coldest(count))
        self._forget(left.free_slots)
        self._cached -= len(left.rows)
        self.evicted += len(left.rows)

    def _forget(self, pages: npt.NDArray[np.int64]) -> None:
        self._row[pages] = -1
        self._free += pages.tolist()

    def clear(self) -> None:
        """Make every block unfindable, as after new weights. Pages in use stay their users'."""
        rows = self._index.rows_of()
        pages = self._index.slots(TierName.DEVICE, rows)
        used = self._users[pages] > 0
        self._index.unhold(rows[used])
        self._index.drop_space(self._space, TierName.DEVICE)
        self._row[pages[used]] = -1
        self._forget(pages[~used])
        self._cached = 0

    def check_integrity(self) -> None:
        """AssertionError if a page is in two states or none, or the index disagrees. For tests."""
        self._index.check_integrity()
        free = np.array(self._free, np.int64)
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert (self._users >= 0).all() and (self._users[free] == 0).all(), "a free page is in use"
        assert (self._row[free] == -1).all(), "a free page can be found"
        named = np.flatnonzero(self._row >= 0)
        cached = int((self._users[named] == 0).sum())
        assert cached == self._cached, f"{cached} pages are cached, {self._cached} counted"
        assert len(free) + cached + int((self._users > 0).sum()) == self.pages, "pages are lost"
        rows = self._row[named]
        assert len(named) == len(self._index), "the index finds other pages than the pool"
        assert (self._index.slots(TierName.DEVICE, rows) == named).all(), "a row has another page"
        assert self._index.uses.held == int((self._users[named] > 0).sum()), (
            "holds do not match users"
        )


def _storage(
    size_bytes: int, dtype: torch.dtype, shape: tuple[int, ...], compute: Compute | None
) -> Tensor:
    if compute is not None:
        with compute.active():
            return torch.zeros(shape, dtype=dtype, device=compute.tensors)
    # NumPy asks the system for large pages of memory, which torch does not.
    storage = torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(shape)
    # This also touches every page of memory now, not inside somebody's request.
    return storage.zero_()
