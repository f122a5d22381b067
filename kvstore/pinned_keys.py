"""The keys under pins, each once however many pins share it, and the rows that carry them now.

A pin is a wish about keys: a block may leave all the same (it was bad, its tier shrank), and is
under its pins again when a save brings it back. No locks: the index's owner guards it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.rows import COVERED, KEPT, NONE, PIN_END, FreeList, Ints, Longs, Rows, grown

Keys = npt.NDArray[np.uint8]  # [n, 16]
KEY_BYTES = 16
FIRST_CAPACITY = 64


class PinnedKeys:
    """Nodes, one a key. Tells eviction which rows to keep by the column `pinned` of the rows.

    missing: nodes whose block is in no tier now. stale: rows under pins moved since `mark`.
    bytes, stored_bytes: slots of all the nodes' blocks, and of those that are in some tier.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._nodes: dict[bytes, int] = {}
        self._list = FreeList()
        self._keys: Keys = np.zeros((FIRST_CAPACITY, KEY_BYTES), np.uint8)
        self._row = np.full(FIRST_CAPACITY, NONE, np.int32)
        self._pins = np.zeros(FIRST_CAPACITY, np.int32)  # how many pins cover a node
        self._ends = np.zeros(FIRST_CAPACITY, bool)
        self._slot_bytes = np.zeros(FIRST_CAPACITY, np.int64)
        self.missing = 0
        self.bytes = 0
        self.stored_bytes = 0
        self.stale = False

    def __len__(self) -> int:
        """How many keys are under pins."""
        return len(self._nodes)

    def node(self, key: bytes) -> int:
        """The node of a key, or -1."""
        return self._nodes.get(key, NONE)

    def unknown(self, keys: Keys) -> int:
        """How many of a chain's keys no pin covers."""
        return sum(key not in self._nodes for key in split(keys))

    def keys(self, nodes: Ints) -> Keys:
        """The keys of nodes: uint8 [n, 16]."""
        return self._keys[nodes]

    def stored(self, nodes: Ints) -> int:
        """How many of the nodes have their block in some tier."""
        return int((self._row[nodes] >= 0).sum())

    def rows(self, nodes: Ints) -> Ints:
        """The rows of those nodes whose blocks are in some tier, in the order of the nodes."""
        rows = self._row[nodes]
        return rows[rows >= 0]

    # -- pins come and go

    def add(self, keys: Keys, slot_bytes: int, probe: Callable[[Keys], Ints]) -> Ints:
        """Cover a chain, root first, by one pin more. Returns: its nodes, int32 [n].

        probe: finds the rows that carry keys. No pin ends with the chain's last key yet.
        """
        nodes = np.array([self.node(key) for key in split(keys)], np.int32)
        new = np.flatnonzero(nodes < 0)
        if len(new):
            fresh = self._list.take(len(new))
            self._grow(self._list.high)
            nodes[new] = fresh
            self._keys[fresh], self._slot_bytes[fresh] = keys[new], slot_bytes
            self._pins[fresh], self._ends[fresh], self._row[fresh] = 0, False, NONE
            self._nodes.update(zip(split(keys[new]), fresh.tolist(), strict=True))
            self.missing += len(new)
            self.bytes += len(new) * slot_bytes
            self.attach_found(probe)
        self._pins[nodes] += 1
        self._ends[nodes[-1]] = True
        if self._row[nodes[-1]] >= 0:
            self._rows.pinned[self._row[nodes[-1]]] |= PIN_END
        self.stale = True
        return nodes

    def remove(self, nodes: Ints) -> None:
        """A pin over these nodes, root first, ended."""
        self._pins[nodes] -= 1
        self._ends[nodes[-1]] = False
        if self._row[nodes[-1]] >= 0:
            self._rows.pinned[self._row[nodes[-1]]] &= np.uint8(255 ^ PIN_END)
        gone = nodes[self._pins[nodes] == 0]
        for key in split(self._keys[gone]):
            del self._nodes[key]
        there = self._row[gone] >= 0
        self._rows.pinned[self._row[gone[there]]] = 0
        self.missing -= int((~there).sum())
        self.bytes -= int(self._slot_bytes[gone].sum())
        self.stored_bytes -= int(self._slot_bytes[gone[there]].sum())
        self._row[gone] = NONE
        self._list.give(gone)
        self.stale = True

    def _grow(self, nodes: int) -> None:
        if nodes > len(self._row):
            capacity = max(nodes, 2 * len(self._row))
            for name in ("_keys", "_row", "_pins", "_ends", "_slot_bytes"):
                setattr(self, name, grown(getattr(self, name), capacity))

    # -- blocks come and go

    def attach(self, rows: Ints, keys: Keys) -> None:
        """Rows with these keys were made: those under pins are covered again."""
        if self.missing:
            for row, key in zip(rows.tolist(), split(keys), strict=True):
                node = self.node(key)
                if node >= 0:
                    self._attach(np.array([node], np.int32), np.array([row], np.int32))

    def attach_found(self, probe: Callable[[Keys], Ints]) -> None:
        """Find the rows of all nodes that have none: after many rows were made at once."""
        if self.missing:
            nodes = np.fromiter(self._nodes.values(), np.int32, len(self._nodes))
            nodes = nodes[self._row[nodes] < 0]
            rows = probe(self._keys[nodes])
            self._attach(nodes[rows >= 0], rows[rows >= 0])

    def _attach(self, nodes: Ints, rows: Ints) -> None:
        self._row[nodes] = rows
        self._rows.pinned[rows] = COVERED
        self._rows.pinned[rows[self._ends[nodes]]] |= PIN_END
        self.missing -= len(nodes)
        self.stored_bytes += int(self._slot_bytes[nodes].sum())
        self.stale = True

    def detach(self, rows: Ints) -> None:
        """Rows are in no tier any more."""
        if len(self._nodes):
            covered = rows[(self._rows.pinned[rows] & COVERED) != 0]
            nodes = np.array([self.node(k) for k in split(self._rows.keys(covered))], np.int32)
            self._row[nodes] = NONE
            self._rows.pinned[covered] = 0
            self.missing += len(nodes)
            self.stored_bytes -= int(self._slot_bytes[nodes].sum())
            self.stale |= len(nodes) > 0

    def moved(self, tier: int, rows: Ints) -> None:
        """Rows entered or left a tier (0 or 1)."""
        if len(self._nodes) and (self._rows.pinned[rows] & COVERED).any():
            self._rows.pinned[rows] &= np.uint8(255 ^ KEPT[tier])
            self.stale = True

    # -- what eviction sees

    def mark(self, order: Ints, budgets: Sequence[int]) -> None:
        """Keep blocks in each tier, in this order of nodes, as far as the tier's budget goes.

        order: every node once, ancestors before descendants. budgets: bytes, the first tier's and,
        where there is one, the second's. What does not fit is evicted like any other block.
        """
        rows = self.rows(order)
        slot_bytes = self._rows.space_slot_bytes[self._rows.space[rows]]
        self._rows.pinned[rows] &= np.uint8(COVERED | PIN_END)
        for tier, budget_bytes in enumerate(budgets):
            inside = self._rows.slots[tier][rows] >= 0
            fit = np.cumsum(slot_bytes[inside]) <= budget_bytes
            self._rows.pinned[rows[inside][fit]] |= np.uint8(KEPT[tier])
        self.stale = False

    def kept_bytes(self, tier: int) -> int:
        """Slots in a tier that eviction leaves alone now. Reads all rows; for tests and doubts."""
        rows = np.flatnonzero(self._rows.pinned[: self._rows.high] & KEPT[tier])
        return int(self._rows.space_slot_bytes[self._rows.space[rows]].sum())

    def check_integrity(self) -> None:
        """AssertionError if nodes and rows disagree. Reads everything; for tests."""
        nodes = np.fromiter(self._nodes.values(), np.int32, len(self._nodes))
        there = nodes[self._row[nodes] >= 0]
        rows = self._row[there]
        assert self._list.used == len(nodes), "nodes of pins leak"
        assert self.missing == len(nodes) - len(there), "missing blocks of pins are miscounted"
        assert self.bytes == self._slot_bytes[nodes].sum(), "bytes under pins are miscounted"
        assert self.stored_bytes == self._slot_bytes[there].sum(), "stored bytes are miscounted"
        assert (self._rows.keys(rows) == self._keys[there]).all(), "a pin covers another block"
        pinned = self._rows.pinned[: self._rows.high]
        covered = np.flatnonzero(pinned)
        assert np.array_equal(np.sort(rows), covered), "rows under pins, or nodes, are forgotten"
        assert (pinned[covered] & COVERED).all(), "a row is kept and under no pin"
        for tier, slots in enumerate(self._rows.slots):
            kept = (pinned & KEPT[tier]) != 0
            assert (slots[: self._rows.high][kept] >= 0).all(), "a row is kept where it is not"


def split(keys: Keys) -> list[bytes]:
    """Keys uint8 [n, 16] one by one."""
    data = keys.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def whole_order(chains: Sequence[Longs | Ints]) -> Ints:
    """The nodes of all chains, each once, those of earlier chains first."""
    if not chains:
        return np.zeros(0, np.int32)
    nodes, first = np.unique(np.concatenate(chains), return_index=True)
    ordered: Ints = nodes[np.argsort(first)].astype(np.int32)
    return ordered
