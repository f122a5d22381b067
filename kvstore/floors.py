"""The file `invalidated` in a store's home: which records are void although their bytes are whole.

Generations of records only grow, so one number a namespace says it: what is below was saved before
the invalidation. Four such floors, because not every invalidation is of a whole namespace:

    void      every record below it is void, always
    rebuild   some below it are void, and only the catalogue knows which: counts when that is lost,
              because a freed slot still has its old header
    start     some below it are void, and the catalogue may not know it yet: counts at every start
              until it does
    arena     likewise for records in a host arena of an owner that was killed before

The entry with a digest of zeros counts for every namespace. Bytes, little-endian: a head (HEAD),
the entries (ENTRY), XXH3-64 of all before it. Replaced whole, atomically.
"""

import struct
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

import xxhash

from kvstore.home import INVALIDATED_FILE, Home

MAGIC = b"KVINVAL1"
VERSION = 1
HEAD = struct.Struct("<8sII16s32x")  # magic, version, number of entries, store id
ENTRY = struct.Struct("<32sQQQQ")  # digest, void, rebuild, start, arena
CHECKSUM = struct.Struct("<Q")
ENTRIES_MAX = 64  # So that two of these files fit the overhead a store's directory is granted.
FILE_BYTES_MAX = HEAD.size + ENTRIES_MAX * ENTRY.size + CHECKSUM.size
EVERY = bytes(32)
BOOT_SHIFT = 32


@dataclass(frozen=True, slots=True)
class Floor:
    """Generations below which records of a namespace are void: see the module."""

    void: int = 0
    rebuild: int = 0
    start: int = 0
    arena: int = 0

    @property
    def highest(self) -> int:
        """The highest of the four."""
        return max(self.void, self.rebuild, self.start, self.arena)

    def raised(self, other: "Floor") -> "Floor":
        """The higher of both, one by one."""
        return Floor(
            max(self.void, other.void),
            max(self.rebuild, other.rebuild),
            max(self.start, other.start),
            max(self.arena, other.arena),
        )


class Floors:
    """The floors of a store. Belongs to one thread at a time; `write` alone makes them durable."""

    def __init__(self, store_id: bytes, entries: dict[bytes, Floor] | None = None) -> None:
        self._store_id = store_id
        self.entries = dict(entries or {})

    # --- what is void

    def of_row(self, digest: bytes) -> int:
        """The floor for rows of a catalogue that was read."""
        both = self._of(digest)
        return max(both.void, both.start)

    def of_rebuilt(self, digest: bytes) -> int:
        """The floor for records that were found by their headers alone."""
        both = self._of(digest)
        return max(both.void, both.start, both.rebuild)

    def of_arena(self, digest: bytes) -> int:
        """The floor for records in a former owner's arena."""
        both = self._of(digest)
        return max(both.void, both.start, both.arena)

    def _of(self, digest: bytes) -> Floor:
        nothing = Floor()
        return self.entries.get(digest, nothing).raised(self.entries.get(EVERY, nothing))

    def highest(self) -> int:
        """The highest of all: every new record's generation must be above."""
        return max((floor.highest for floor in self.entries.values()), default=0)

    def pending(self) -> bool:
        """Whether a `start` floor counts."""
        return any(floor.start for floor in self.entries.values())

    # --- changing

    def raise_to(self, digests: Iterable[bytes], floor: Floor) -> None:
        """Raise the floors of namespaces.

        Beyond ENTRIES_MAX they are kept together, as floors of every namespace that count where it
        costs others least: on a rebuild, and at the next start if that is still to come.
        """
        for digest in digests:
            self.entries[digest] = self.entries.get(digest, Floor()).raised(floor)
        void = self.entries.get(EVERY, Floor()).void
        self.entries = {d: f for d, f in self.entries.items() if d == EVERY or f.highest > void}
        while len(self.entries) > ENTRIES_MAX:
            oldest = min(
                (digest for digest in self.entries if digest != EVERY),
                key=lambda digest: self.entries[digest].highest,
            )
            gone = self.entries.pop(oldest)
            # The void ones of its records have left the catalogue, unless it is the newest.
            unsettled = floor.void if gone.void == floor.void else 0
            shared = Floor(0, max(gone.void, gone.rebuild), max(gone.start, unsettled), gone.arena)
            self.entries[EVERY] = self.entries.get(EVERY, Floor()).raised(shared)

    def settle(self, *, arena_too: bool) -> None:
        """The catalogue knows everything, and with `arena_too` the host arena holds nothing void.

        Without it there may be an arena that this owner has not looked into.
        """
        for digest, f in self.entries.items():
            arena = f.arena if arena_too else max(f.arena, f.start)
            self.entries[digest] = replace(f, start=0, arena=arena)

    # --- bytes

    def pack(self) -> bytes:
        """The bytes of the file."""
        head = HEAD.pack(MAGIC, VERSION, len(self.entries), self._store_id)
        body = head + b"".join(
            ENTRY.pack(digest, f.void, f.rebuild, f.start, f.arena)
            for digest, f in sorted(self.entries.items())
        )
        return body + CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, data: bytes, store_id: bytes) -> "Floors | None":
        """The floors in these bytes; None where they are damaged, or another store's."""
        body, end = data[: -CHECKSUM.size], data[-CHECKSUM.size :]
        if len(body) < HEAD.size or CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != end:
            return None
        magic, version, count, owner = HEAD.unpack_from(body)
        if (magic, version, owner) != (MAGIC, VERSION, store_id):
            return None
        if len(body) != HEAD.size + count * ENTRY.size:
            return None
        entries = ENTRY.iter_unpack(body[HEAD.size :])
        return cls(store_id, {digest: Floor(*numbers) for digest, *numbers in entries})


def read_floors(home: Home, store_id: bytes) -> Floors | None:
    """The floors of a store; none in a store that never invalidated.

    Returns: Floors | None (the file is damaged: the caller knows what to make of it).
    """
    data = home.read(INVALIDATED_FILE, FILE_BYTES_MAX)
    return Floors(store_id) if data is None else Floors.parse(data, store_id)


def floors_without_file(home: Home, store_id: bytes, boot: int) -> Floors:
    """In the place of a damaged file: what was saved before this owner is void on a rebuild."""
    warnings.warn(
        f"{home.path / INVALIDATED_FILE} is damaged: should the catalogue be lost, nothing that "
        "was saved until now will be served",
        RuntimeWarning,
        stacklevel=2,
    )
    below = boot << BOOT_SHIFT
    return Floors(store_id, {EVERY: Floor(rebuild=below, arena=below)})
