"""Who is where: the authority on stored blocks while a store runs, in its one owner's memory.

One row a block. A row is found by its key and confirmed by parent and tokens; it has a slot in each
tier that holds the block. The store's index has (host, disk); the runtime's device tier has an
index of its own with the one tier (device), whose slots are page ids.

Rules kept here, in every call:
- prefix-closed, each tier by itself: a block enters a tier only when its parent is there, and
  leaves only when it has no child there;
- a leased or held row is never freed, and its slot is not given back, until it is released;
- a row in no tier cannot be found.

No locks: every call is made under the lock of the owner (the store).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.block_table import COLLISION, BlockTable, Keys, check_keys
from kvstore.closure import (
    by_depth,
    descendants,
    each_once,
    may_enter,
    may_leave,
    missing_ancestors,
)
from kvstore.media import same_media
from kvstore.outcomes import Found, Left, Published
from kvstore.pinned_keys import PinnedKeys
from kvstore.rows import HIDDEN, MEDIA, NONE, ROWS_MAX, Ints, Longs, Rows, span
from kvstore.tiers.base import MissReason, SaveDrop, TierName
from kvstore.tiers.errors import TokenError
from kvstore.tiers.failpoints import planted
from kvstore.tombstones import Tombstones
from kvstore.uses import Uses

Mask = npt.NDArray[np.bool_]
Media = Mapping[int, bytes]
Generations = npt.NDArray[np.uint64]

SLOT_MAX = (1 << 31) - 1  # slot ids are kept as int32: 16 TiB of slots of 8 KiB
# Ages count touches. Those of loaded rows are their records' generations, below any of this run.
FIRST_AGE = 1 << 62


class Index:
    """Rows, where their blocks lie, and who uses them.

    tiers: one or two names, the faster first. rows_expected: how many rows to lay out at once
    (virtual memory; it saves growing). rows_max: the most rows there ever are.
    """

    def __init__(
        self,
        tiers: Sequence[TierName] = (TierName.HOST, TierName.DISK),
        *,
        rows_expected: int = 4096,
        rows_max: int = ROWS_MAX,
    ) -> None:
        if not 1 <= len(set(tiers)) == len(tiers) <= 2:
            raise ValueError("an index serves one or two different tiers")
        self.tiers = tuple(tiers)
        self.rows = Rows(rows_expected, rows_max)
        self.table = BlockTable(self.rows, rows_expected)
        self.tombstones = Tombstones()
        self.clock = FIRST_AGE
        self.uses = Uses(self.rows)
        self.pinned = PinnedKeys(self.rows)
        self.in_both = 0  # rows with a slot in each of two tiers
        self.changes = 0  # goes up whenever a row may have become, or ceased to be, a victim
        self._number = {tier: number for number, tier in enumerate(self.tiers)}
        self._blocks = [0, 0]

    # -- spaces and reading --------------------------------------------------------------------

    def add_space(self, block_tokens: int, slot_bytes: int) -> int:
        """A number for one namespace: its blocks' tokens and the slot size of its records."""
        return self.rows.add_space(block_tokens, slot_bytes)

    def number(self, tier: TierName) -> int:
        """0 for the index's first tier, 1 for its second: the tier's place in the columns."""
        return self._number[tier]

    def slots(self, tier: TierName, rows: Ints) -> Longs:
        """The slots of rows in a tier, -1 where a row is not in it: int64 [n]."""
        return self.rows.slots[self._number[tier]][rows].astype(np.int64)

    def blocks(self, tier: TierName) -> int:
        """How many blocks a tier holds."""
        return self._blocks[self._number[tier]]

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self.table)

    def rows_of(self, space: int | None = None, tier: TierName | None = None) -> Ints:
        """All findable rows of a space (None: of all) in a tier (None: in any), in row order."""
        high = self.rows.high
        upper, lower = self.rows.slots[0][:high] >= 0, self.rows.slots[1][:high] >= 0
        inside = (upper | lower) if tier is None else (upper, lower)[self._number[tier]]
        if space is not None:
            inside &= self.rows.space[:high] == space
        return np.flatnonzero(inside).astype(np.int32)

    def rows_in_slots(self, tier: TierName, first: int, end: int) -> Ints:
        """The rows whose slot in the tier is first..end-1, such as a segment's. Scans all rows."""
        slots = self.rows.slots[self._number[tier]][: self.rows.high]
        return np.flatnonzero((slots >= first) & (slots < end)).astype(np.int32)

    def generations(self, rows: Ints) -> npt.NDArray[np.uint32]:
        """The reuse counters of rows: keep them beside row numbers, and ask `alive` later."""
        return self.rows.generation[rows]

    def alive(self, rows: Ints, generations: npt.NDArray[np.uint32]) -> Mask:
        """Which rows are still the blocks they were, and in some tier: bool [n]."""
        inside = (self.rows.slots[0][rows] >= 0) | (self.rows.slots[1][rows] >= 0)
        alive: Mask = inside & (self.rows.generation[rows] == generations)
        return alive

    def lingering(self, tier: TierName) -> Longs:
        """Slots of the tier that are still read although their row has left it."""
        return self.uses.lingering(self._number[tier])

    # -- finding -------------------------------------------------------------------------------

    def find(
        self,
        space: int,
        keys: Keys,
        tokens: Ints,
        parent: int = NONE,
        media: Media | None = None,
    ) -> Found:
        """The longest stored prefix of a chain below `parent` (-1: from the root).

        keys uint8 [n, 16]; tokens int32 [n, block_tokens]; media: digests of the blocks that have
        any, by their place in `keys`. A block is confirmed when its row carries the key, the
        space, the row before it as parent, and the same tokens and media. Changes nothing.
        """
        keys, tokens = self._check_chain(space, keys, tokens, parent)
        walk = self.table.walk(keys, tokens, space, parent)
        rows, upper, lower, end = walk.rows, walk.in_upper, walk.in_lower, walk.end
        if media or self.rows.media:
            same = same_media(self.rows, rows, media or {})
            if same < len(rows):
                rows, end = rows[:same], COLLISION
                upper, lower = min(upper, same), min(lower, same)
        blocks = dict(zip(self.tiers, (upper, lower), strict=False))
        if len(rows) == len(keys):
            return Found(rows, blocks, None)
        if end == COLLISION:
            return Found(rows, blocks, MissReason.COLLISION)
        return Found(rows, blocks, self.tombstones.reason(keys[len(rows)].tobytes()))

    def _check_chain(self, space: int, keys: Keys, tokens: Ints, parent: int) -> tuple[Keys, Ints]:
        keys = check_keys(keys)
        block_tokens = int(self.rows.space_block_tokens[space])
        if tokens.dtype != np.int32 or tokens.shape != (len(keys), block_tokens):
            raise TokenError(f"tokens must be int32 [{len(keys)}, {block_tokens}], one row a key")
        if parent >= 0 and self.rows.space[parent] != space:
            raise ValueError("the parent row belongs to another space; look the chain up again")
        return keys, np.ascontiguousarray(tokens)

    # -- entering a tier -----------------------------------------------------------------------

    def publish(
        self,
        tier: TierName,
        space: int,
        parent: int,
        keys: Keys,
        tokens: Ints,
        slots: Longs,
        contents: Generations,
        media: Media | None = None,
        known: Ints | None = None,
    ) -> Published:
        """Make the blocks of one chain findable: their bytes already lie in `slots` of the tier.

        parent: the row before the first block, in the same tier, or -1. slots int64 [n];
        contents uint64 [n], the records' generations. Blocks that other saves brought meanwhile are
        recognised. One that lies only in the other tier gets its slot here if the record is the
        same generation (a row has one); otherwise the blocks from there on are not taken.
        known: what `find` says of these keys, if nothing has changed since the caller asked.

        Returns: Published, reason None, COLLISION, PARENT_GONE, or HOST_FULL (rows_max reached).
        """
        number = self._number[tier]
        _check_slots(slots)
        if parent >= 0 and self.rows.slots[number][parent] < 0:
            return Published(np.zeros(0, np.int32), np.zeros(0, bool), SaveDrop.PARENT_GONE)
        known = self.find(space, keys, tokens, parent, media).rows if known is None else known
        at, entering = len(known), np.zeros(0, bool)
        if at:
            entering = self.rows.slots[number][known] < 0
            other = entering & (self.rows.content[known] != contents[:at])
            if other.any():
                at = int(other.argmax())
                self._enter(number, known[:at][entering[:at]], slots[:at][entering[:at]])
                return Published(known[:at], entering[:at], SaveDrop.PARENT_GONE)
            self._enter(number, known[entering], slots[:at][entering])
        end = at + self.table.count_fresh(keys[at:])
        reason = SaveDrop.COLLISION if end < len(keys) else None
        rows = self.rows.allocate(end - at)
        if len(rows) < end - at:
            end, reason = at + len(rows), SaveDrop.HOST_FULL
        before = int(known[-1]) if at else parent
        self._create(rows, space, before, keys[at:end], tokens[at:end])
        for place, digest in (media or {}).items():
            if at <= place < end:
                self.rows.media[int(rows[place - at])] = digest
                self.rows.flags[rows[place - at]] |= MEDIA
        self.rows.content[rows] = contents[at:end]
        self._enter(number, rows, slots[at:end])
        placed = np.ones(len(rows), bool)
        if not at:
            return Published(rows, placed, reason)
        both = np.concatenate([known, rows]), np.concatenate([entering, placed])
        return Published(*both, reason)

    def _create(self, rows: Ints, space: int, parent: int, keys: Keys, tokens: Ints) -> None:
        columns, count = self.rows, len(rows)
        if not count:
            return
        words = keys.view(np.uint64)
        columns.key0[rows], columns.key1[rows] = words[:, 0], words[:, 1]
        columns.space[rows] = space
        depth = int(columns.depth[parent]) + 1 if parent >= 0 else 0
        columns.depth[rows] = np.arange(depth, depth + count)
        columns.store_tokens(rows, tokens)
        columns.link_chain(rows, parent)
        self.table.insert(rows)
        self.pinned.attach(rows, keys)
        self.touch(rows)

    def place(self, tier: TierName, rows: Ints, slots: Longs) -> Mask:
        """Give findable rows, each once, a slot in a tier: what ends a write-back or a promotion.

        The record there is a copy of the one in the other tier. A row is refused if it is in the
        tier already, if its parent neither is nor enters with this call, or if it is in no
        tier any more. Returns: bool [n], which slots are used.
        """
        _check_slots(slots)
        each_once(rows)
        enter = may_enter(self.rows, self._number[tier], rows)
        self._enter(self._number[tier], rows[enter], slots[enter])
        return enter

    def adopt(self, tier: TierName, rows: Ints, slots: Longs) -> None:
        """`place` for bulk_load, which has seen to the rules itself."""
        self._enter(self._number[tier], rows, slots)

    def _enter(self, number: int, rows: Ints, slots: Longs) -> None:
        entering = span(rows)
        self.rows.slots[number][entering] = slots
        children, parents = self.rows.children[number], self.rows.parent[rows]
        children[entering] = 0
        parents = parents[parents >= 0]
        if len(parents) < self.rows.high // 8:
            np.add.at(children, parents, 1)
        else:
            children[: self.rows.high] += np.bincount(parents, minlength=self.rows.high)
        self._count(number, rows, 1)

    def _count(self, number: int, rows: Ints, sign: int) -> None:
        self._blocks[number] += sign * len(rows)
        self.in_both += sign * int(np.count_nonzero(self.rows.slots[1 - number][rows] >= 0))
        self.pinned.moved(number, rows)
        self.changes += 1

    # -- leaving a tier ------------------------------------------------------------------------

    def clear(self, tier: TierName, rows: Ints, reason: MissReason = MissReason.EVICTED) -> Left:
        """Take rows, each once, out of a tier: what eviction does with its victims.

        A row is refused while it is leased or held, or has a child in the tier that does not leave
        with this call. A row that is in no tier afterwards is freed, and remembered with `reason`.

        Returns: Left: the rows that left, in the order given, and their slots.
        """
        each_once(rows)
        number = self._number[tier]
        return self._leave(number, rows[may_leave(self.rows, number, rows)], reason)

    def drop_subtree(
        self, rows: Ints, tier: TierName, reason: MissReason = MissReason.EVICTED
    ) -> Left:
        """Take rows and all their descendants out of a tier, used or not, deepest first.

        For bad blocks, invalidation, and segments that change class. A row that is leased or held
        leaves at once but its slot stays taken until it is released; if it is in no tier then it
        cannot be found any more and is freed on release.

        Returns: Left: all rows that left, and their slots (-1 where one is still used).
        """
        number = self._number[tier]
        below = rows if planted("keep_children") else descendants(self.rows, number, rows)
        return self._leave(number, below, reason)

    def drop_space(
        self, space: int, tier: TierName, reason: MissReason = MissReason.INVALIDATED
    ) -> Left:
        """`drop_subtree` of everything a space has in a tier."""
        rows = self.rows_of(space, tier)
        return self._leave(self._number[tier], by_depth(self.rows, rows)[::-1], reason)

    def _leave(self, number: int, rows: Ints, reason: MissReason) -> Left:
        """Out of the tier: rows whose children there all leave as well."""
        columns = self.rows
        if not len(rows):
            return Left(rows, np.zeros(0, np.int64))
        slots = columns.slots[number][rows].astype(np.int64)
        parents = columns.parent[rows]
        below = parents >= 0
        np.subtract.at(columns.children[number], parents[below], 1)
        # A block was used whenever its descendants were, also when only they were touched.
        np.maximum.at(columns.age, parents[below], columns.age[rows[below]])
        columns.slots[number][rows] = NONE
        columns.children[number][rows] = NONE
        self._count(number, rows, -1)
        used = columns.in_use(rows)
        if used.any():
            self.uses.linger(number, rows[used], slots[used])
            slots[used] = NONE
        gone = columns.slots[1 - number][rows] < 0
        self._forget(rows[gone], used[gone], reason)
        return Left(rows, slots)

    def _forget(self, rows: Ints, used: Mask, reason: MissReason) -> None:
        """Rows that are in no tier: cannot be found, and are free unless someone uses them."""
        if not len(rows):
            return
        self.tombstones.add(self.rows.key1[rows], reason)
        self.table.remove(rows)
        self.pinned.detach(rows)
        self.rows.unlink(rows)
        self.rows.flags[rows[used]] |= HIDDEN
        self.rows.free(rows[~used])

    # -- use -----------------------------------------------------------------------------------

    def touch(self, rows: Ints) -> None:
        """Mark the rows of one chain, root first, as used now: the deepest as the oldest."""
        self.rows.age[rows] = np.arange(self.clock + len(rows), self.clock, -1)
        self.clock += len(rows)

    def lease(self, rows: Ints) -> None:
        """Keep rows, each once, from being freed: for a ticket.

        Leasing the last row that a ticket has in each tier keeps all before it from eviction.
        """
        self.uses.lease(rows)

    def hold(self, rows: Ints) -> None:
        """Keep rows, each once, and the slots they have now, until a copy is done."""
        self.uses.hold(rows)

    def unlease(self, rows: Ints) -> dict[TierName, Longs]:
        """End leases. Returns: the slots, by tier, that nobody uses any more; mostly none."""
        return self._released(self.uses.unlease(rows))

    def unhold(self, rows: Ints) -> dict[TierName, Longs]:
        """End holds. Returns: the slots, by tier, that nobody uses any more; mostly none."""
        return self._released(self.uses.unhold(rows))

    def _released(self, slots: list[tuple[int, int]]) -> dict[TierName, Longs]:
        self.changes += 1
        freed: dict[TierName, list[int]] = {}
        for number, slot in slots:
            freed.setdefault(self.tiers[number], []).append(slot)
        return {tier: np.array(theirs, np.int64) for tier, theirs in freed.items()}

    def missing_ancestors(self, rows: Ints, tier: TierName) -> Ints:
        """Rows and their ancestors that are not in a tier, root first, each once.

        What must be written, in this order, so that the rows may enter the tier.
        """
        return missing_ancestors(self.rows, self._number[tier], rows)

    def check_integrity(self) -> None:
        """AssertionError if any rule of this module is broken. Reads everything; for tests."""
        from kvstore.index_check import check_integrity  # noqa: PLC0415  It reads this module.

        check_integrity(self)


def _check_slots(slots: Longs) -> None:
    # As uint64 a negative id is a huge one, so a single pass finds both kinds.
    if len(slots) and int(slots.astype(np.uint64).max()) > SLOT_MAX:
        raise ValueError(f"slot ids must lie in 0..{SLOT_MAX}")
