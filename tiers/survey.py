"""What lies at the paths of a disk tier, looked at before anything is touched.

Every refusal is one sentence that says what to do, and leaves each path as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.tiers.catalogue import DATA_FILE, LOCK_FILE
from kvstore.tiers.catalogue_tables import Identity
from kvstore.tiers.errors import ConfigError, StoreError
from kvstore.tiers.io import FileIo, check_own_directory
from kvstore.tiers.segment import (
    HEADER_BYTES,
    VOLUME_FILE,
    VOLUME_MAGIC,
    FileHeader,
    FileHeaderFault,
    parse_header,
    segment_number,
)

CATALOGUE_DIRECTORY = "catalogue"
CLEAN_FILE = "clean"
REBUILD_FILE = "rebuilding"
NEW_SUFFIX = ".new"  # A file that is being made; a crash may leave it.
OWN_NAMES = {
    *(VOLUME_FILE, CLEAN_FILE, REBUILD_FILE, CATALOGUE_DIRECTORY),
    *(VOLUME_FILE + NEW_SUFFIX, CLEAN_FILE + NEW_SUFFIX),
}


@dataclass(frozen=True)
class Survey:
    """What was found at one path. device: the filesystem's id; new volumes have no header."""

    exists: bool
    header: FileHeader | None
    segments: tuple[int, ...]
    catalogue_bytes: int
    allocated_bytes: int
    device: int


def read_volume_header(io: FileIo, path: Path) -> FileHeader | FileHeaderFault | None:
    """The header of the volume at `path`.

    Returns: the header | MAGIC, VERSION, CHECKSUM | None (no volume there).
    """
    try:
        fd = io.open(path / VOLUME_FILE)
    except FileNotFoundError:
        return None
    try:
        page = bytearray(HEADER_BYTES)
        io.pread(fd, page, 0)
    finally:
        io.close(fd)
    # A crash while the volume was made may have left the file empty, or its page unwritten.
    return parse_header(bytes(page), VOLUME_MAGIC) if any(page) else None


def survey(io: FileIo, path: Path, identity: Identity) -> Survey:
    """Look at one path. Raises ConfigError or StoreError for one that cannot be this volume."""
    try:
        if not check_own_directory(io, path, "disk path"):
            device = io.status(path.parent).st_dev
            return Survey(False, None, (), 0, 0, device)
        names = io.list_names(path)
        header = read_volume_header(io, path)
        if header is not None:
            header = _refuse_header(header, identity, path)
        _refuse_foreign_names(names, path)
        segments = [number for name in names if (number := segment_number(name)) is not None]
        parts = [path / name for name in names if name != CATALOGUE_DIRECTORY]
        if CATALOGUE_DIRECTORY in names:
            parts += [
                path / CATALOGUE_DIRECTORY / name
                for name in io.list_names(path / CATALOGUE_DIRECTORY)
            ]
        states = {part: io.status(part) for part in parts}
        data = states.get(path / CATALOGUE_DIRECTORY / DATA_FILE)
        return Survey(
            True,
            header,
            tuple(segments),
            data.st_size if data is not None else 0,
            sum(state.st_blocks * 512 for state in states.values()),
            io.status(path).st_dev,
        )
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; check that device") from None


def refuse_no_room(
    io: FileIo, paths: Sequence[Path], found: Sequence[Survey], share_bytes: int
) -> None:
    """Raise ConfigError when the volumes may grow beyond what is free on their filesystems.

    Not for volumes that had this capacity already, or more: they go on with what room there is.
    """
    if all(one.header and one.header.capacity_bytes >= share_bytes for one in found):
        return
    for device in {one.device for one in found}:
        here = [at for at, one in enumerate(found) if one.device == device]
        growth = sum(max(0, share_bytes - found[at].allocated_bytes) for at in here)
        place = paths[here[0]] if found[here[0]].exists else paths[here[0]].parent
        free = io.free_bytes(place)
        if growth > free:
            raise ConfigError(
                f"the disk capacity needs {growth} more bytes at {place} but {free} are free; "
                "lower disk_capacity or free some space"
            )


def _refuse_header(
    header: FileHeader | FileHeaderFault, identity: Identity, path: Path
) -> FileHeader | None:
    """The header if it is this volume's; None if it is damaged (segments' headers will tell)."""
    if header is FileHeaderFault.VERSION:
        raise StoreError(
            f"{path} was written by another version of kvstore; use that version, or give another "
            "directory"
        )
    if header is FileHeaderFault.MAGIC:
        raise StoreError(f"{path} has a file named {VOLUME_FILE!r} that is not ours; move it away")
    if not isinstance(header, FileHeader):
        return None
    if header.store_id != identity.store_id:
        raise StoreError(f"{path} belongs to another store; give each store its own directories")
    if (header.volume, header.volumes) != (identity.volume, identity.volumes):
        raise StoreError(
            f"{path} is path {header.volume + 1} of {header.volumes} of its store; give the same "
            "paths in the same order"
        )
    if header.segment_bytes != identity.segment_bytes:
        raise StoreError(
            f"{path} has segments of {header.segment_bytes} bytes; open it with that segment size"
        )
    return header


def _refuse_foreign_names(names: list[str], path: Path) -> None:
    for name in names:
        if name not in OWN_NAMES and segment_number(name) is None:
            raise StoreError(
                f"{path} holds {name!r}, which is not ours; give an empty directory, or a store's"
            )


def catalogue_files(path: Path) -> tuple[Path, Path]:
    """The two files of the catalogue of the volume at `path`."""
    return path / CATALOGUE_DIRECTORY / DATA_FILE, path / CATALOGUE_DIRECTORY / LOCK_FILE
