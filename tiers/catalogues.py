"""What a volume needs of its catalogue, and where it gets one.

The seam below the disk tier that is no file call, because LMDB makes its own.
"""

from pathlib import Path
from typing import Protocol

from kvstore.tiers.catalogue import Catalogue, Change, CommitFault
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.catalogue_tables import Identity, Namespace, SegmentState
from kvstore.tiers.io import FileIo
from kvstore.tiers.walk import Walk, walk


class OwnedCatalogue(Protocol):
    """A volume's catalogue as its owner uses it. Each method is described at Catalogue's."""

    closed: bool
    written_bytes: int

    def commit(self, change: Change) -> CommitFault | None: ...
    def grow(self, size_bytes: int) -> CommitFault | None: ...
    def shrink(self, size_bytes: int) -> int: ...
    def load(self) -> tuple[dict[int, Rows], int]: ...
    def segments(self) -> dict[int, tuple[int, SegmentState]]: ...
    def namespaces(self) -> dict[int, Namespace]: ...
    def used_bytes(self) -> int: ...
    def close(self) -> None: ...


class Catalogues(Protocol):
    """Opens and examines the catalogues of volumes."""

    def own(
        self, directory: Path, io: FileIo, *, identity: Identity, size_bytes: int
    ) -> OwnedCatalogue:
        """The catalogue in a directory, made where there is none. Raises StoreError."""
        ...

    def walk(self, directory: Path, file_bytes: int) -> Walk:
        """Whether a catalogue that was not closed can be read. Never raises."""
        ...


class LmdbCatalogues:
    """The real ones."""

    def own(
        self, directory: Path, io: FileIo, *, identity: Identity, size_bytes: int
    ) -> OwnedCatalogue:
        """An LMDB file: see Catalogue."""
        return Catalogue(directory, io, identity=identity, size_bytes=size_bytes)

    def walk(self, directory: Path, file_bytes: int) -> Walk:
        """Read all of it in a process of its own: see walk."""
        return walk(directory, file_bytes)
