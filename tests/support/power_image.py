"""What a disk holds after the power went: files and names, from a log and an instant of it.

Kept is what was synced: bytes and size of a file by its own sync, names by that of their directory.
Of the rest each page has, by chance, what it had at the last sync or after any write since; the
last write may be torn in sectors; sizes are the old or the new one; names made, given or removed
are so or not, in any combination.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.shim import Entry, Event

PAGE = 4096
SECTOR = 512
ZERO = bytes(PAGE)


class File:
    """The pages of one file now, and what of them is not synced."""

    def __init__(self) -> None:
        self.pages: list[bytes] = []
        self.size = 0
        self.synced_size = 0
        self.versions: dict[int, list[bytes]] = {}  # of pages not synced, the synced one first

    def write(self, offset: int, data: memoryview) -> None:
        self.resize(max(self.size, offset + len(data)))
        at = 0
        while at < len(data):
            number, inside = divmod(offset + at, PAGE)
            part = data[at : at + PAGE - inside]
            old = self.pages[number]
            new = old[:inside] + bytes(part) + old[inside + len(part) :]
            self.versions.setdefault(number, [old]).append(new)
            self.pages[number] = new
            at += len(part)

    def written_durably(self, offset: int, size: int) -> None:
        for number in range(offset // PAGE, -(-(offset + size) // PAGE)):
            self.versions.pop(number, None)
        self.synced_size = max(self.synced_size, min(self.size, offset + size))

    def resize(self, size: int) -> None:
        count = -(-size // PAGE)
        self.pages += [ZERO] * (count - len(self.pages))
        if size < self.size:
            for number in range(count, len(self.pages)):
                old = self.pages[number]
                self.versions.setdefault(number, [old]).append(ZERO)
            del self.pages[count:]
        self.size = size

    def sync(self) -> None:
        self.versions.clear()
        self.synced_size = self.size

    def after_power_loss(self, chance: random.Random, mode: str, torn: range) -> "Content":
        pages = list(self.pages)
        for number, versions in self.versions.items():
            if number >= len(pages):
                pages += [ZERO] * (number + 1 - len(pages))
            if mode == "kept":
                chosen = versions[-1]
            elif mode == "lost":
                chosen = versions[0]
            elif mode == "halves":
                chosen = versions[-1] if chance.random() < 0.5 else versions[0]
            else:
                chosen = chance.choice(versions)
            if number in torn:
                sectors = range(0, PAGE, SECTOR)
                last = versions[-1], versions[-2]
                chosen = b"".join(chance.choice(last)[at : at + SECTOR] for at in sectors)
            pages[number] = chosen
        size = self.size if mode == "kept" else chance.choice((self.size, self.synced_size))
        count = -(-size // PAGE)
        return Content(pages[:count] + [ZERO] * (count - len(pages)), size)


@dataclass(frozen=True)
class Content:
    """A file of an image."""

    pages: list[bytes]
    size: int


@dataclass(frozen=True)
class Image:
    """An image: its directories, and its files by their paths."""

    directories: list[str]
    files: dict[str, Content]


@dataclass
class Change:
    """A change of names, not durable before the directory is synced. node None: removed."""

    name: str
    node: "File | str | None"  # "directory", or the old name whose node is moved here


@dataclass
class Disk:
    """All files below `root`, as a log of changes passes by. The root itself is there."""

    root: str
    names: dict[str, File | str] = field(default_factory=dict)
    synced_names: dict[str, File | str] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    last: tuple[File, int, int] | None = None

    def apply(self, entry: Entry) -> None:
        """One entry of the log happens."""
        name, event = entry.name, entry.event
        node = self.names.get(name)
        if event is Event.MADE or event is Event.MADE_DIRECTORY:
            self._change(name, File() if event is Event.MADE else "directory")
        elif event is Event.REMOVED:
            self._change(name, None)
        elif event is Event.RENAMED:
            self.names[bytes(entry.data).decode()] = self.names.pop(name)
            self.changes.append(Change(bytes(entry.data).decode(), name))
        elif event is Event.SYNC_DIRECTORY:
            self._sync_names(name)
        elif isinstance(node, File):
            self._apply_to_file(node, entry)

    def _apply_to_file(self, file: File, entry: Entry) -> None:
        if entry.event is Event.WRITE:
            file.write(entry.offset, entry.data)
            self.last = (file, entry.offset, len(entry.data))
        elif entry.event is Event.DURABLE_WRITE:
            file.written_durably(entry.offset, len(entry.data))
        elif entry.event is Event.SYNC:
            file.sync()
        elif entry.event is Event.TRUNCATE:
            file.resize(entry.offset)
        elif entry.event is Event.ALLOCATE:
            file.resize(max(file.size, entry.offset))

    def _change(self, name: str, node: File | str | None) -> None:
        if node is None:
            self.names.pop(name, None)
        else:
            self.names[name] = node
        self.changes.append(Change(name, node))

    def _sync_names(self, directory: str) -> None:
        mine = [one for one in self.changes if os.path.dirname(one.name) == directory]
        for one in mine:
            _do(self.synced_names, one)
        self.changes = [one for one in self.changes if os.path.dirname(one.name) != directory]

    def image(self, chance: random.Random) -> Image:
        """The power goes now."""
        mode = chance.choice(("lost", "halves", "any", "any", "kept"))
        names = dict(self.synced_names)
        pick = chance.choice((0.0, 0.5, 0.5, 1.0))
        for one in self.changes:
            if chance.random() < pick:
                _do(names, one)
        directories = sorted(n for n, node in names.items() if node == "directory")
        known = set(directories)
        files = {}
        for name, node in names.items():
            if isinstance(node, File) and _is_reachable(os.path.dirname(name), known, self.root):
                torn = range(0)
                if self.last is not None and self.last[0] is node and mode != "kept":
                    first, size = self.last[1:]
                    torn = range(first // PAGE, -(-(first + size) // PAGE))
                files[name] = node.after_power_loss(chance, mode, torn)
        return Image([d for d in directories if _is_reachable(d, known, self.root)], files)


def _is_reachable(directory: str, known: set[str], root: str) -> bool:
    """Whether a directory is there, with all between it and the root."""
    while directory != root:
        if directory not in known:
            return False
        directory = os.path.dirname(directory)
    return True


def _do(names: dict[str, File | str], one: Change) -> None:
    if one.node is None:
        names.pop(one.name, None)
    elif isinstance(one.node, str) and one.node != "directory":
        if one.node in names:
            names[one.name] = names.pop(one.node)
    else:
        names[one.name] = one.node


class Place:
    """A directory that one image after the other is laid into; only what differs is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._laid: dict[str, Content] = {}

    def lay(self, image: Image) -> None:
        """Make the directory hold exactly this image."""
        for path in self._found():
            if str(path) not in image.files:
                path.unlink()
                self._laid.pop(str(path), None)
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and str(path) not in image.directories:
                path.rmdir()
        for directory in image.directories:
            Path(directory).mkdir(mode=0o700, exist_ok=True)
        for name, content in image.files.items():
            self._write(name, content)

    def _found(self) -> Iterator[Path]:
        yield from [path for path in self.root.rglob("*") if not path.is_dir()]

    def _write(self, name: str, content: Content) -> None:
        laid = self._laid.get(name)
        fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            state = os.fstat(fd)
            # Whoever wrote to it since has changed its time.
            same = laid is not None and state.st_mtime_ns == 1 and state.st_size == laid.size
            os.ftruncate(fd, content.size if same else 0)
            os.ftruncate(fd, content.size)
            old = laid.pages if laid is not None and same else []
            for number, page in enumerate(content.pages):
                if number >= len(old):
                    if page is not ZERO:
                        os.pwrite(fd, page, number * PAGE)
                elif old[number] is not page:
                    os.pwrite(fd, page, number * PAGE)
            os.ftruncate(fd, content.size)
        finally:
            os.close(fd)
        os.utime(name, ns=(1, 1))
        self._laid[name] = content
