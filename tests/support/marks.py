"""What a process tells of its disk tier, so that another can say what must be there after its end.

Each mark is a name and bytes:

    space      the namespace's digest and the number of its layout, one byte
    written    slot and key of every block of a group whose write_group has returned
    loaded     the same of every block that a start found
    removing   the same of blocks whose removal from the catalogue is about to be asked for
    flushed    the keys of a prompt that `flush` said is durable
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvstore.tiers.catalogue_row import slots_of_rows
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_outcomes import Written

PLACED = struct.Struct("<Q16s")


class Marks:
    """Makes the marks, from inside the disk tier. add: takes one."""

    def __init__(self, add: Callable[[str, bytes], None]) -> None:
        self.add = add
        self._keys: dict[int, bytes] = {}

    def install(self) -> None:
        """From now on every DiskTier of this process tells what it wrote and removes."""
        write_group, load = DiskTier.write_group, DiskTier.load
        remove, unlist = DiskTier.remove, DiskTier.unlist
        marks = self

        def marked_write(
            tier: DiskTier, slots: Any, records: Any, rows: Any, *rest: Any, **more: Any
        ) -> Any:
            outcome = write_group(tier, slots, records, rows, *rest, **more)
            if isinstance(outcome, Written):
                keys = [bytes(key) for key in rows["key"]]
                marks._keys.update(zip(slots.tolist(), keys, strict=True))
                marks.add("written", marks._placed(slots.tolist()))
            return outcome

        def marked_remove(tier: DiskTier, slots: Any) -> None:
            marks._removing(slots)
            remove(tier, slots)

        def marked_unlist(tier: DiskTier, slots: Any) -> None:
            marks._removing(slots)
            unlist(tier, slots)

        def marked_load(tier: DiskTier, *rest: Any, **more: Any) -> Any:
            loaded = load(tier, *rest, **more)
            marks._keys.clear()
            for rows in loaded.rows.values():
                slots = slots_of_rows(rows, tier.per).tolist()
                marks._keys.update(zip(slots, (bytes(k) for k in rows["key"]), strict=True))
                marks.add("loaded", marks._placed(slots))
            return loaded

        DiskTier.write_group = marked_write  # type: ignore[method-assign]
        DiskTier.remove = marked_remove  # type: ignore[method-assign]
        DiskTier.unlist = marked_unlist  # type: ignore[method-assign]
        DiskTier.load = marked_load  # type: ignore[method-assign]

    def _removing(self, slots: Any) -> None:
        self.add("removing", self._placed(s for s in slots.tolist() if s in self._keys))

    def _placed(self, slots: Iterable[int]) -> bytes:
        return b"".join(PLACED.pack(slot, self._keys[slot]) for slot in slots)


@dataclass
class Promised:
    """What the marks so far say must be on disk. slots: of the durable blocks, by key.

    loaded: slots of what was there at the last start; not asked for, as a catalogue that was
    rebuilt may name blocks that were removed. broken: promises of `flush` that were not kept.
    """

    slots: dict[bytes, int] = field(default_factory=dict)
    layouts: dict[bytes, int] = field(default_factory=dict)
    loaded: dict[bytes, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def apply(self, name: str, data: bytes) -> None:
        """One mark."""
        if name == "space":
            self.layouts[data[:32]] = data[32]
        elif name == "written":
            self.slots.update((key, slot) for slot, key in PLACED.iter_unpack(data))
        elif name == "loaded":
            self.loaded.update((key, slot) for slot, key in PLACED.iter_unpack(data))
        elif name == "removing":
            for slot, key in PLACED.iter_unpack(data):
                for known in (self.slots, self.loaded):
                    if known.get(key) == slot:
                        del known[key]
        elif name == "flushed":
            keys = [data[at : at + 16] for at in range(0, len(data), 16)]
            missing = sum(key not in self.slots and key not in self.loaded for key in keys)
            if missing:
                self.broken.append(f"{missing} blocks of a flushed prompt were not on disk")
