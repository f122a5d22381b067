"""The rows of an index: one row a block, held in whole arrays so that many rows cost one operation.

A row number is reused after its row was freed; `generation` counts up at each freeing, so whoever
keeps (row, generation) notices. No locks: the index's owner guards it.

The first 32 bytes of a row (HEAD) are what a lookup reads, so they share a cache line; the other
columns are arrays of their own, because selection reads one column of all rows.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

ROWS_MAX = 1 << 30  # rows of one index; a row number + 1 must fit the 32 bits of a table entry
SPACES_MAX = 0xFFFF
NO_SPACE = 0xFFFF  # `space` of a row that is free
NONE = -1
SPAN_MIN = 17  # fewer rows are indexed in less time than it takes to look at them

HIDDEN = 1  # flags: in no tier any more, cannot be found, and kept because someone still uses it
LEAVING = 2  # flags: being freed in this very call
MEDIA = 4  # flags: the block has a media digest
MEDIA_UNSEEN = 16  # flags: from a catalogue, which keeps no media digest; the header has it
VERIFIED = 8  # flags: the upper tier's bytes were checked since this owner started

KEPT = (1, 2)  # pinned: not to be evicted from the first tier, from the second
COVERED = 4  # pinned: some pin covers the block
PIN_END = 8  # pinned: some pin ends with the block

# kvstore/native/find.cpp reads this layout. upper and lower: the slots in the index's first and
# second tier, or -1.
HEAD = np.dtype(
    [
        ("key0", "<u8"),
        ("key1", "<u8"),
        ("parent", "<i4"),
        ("upper", "<i4"),
        ("lower", "<i4"),
        ("token_row", "<i4"),
    ]
)


FRESH_HEAD = np.array((0, 0, NONE, NONE, NONE, NONE), HEAD)
COLUMNS = (
    *("depth", "age", "leases", "holds", "space", "flags", "pinned", "generation", "content"),
    *("first_child", "next_sibling", "previous_sibling"),
)


class FreeList:
    """Row numbers that are free: a stack of returned ones over a high-water mark.

    Numbers come back deepest block first and are taken from the top, so a new chain gets the
    rows of an old one in their old order, next to each other.
    """

    def __init__(self) -> None:
        self.high = 0  # rows at and above it were never taken
        self._stack = np.zeros(256, np.int32)
        self._free = 0

    @property
    def used(self) -> int:
        """How many rows are taken."""
        return self.high - self._free

    def take(self, count: int) -> Ints:
        """`count` free rows, returned ones first. The caller grows its arrays to `high`."""
        reused = min(count, self._free)
        rows = np.empty(count, np.int32)
        rows[:reused] = self._stack[self._free - reused : self._free][::-1]
        rows[reused:] = np.arange(self.high, self.high + count - reused)
        self._free -= reused
        self.high += count - reused
        return rows

    def give(self, rows: Ints) -> None:
        """Take rows back. They must be taken ones, each once."""
        need = self._free + len(rows)
        if need > len(self._stack):
            self._stack = grown(self._stack, max(need, 2 * len(self._stack)))
        self._stack[self._free : need] = rows
        self._free = need

    def free(self) -> Ints:
        """The returned rows, for check_integrity."""
        return self._stack[: self._free]


class TokenPool:
    """Token ids of the blocks of one size: int32 [rows, block_tokens]."""

    def __init__(self, block_tokens: int, rows: int) -> None:
        self.tokens = np.zeros((rows, block_tokens), np.int32)
        self.list = FreeList()

    def store(self, tokens: Ints) -> Ints:
        """Keep tokens [n, block_tokens]; returns their token rows, int32 [n]."""
        rows = self.list.take(len(tokens))
        if self.list.high > len(self.tokens):
            self.tokens = grown(self.tokens, max(self.list.high, 2 * len(self.tokens)))
        self.tokens[span(rows)] = tokens
        return rows


class Rows:
    """The columns, and the tree that `parent` makes of the rows. Knows nothing of tiers' rules.

    rows_expected: rows to lay arrays out for at once; untouched ones take no memory.
    rows_max: the most rows there ever are; `allocate` returns fewer beyond it.
    """

    def __init__(self, rows_expected: int, rows_max: int) -> None:
        if not 1 <= rows_max <= ROWS_MAX:
            raise ValueError(f"rows_max must lie in 1..{ROWS_MAX}")
        self.rows_max = rows_max
        self.list = FreeList()
        self.pools: dict[int, TokenPool] = {}
        self.media: dict[int, bytes] = {}  # digests of the rows that have one
        self.space_block_tokens: Longs = np.zeros(0, np.int64)
        self.space_slot_bytes: Longs = np.zeros(0, np.int64)
        capacity = max(1, min(rows_expected, rows_max))
        self.heads = np.zeros(capacity, HEAD)
        self.depth = np.zeros(capacity, np.uint32)
        self.age = np.zeros(capacity, np.int64)
        # Children in each tier; -1 where the row itself is not in that tier, so that one
        # comparison with 0 selects the tier's leaves.
        self.children = (np.zeros(capacity, np.int32), np.zeros(capacity, np.int32))
        self.leases = np.zeros(capacity, np.int32)
        self.holds = np.zeros(capacity, np.int32)
        self.space = np.zeros(capacity, np.uint16)
        self.flags = np.zeros(capacity, np.uint8)
        self.pinned = np.zeros(capacity, np.uint8)
        self.generation = np.zeros(capacity, np.uint32)
        self.content = np.zeros(capacity, np.uint64)  # the record's generation, in every tier
        self.first_child = np.zeros(capacity, np.int32)
        self.next_sibling = np.zeros(capacity, np.int32)
        self.previous_sibling = np.zeros(capacity, np.int32)
        self._name_columns()

    def _name_columns(self) -> None:
        self.key0: npt.NDArray[np.uint64] = self.heads["key0"]
        self.key1: npt.NDArray[np.uint64] = self.heads["key1"]
        self.parent: Ints = self.heads["parent"]
        self.token_row: Ints = self.heads["token_row"]
        self.slots: tuple[Ints, Ints] = (self.heads["upper"], self.heads["lower"])

    @property
    def capacity(self) -> int:
        return len(self.heads)

    @property
    def high(self) -> int:
        """One past the last row ever used: whole-array operations end here."""
        return self.list.high

    @property
    def used(self) -> int:
        """Rows that are not free."""
        return self.list.used

    def _grow(self, capacity: int) -> None:
        self.heads = grown(self.heads, capacity)
        self.children = (grown(self.children[0], capacity), grown(self.children[1], capacity))
        for name in COLUMNS:
            setattr(self, name, grown(getattr(self, name), capacity))
        self._name_columns()

    def add_space(self, block_tokens: int, slot_bytes: int) -> int:
        """A new space; its number."""
        space = len(self.space_block_tokens)
        if space >= SPACES_MAX:
            raise ValueError(f"an index serves at most {SPACES_MAX} namespaces; restart the store")
        self.space_block_tokens = np.append(self.space_block_tokens, block_tokens)
        self.space_slot_bytes = np.append(self.space_slot_bytes, slot_bytes)
        if block_tokens not in self.pools:
            self.pools[block_tokens] = TokenPool(block_tokens, self.capacity)
        return space

    def allocate(self, count: int) -> Ints:
        """Up to `count` fresh rows: in no tier, without parent, child or token row. int32."""
        rows = self.list.take(min(count, self.rows_max - self.list.used))
        if self.list.high > self.capacity:
            wanted = max(self.list.high, 2 * self.capacity, 256)
            self._grow(min(wanted, self.rows_max))
        fresh = span(rows)
        self.heads[fresh] = FRESH_HEAD
        for column in (*self.children, self.first_child, self.next_sibling, self.previous_sibling):
            column[fresh] = NONE
        return rows

    def store_tokens(self, rows: Ints, tokens: Ints) -> None:
        """Keep the token ids of rows: int32 [n, block_tokens]."""
        self.token_row[rows] = self.pools[tokens.shape[1]].store(tokens)

    def free(self, rows: Ints) -> None:
        """Give rows back; they are in no tier, in no list of children, and unused."""
        if not len(rows):
            return
        if self.media:
            for row in rows[(self.flags[rows] & MEDIA) != 0].tolist():
                del self.media[row]
        block_tokens = self.space_block_tokens[self.space[rows]]
        for size in set(block_tokens.tolist()):
            self.pools[size].list.give(self.token_row[rows[block_tokens == size]])
        self.space[rows] = NO_SPACE
        self.flags[rows] = 0
        self.generation[rows] += np.uint32(1)
        self.list.give(rows)

    def in_use(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are leased or held: bool [n]."""
        used: npt.NDArray[np.bool_] = (self.leases[rows] > 0) | (self.holds[rows] > 0)
        return used

    def keys(self, rows: Ints) -> npt.NDArray[np.uint8]:
        """The keys of rows: uint8 [n, 16]."""
        return np.ascontiguousarray(self.heads[rows]).view(np.uint8).reshape(-1, 32)[:, :16].copy()

    def tokens(self, rows: Ints, block_tokens: int) -> Ints:
        """The token ids of rows that all have this block size: int32 [n, block_tokens]."""
        found: Ints = self.pools[block_tokens].tokens[self.token_row[rows]]
        return found

    # -- the tree ------------------------------------------------------------------------------

    def link_chain(self, rows: Ints, parent: int) -> None:
        """Make fresh rows a chain under `parent` (-1: a root)."""
        if not len(rows):
            return
        self.parent[rows[1:]] = rows[:-1]
        self.first_child[rows[:-1]] = rows[1:]
        first = int(rows[0])
        self.parent[first] = parent
        if parent >= 0:
            before = int(self.first_child[parent])
            self.next_sibling[first] = before
            if before >= 0:
                self.previous_sibling[before] = first
            self.first_child[parent] = first

    def link_many(self, rows: Ints, parents: Ints) -> None:
        """Put fresh rows under their parents (-1: roots), in any order, all at once."""
        self.parent[rows] = parents
        under = parents >= 0
        rows, parents = rows[under], parents[under]
        order = np.argsort(parents, kind="stable")
        rows, parents = rows[order], parents[order]
        first = np.ones(len(rows), bool)
        first[1:] = parents[1:] != parents[:-1]
        last = np.roll(first, -1)
        self.next_sibling[rows[~last]] = rows[1:][~first[1:]]
        self.previous_sibling[rows[~first]] = rows[:-1][~last[:-1]]
        before = self.first_child[parents[last]]
        self.next_sibling[rows[last]] = before
        self.previous_sibling[before[before >= 0]] = rows[last][before >= 0]
        self.first_child[parents[first]] = rows[first]

    def unlink(self, rows: Ints) -> None:
        """Take rows out of their parents' lists of children. Their own children are leaving too."""
        self.flags[rows] |= LEAVING
        parents = self.parent[rows]
        stays = parents >= 0
        stays[stays] = (self.flags[parents[stays]] & LEAVING) == 0
        for row, parent in zip(rows[stays].tolist(), parents[stays].tolist(), strict=True):
            before, after = int(self.previous_sibling[row]), int(self.next_sibling[row])
            if before >= 0:
                self.next_sibling[before] = after
            else:
                self.first_child[parent] = after
            if after >= 0:
                self.previous_sibling[after] = before
        for column in (self.parent, self.first_child, self.next_sibling, self.previous_sibling):
            column[rows] = NONE
        self.flags[rows] &= ~np.uint8(LEAVING)


def span(rows: npt.NDArray[np.signedinteger]) -> slice | npt.NDArray[np.signedinteger]:
    """The same rows for indexing: a slice, many times faster, if many follow one another."""
    if len(rows) < SPAN_MIN or rows[-1] - rows[0] != len(rows) - 1 or (np.diff(rows) != 1).any():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def grown(array: npt.NDArray[Scalar], rows: int) -> npt.NDArray[Scalar]:
    """The array with more rows; new ones are zero, and take no memory until they are written."""
    larger = np.zeros((rows, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
