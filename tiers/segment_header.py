"""The first page of a segment's file, read and written."""

from pathlib import Path

from kvstore.tiers.catalogue_tables import Identity
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.segment import (
    HEADER_BYTES,
    SEGMENT_MAGIC,
    FileHeader,
    FileHeaderFault,
    has_checksum,
    parse_header,
    segment_name,
)


def read_segment_header(
    io: FileIo, fd: int, identity: Identity, segment: int, path: Path
) -> FileHeader | None:
    """The header of a segment of the volume at `path`; None for a damaged one.

    Raises StoreError for the segment of another store or version, and OSError.
    """
    buffer = aligned_buffer(HEADER_BYTES)
    if io.pread(fd, buffer, 0) != HEADER_BYTES:
        return None
    header = parse_header(bytes(buffer), SEGMENT_MAGIC)
    name = path / segment_name(segment)
    if header is FileHeaderFault.VERSION and has_checksum(bytes(buffer)):
        raise StoreError(
            f"{name} was written by another version of kvstore; use that version, or give another "
            "directory"
        )
    if not isinstance(header, FileHeader) or header.segment != segment:
        return None
    found = Identity(header.store_id, header.volume, header.volumes, header.segment_bytes)
    if found != identity:
        raise StoreError(f"{name} belongs to another store; move it away")
    return header


def write_segment_header(
    io: FileIo, fd: int, identity: Identity, segment: int, slot_bytes: int
) -> None:
    """Write the header of a segment and sync the file. Raises OSError."""
    buffer = aligned_buffer(HEADER_BYTES)
    buffer[:] = FileHeader(
        SEGMENT_MAGIC,
        identity.store_id,
        identity.volume,
        identity.volumes,
        identity.segment_bytes,
        segment,
        slot_bytes,
    ).pack()
    io.pwrite(fd, buffer, 0)
    io.fdatasync(fd)
