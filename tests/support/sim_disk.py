"""What a machine keeps of files: pages and names, synced or not. No faults here.

Pages that were written since the last sync can be lost in a power loss, each by itself; of names
the last changes can, in the order in which they were made. After a failed sync the pages count as
clean, as they do for the kernel, and may be lost all the same.
"""

import mmap
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PAGE = 4096
SECTOR = 512
REVERT = 0.5  # chance that an unsynced page is lost


class MappedFile(mmap.mmap):
    """A file as memory. Its bytes go back into the file when it is unmapped."""

    node: "Node"

    def close(self) -> None:
        self.node.unmap(self)
        super().close()


@dataclass(eq=False)
class Node:
    """A file. `dirty`, `lost`: what pages held before they were written, and not synced since.

    lost: a sync of them failed, and no later one will bring them to the device.
    """

    number: int
    mode: int
    size: int = 0
    links: int = 1
    volatile: bool = False  # in memory: survives the process, not the machine
    data: Any = field(default_factory=bytearray)
    pages: set[int] = field(default_factory=set)  # that take room
    dirty: dict[int, bytes] = field(default_factory=dict)
    lost: dict[int, bytes] = field(default_factory=dict)
    rotten: set[int] = field(default_factory=set)
    holder: int | None = None  # the descriptor that has its lock
    synced_size: int = 0

    def resize(self, size: int) -> None:
        self.pages.difference_update(range(-(-size // PAGE), -(-self.size // PAGE)))
        self.size = size

    def read(self, at: int, size: int) -> bytes:
        """Bytes of it; what was never written is zero, and takes no memory here."""
        return bytes(self.data[at : at + size]).ljust(size, b"\0")

    def write(self, at: int, data: Any) -> None:
        end = at + len(data)
        if end > len(self.data):
            self.data.extend(bytes(end - len(self.data)))
        view = self.data
        for page in range(at // PAGE, -(-end // PAGE)):
            if page not in self.dirty:
                old = self.lost.pop(page, None)
                self.dirty[page] = old or bytes(view[page * PAGE : (page + 1) * PAGE])
            self.rotten.discard(page)
            self.pages.add(page)
        view[at:end] = bytes(data) if isinstance(view, MappedFile) else data
        self.size = max(self.size, end)

    def sync(self) -> None:
        self.dirty.clear()
        self.synced_size = self.size

    def fail_sync(self) -> None:
        self.lost.update({page: old for page, old in self.dirty.items() if page not in self.lost})
        self.dirty.clear()

    def map(self, size: int) -> MappedFile:
        """The file as memory, a copy of what it held: nobody else has that."""
        mapped = MappedFile(-1, size)
        mapped.node = self
        for page in sorted(self.pages):
            at = page * PAGE
            piece = self.data[at : min(at + PAGE, size)]
            mapped[at : at + len(piece)] = bytes(piece)
        self.data = mapped
        return mapped

    def unmap(self, mapped: MappedFile) -> None:
        if self.data is mapped:
            self.data = bytearray(mapped[:]) if self.links else bytearray()

    def lose_power(self, rng: random.Random) -> None:
        """Unsynced pages revert by a throw of a coin; the last one written is torn."""
        torn = next(reversed(self.dirty), None)
        for page, before in sorted([*self.lost.items(), *self.dirty.items()]):
            keep = rng.randrange(PAGE // SECTOR) * SECTOR if page == torn else 0
            if rng.random() < REVERT or keep:
                at = page * PAGE + keep
                old = before.ljust(min(PAGE, len(self.data) - page * PAGE), b"\0")
                self.data[at : page * PAGE + len(old)] = old[keep:]
        if self.size > self.synced_size and rng.random() < REVERT:
            self.size = self.synced_size
        self.dirty.clear()
        self.lost.clear()
        self.synced_size = self.size


Change = tuple[tuple[str, "Node | Directory | None"], ...]


@dataclass(eq=False)
class Directory:
    """Names. `unsynced`: what each change since the last sync replaced, in order."""

    number: int
    volatile: bool = False
    names: dict[str, "Node | Directory"] = field(default_factory=dict)
    unsynced: list[Change] = field(default_factory=list)
    mode: int = 0o40700
    size: int = PAGE

    def put(self, *changes: tuple[str, "Node | Directory | None"]) -> None:
        """Change names, all or none in a power loss."""
        self.unsynced.append(tuple((name, self.names.get(name)) for name, _ in changes))
        self._apply(changes)

    def _apply(self, changes: Change) -> None:
        for name, entry in changes:
            if entry is None:
                self.names.pop(name, None)
            else:
                self.names[name] = entry

    def lose_power(self, rng: random.Random) -> None:
        kept = rng.randint(0, len(self.unsynced))
        for change in reversed(self.unsynced[kept:]):
            self._apply(change)
        self.unsynced.clear()
        if self.volatile:
            kept = {n: e for n, e in self.names.items() if isinstance(e, Directory)}
            self.names.clear()
            self.names.update(kept)

    def walk(self) -> Iterator["Node | Directory"]:
        for entry in self.names.values():
            yield entry
            if isinstance(entry, Directory):
                yield from entry.walk()


@dataclass
class Descriptor:
    """An open file or directory."""

    node: Node | Directory
    write: bool = False
    direct: bool = False


class SimDisk:
    """The machine's files. Handles (SimIo) come and go with processes; this stays."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = self._whole_bytes = capacity_bytes
        self.root = Directory(1)
        self.open: dict[int, Descriptor] = {}
        self._next = 100

    @property
    def tight(self) -> bool:
        """Whether somebody else has taken most of the device."""
        return self.capacity_bytes < self._whole_bytes

    def number(self) -> int:
        """A new number, of a file or of a descriptor."""
        self._next += 1
        return self._next

    def add_directory(self, path: str, volatile: bool = False) -> None:
        """A directory that was always there."""
        here = self.root
        for part in path.strip("/").split("/"):
            entry = here.names.setdefault(part, Directory(self.number(), volatile))
            assert isinstance(entry, Directory)
            here = entry

    def directory(self, path: str) -> Directory:
        """A directory by its path."""
        here = self.root
        for part in path.strip("/").split("/"):
            entry = here.names[part]
            assert isinstance(entry, Directory)
            here = entry
        return here

    def taken_bytes(self) -> int:
        """Bytes that files take on the device."""
        nodes = [e for e in self.root.walk() if isinstance(e, Node) and not e.volatile]
        return sum(len(node.pages) for node in nodes) * PAGE

    def kill(self) -> None:
        """The process is gone: its descriptors and locks with it. Files are as they were."""
        self.open.clear()
        for entry in self.root.walk():
            if isinstance(entry, Node):
                entry.holder = None
                if isinstance(entry.data, MappedFile):
                    # What the dead store still does on its way out of a call must not be seen.
                    entry.map(len(entry.data))

    def lose_power(self, rng: random.Random) -> None:
        """The machine is gone: also what was not synced, and what lay in memory."""
        self.kill()
        entries = [self.root, *self.root.walk()]
        for entry in entries:
            entry.lose_power(rng)
