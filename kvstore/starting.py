"""Starting: what the tiers hold goes into the index, all at once, while lookups answer Miss(starting)."""

import json
from typing import TYPE_CHECKING

from kvstore.placement import Placement
from kvstore.tiers.layout import CacheGroup, Layout
from kvstore.tiers.record import RecordFormat

if TYPE_CHECKING:
    from kvstore.tiers.catalogue_tables import Namespace


class Starter:
    """Fills an index from a taken-over arena and from the catalogues; numbers the namespaces."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._numbers: dict[bytes, int] = {}

    def space_number(self, digest: bytes, layout: Layout, label: str, slot_bytes: int) -> int:
        """The index's number of a namespace. Under the placement's lock."""
        if digest not in self._numbers:
            index = self._placement.index
            self._numbers[digest] = index.add_space(layout.block_tokens, slot_bytes)
        return self._numbers[digest]

    def start(self) -> None:
        """Load everything, then let lookups in."""
        placement = self._placement
        with placement.lock:
            placement.started.set()
