"""The bytes of an archive, format version 1: blocks of a store in one stream. Pure; no files.

    header      64 bytes: magic, version, hash of the keys
    frames      each 32 bytes, and a body
      NAME      a namespace: digest, label, canonical layout; before its first block
      BLCK      a record v1 (tiers/record.py), without the zeros at its end; parents come first
      END       how many there were, and a digest of every byte before this frame

docs/formats.md has every field. Checksums and digest find damage; they prove nothing of who wrote
an archive. A reader trusts no length: each is compared with a limit before a byte is kept for it.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from kvstore.tiers.catalogue_tables import (
    LABEL_BYTES_MAX,
    LAYOUT_BYTES_MAX,
    NAMESPACES_MAX,
    Namespace,
)
from kvstore.tiers.errors import StoreError
from kvstore.tiers.record import NAMESPACE_BYTES

MAGIC = b"KVEXPRT1"
VERSION = 1
HEADER = struct.Struct("<8sII16sQ16x")
FRAME = struct.Struct("<4sIQQ")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECKSUM.size
FRAME_BYTES = FRAME.size + CHECKSUM.size
NAME, BLOCK, END = b"NAME", b"BLCK", b"END\0"
LABEL_LENGTH = struct.Struct("<I")
ENDING = struct.Struct("<QQ16s")
NAME_BYTES_MAX = NAMESPACE_BYTES + LABEL_LENGTH.size + LABEL_BYTES_MAX + LAYOUT_BYTES_MAX
BODY_BYTES_MAX = 5 << 30  # A block has at most 4 GiB, and its header far less than the rest.
PIECE_BYTES = 1 << 20

Read = Callable[[int], bytes]
Write = Callable[[bytes | memoryview], object]


class ArchiveError(StoreError):
    """A stream that is no archive, or not a whole one."""


@dataclass(frozen=True)
class NameFrame:
    """A namespace, and the number that its blocks give."""

    number: int
    namespace: Namespace


@dataclass(frozen=True)
class BlockFrame:
    """A block of the namespace `number`. body: None if it has another length than it must have.

    whole: whether the body passes its checksum.
    """

    number: int
    body: bytearray | None
    whole: bool


class ArchiveWriter:
    """Writes an archive, from its header to `end`."""

    def __init__(self, write: Write, hash_name: str, created_s: int) -> None:
        self.bytes = 0
        self._write = write
        self._digest = xxhash.xxh3_128()
        self._namespaces = 0
        self._blocks = 0
        header = HEADER.pack(MAGIC, VERSION, 0, hash_name.encode(), created_s)
        self._put(header + CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)))

    def namespace(self, namespace: Namespace) -> int:
        """Write a namespace. Returns: its number in this archive."""
        label = namespace.label.encode()[:LABEL_BYTES_MAX].decode(errors="ignore").encode()
        body = namespace.digest + LABEL_LENGTH.pack(len(label)) + label + namespace.layout
        self._frame(NAME, self._namespaces, body)
        self._namespaces += 1
        return self._namespaces - 1

    def block(self, number: int, record: memoryview) -> None:
        """Write a block of a namespace: its header and payload, without the zeros after it."""
        self._frame(BLOCK, number, record)
        self._blocks += 1

    def end(self) -> None:
        """Write the end mark: without it the archive counts as cut off."""
        body = ENDING.pack(self._namespaces, self._blocks, self._digest.digest())
        self._frame(END, 0, body)

    def _frame(self, kind: bytes, number: int, body: bytes | memoryview) -> None:
        head = FRAME.pack(kind, number, len(body), xxhash.xxh3_64_intdigest(body))
        self._put(head + CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)))
        self._put(body)

    def _put(self, data: bytes | memoryview) -> None:
        self._write(data)
        self._digest.update(data)
        self.bytes += len(data)


class ArchiveReader:
    """Reads an archive, frame by frame. Raises ArchiveError, and nothing else of its own, ever.

    hash_name: how the keys were made.  complete: the end mark was read, and all before it is whole.
    """

    def __init__(self, read: Read) -> None:
        self.bytes = 0
        self.complete = False
        self._source = read
        self._digest = xxhash.xxh3_128()
        self._counts = [0, 0]
        self._all_whole = True
        header = self._exactly(HEADER_BYTES)
        magic, version, _, hash_name, self.created_s = HEADER.unpack_from(header)
        if magic != MAGIC:
            raise ArchiveError("this is no archive of kvstore; give a file that export wrote")
        if version != VERSION:
            age = "a newer" if version > VERSION else "an older"
            raise ArchiveError(
                f"the archive was written by {age} kvstore (format {version}, this one reads "
                f"{VERSION}); export it again with this version"
            )
        self._check(header[: HEADER.size], header[HEADER.size :])
        self.hash_name = bytes(hash_name).rstrip(b"\0").decode("ascii", errors="replace")

    def frames(self, length_of: Callable[[int], int | None]) -> Iterator[NameFrame | BlockFrame]:
        """All frames up to the end mark.

        length_of: the bytes that a block of the namespace `number` has; None if it is not wanted,
        and then its body is passed over. Raises ArchiveError where the archive is cut off, or
        damaged in a way that hides what follows.
        """
        while True:
            before = self._digest.digest()
            head = self._exactly(FRAME_BYTES)
            self._check(head[: FRAME.size], head[FRAME.size :])
            kind, number, length, checksum = FRAME.unpack_from(head)
            if kind == NAME:
                yield self._name(number, length, checksum)
                self._counts[0] += 1
            elif kind == BLOCK and number < self._counts[0]:
                yield self._block(number, length, checksum, length_of(number))
                self._counts[1] += 1
            elif kind == END and length == ENDING.size:
                return self._end(checksum, before)
            else:
                raise self._damaged()

    def _name(self, number: int, length: int, checksum: int) -> NameFrame:
        least = NAMESPACE_BYTES + LABEL_LENGTH.size
        if number != self._counts[0] or number >= NAMESPACES_MAX:
            raise self._damaged()
        if not least <= length <= NAME_BYTES_MAX:
            raise self._damaged()
        body = bytes(self._exactly(length))
        self._check(body, CHECKSUM.pack(checksum))
        label_end = least + LABEL_LENGTH.unpack_from(body, NAMESPACE_BYTES)[0]
        if label_end > length or label_end - least > LABEL_BYTES_MAX:
            raise self._damaged()
        label = body[least:label_end].decode(errors="replace")
        if not all(part.isprintable() for part in label.split("\0", 1)):
            label = ""  # It is for people and their terminals.
        return NameFrame(number, Namespace(body[:NAMESPACE_BYTES], body[label_end:], label))

    def _block(self, number: int, length: int, checksum: int, wanted: int | None) -> BlockFrame:
        if length > BODY_BYTES_MAX:
            raise self._damaged()
        if length != wanted:
            self._pass_over(length)
            self._all_whole = self._all_whole and wanted is None
            return BlockFrame(number, None, True)
        body = self._exactly(length)
        whole = xxhash.xxh3_64_intdigest(body) == checksum
        self._all_whole = self._all_whole and whole
        return BlockFrame(number, body, whole)

    def _end(self, checksum: int, before: bytes) -> None:
        body = self._exactly(ENDING.size)
        self._check(body, CHECKSUM.pack(checksum))
        if ENDING.unpack(body) != (*self._counts, before) or self._source(1):
            raise self._damaged()
        self.complete = self._all_whole

    def _exactly(self, size: int) -> bytearray:
        """The next bytes. Memory is taken as they come."""
        data = bytearray()
        while len(data) < size:
            piece = self._source(min(PIECE_BYTES, size - len(data)))
            if not piece:
                raise ArchiveError(
                    f"the archive ends too early, after {self.bytes + len(data)} bytes"
                )
            data += piece
        self._digest.update(data)
        self.bytes += size
        return data

    def _pass_over(self, size: int) -> None:
        while size:
            size -= len(self._exactly(min(PIECE_BYTES, size)))

    def _check(self, data: bytes | bytearray, checksum: bytes | bytearray) -> None:
        if CHECKSUM.pack(xxhash.xxh3_64_intdigest(data)) != checksum:
            raise self._damaged()

    def _damaged(self) -> ArchiveError:
        return ArchiveError(f"the archive is damaged after {self.bytes} bytes")


def check_archive(read: Read) -> None:
    """Read a whole archive and raise ArchiveError unless it is whole, with its end mark."""
    reader = ArchiveReader(read)
    for frame in reader.frames(lambda _: None):
        del frame
    if not reader.complete:
        raise ArchiveError("the archive is damaged")
