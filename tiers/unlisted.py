"""Slots on disk whose block is gone for good while somebody still reads them: an invalidated block.

Its row leaves the catalogue at once, so that no restart finds it; its slot is written again only
after it was removed, too.
"""


class Unlisted:
    """Which slots these are. The tier's lock guards it."""

    def __init__(self) -> None:
        self._row_gone: dict[int, bool] = {}  # slot -> whether the removal of its row is durable

    def add(self, slots: list[int]) -> None:
        """The rows of these slots are about to be removed; the slots stay taken."""
        self._row_gone.update(dict.fromkeys(slots, False))

    def slots(self) -> set[int]:
        """All of them."""
        return set(self._row_gone)

    def end(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Nobody reads these slots any more; other slots are among them.

        Returns: (those whose row is still to be removed, those that are free now). One whose
        removal is under way is in neither: the commit frees it.
        """
        listed, free = [], []
        for slot in slots:
            row_gone = self._row_gone.pop(slot, None)
            if row_gone is None:
                listed.append(slot)
            elif row_gone:
                free.append(slot)
        return listed, free

    def committed(self, slots: list[int]) -> list[int]:
        """The removal of these slots' rows is durable. Returns: those that are free now."""
        for slot in slots:
            if slot in self._row_gone:
                self._row_gone[slot] = True
        return [slot for slot in slots if slot not in self._row_gone]
