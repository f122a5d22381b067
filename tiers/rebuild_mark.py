"""The mark that a catalogue is being rebuilt: an empty file beside it.

It is on the device before the old catalogue goes and until the new one has all its rows. Without it
a stop in between would leave a sound catalogue that has forgotten blocks.
"""

from pathlib import Path

from kvstore.tiers.io import FileIo, sync_directory
from kvstore.tiers.survey import REBUILD_FILE


def has_rebuild_mark(io: FileIo, volume: Path) -> bool:
    """Whether a rebuild of the catalogue in this volume's directory did not come to its end."""
    return io.exists(volume / REBUILD_FILE)


def make_rebuild_mark(io: FileIo, volume: Path) -> None:
    """Mark the catalogue as unfinished; durable when this returns. Raises OSError."""
    io.close(io.open(volume / REBUILD_FILE, create=True, write=True))
    sync_directory(io, volume)


def remove_rebuild_mark(io: FileIo, volume: Path) -> None:
    """The catalogue is whole. Raises OSError."""
    if io.exists(volume / REBUILD_FILE):
        io.unlink(volume / REBUILD_FILE)
        sync_directory(io, volume)
