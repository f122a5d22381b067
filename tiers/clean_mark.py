"""The mark of a clean stop: a digest of the catalogue, so that the next start may trust it at once.

Without the mark, or when the catalogue is not what the mark says, it is walked in a child first.

    0   magic KVCLEAN1
    8   bytes of the catalogue that the digest covers
    16  store id
    32  XXH3-128 of them
"""

from pathlib import Path

import xxhash

from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.survey import CLEAN_FILE, NEW_SUFFIX

MAGIC = b"KVCLEAN1"
MARK_BYTES = 48
PART_BYTES = 8 << 20


def take_mark(io: FileIo, directory: int, data: Path, store_id: bytes) -> bool:
    """Remove the mark in `directory`, a descriptor; durable when this returns. Raises OSError.

    Returns: True, the catalogue `data` is what the mark says | False, no mark, or another one.
    """
    if not io.exists(CLEAN_FILE, directory=directory):
        return False
    fd = io.open(CLEAN_FILE, directory=directory)
    page = bytearray(MARK_BYTES)
    try:
        io.pread(fd, page, 0)
    finally:
        io.close(fd)
    io.unlink(CLEAN_FILE, directory=directory)
    io.fsync(directory)
    size = int.from_bytes(page[8:16], "little")
    return bytes(page) == _mark(io, data, size, store_id)


def write_mark(io: FileIo, directory: int, data: Path, size: int, store_id: bytes) -> None:
    """Write the mark for the first `size` bytes of a closed catalogue; without it if that fails."""
    name = CLEAN_FILE + NEW_SUFFIX
    try:
        mark = _mark(io, data, size, store_id)
        fd = io.open(name, create=True, write=True, directory=directory)
        try:
            io.pwrite(fd, mark, 0)
            io.fdatasync(fd)
        finally:
            io.close(fd)
        io.rename(name, CLEAN_FILE, directory=directory)
        io.fsync(directory)
    except OSError:
        return  # The next start walks the catalogue first; nothing else depends on the mark.


def _mark(io: FileIo, data: Path, size: int, store_id: bytes) -> bytes:
    """The mark of a catalogue as it lies on the device; b"" if it is shorter than `size`."""
    digest = xxhash.xxh3_128()
    buffer = aligned_buffer(PART_BYTES)
    fd = io.open(data)
    try:
        if io.size(fd) < size:
            return b""
        for at in range(0, size, PART_BYTES):
            got = io.pread(fd, buffer[: min(PART_BYTES, size - at)], at)
            digest.update(buffer[:got])
    finally:
        io.close(fd)
    return MAGIC + size.to_bytes(8, "little") + store_id + digest.digest()
