"""Leases and holds: who still needs a row, and the slots that wait for them.

A lease keeps a row for a ticket, a hold keeps it for a copy. A row can lose its place in a tier
while it is used (a bad block, an invalidation); its slot then lingers until the last use ends.
"""

import numpy as np

from kvstore.rows import HIDDEN, Ints, Longs, Rows


class Uses:
    """Counts of leases and holds on the rows of one index. Rows of a call are named once each."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.leased = 0  # sum of all leases
        self.held = 0  # sum of all holds
        # Slots whose row left the tier while someone used it: row -> [(tier number, slot)].
        self._lingering: dict[int, list[tuple[int, int]]] = {}

    def lease(self, rows: Ints) -> None:
        self._rows.leases[rows] += 1
        self.leased += len(rows)

    def hold(self, rows: Ints) -> None:
        self._rows.holds[rows] += 1
        self.held += len(rows)

    def unlease(self, rows: Ints) -> list[tuple[int, int]]:
        """End leases. Returns: (tier number, slot) of slots that nobody uses any more."""
        self._rows.leases[rows] -= 1
        self.leased -= len(rows)
        assert not len(rows) or self._rows.leases[rows].min() >= 0, "a lease was given back twice"
        return self._settle(rows)

    def unhold(self, rows: Ints) -> list[tuple[int, int]]:
        """End holds. Returns: (tier number, slot) of slots that nobody uses any more."""
        self._rows.holds[rows] -= 1
        self.held -= len(rows)
        assert not len(rows) or self._rows.holds[rows].min() >= 0, "a hold was given back twice"
        return self._settle(rows)

    def linger(self, tier: int, rows: Ints, slots: Longs) -> None:
        """Used rows have just left a tier: keep their slots until the last use ends."""
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            self._lingering.setdefault(row, []).append((tier, slot))

    def lingering(self, tier: int) -> Longs:
        """The slots of a tier that linger: int64 [n]."""
        slots = [s for kept in self._lingering.values() for number, s in kept if number == tier]
        return np.array(slots, np.int64)

    def _settle(self, rows: Ints) -> list[tuple[int, int]]:
        if not self._lingering:
            return []
        unused = rows[~self._rows.in_use(rows)]
        done = [row for row in unused.tolist() if row in self._lingering]
        slots = [slot for row in done for slot in self._lingering.pop(row)]
        settled = np.array(done, np.int32)
        self._rows.free(settled[(self._rows.flags[settled] & HIDDEN) != 0])
        return slots
