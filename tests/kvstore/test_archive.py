"""The archive's bytes: pinned, and damage in any of them is an error or a refused block."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.archive import (
    FRAME_BYTES,
    HEADER_BYTES,
    ArchiveError,
    ArchiveReader,
    ArchiveWriter,
    BlockFrame,
    NameFrame,
    check_archive,
)
from kvstore.tiers.catalogue_tables import Namespace

GOLDEN = Path(__file__).with_name("golden_archive_v1.bin")
BODY = 200


def written(blocks: int = 3) -> bytes:
    """A small archive of two namespaces; its records are any bytes, which the format allows."""
    sink = io.BytesIO()
    writer = ArchiveWriter(sink.write, "xxh3-128", 1_700_000_000)
    for number, label in enumerate(("model\0tenant", "other\0")):
        space = Namespace(bytes([number]) * 32, b'["layout"]', label)
        assert writer.namespace(space) == number
        for block in range(blocks):
            body = np.full(BODY, 16 * number + block, np.uint8)
            writer.block(number, body.data)
    writer.end()
    assert writer.bytes == len(sink.getvalue())
    return sink.getvalue()


def read(data: bytes) -> tuple[list[NameFrame | BlockFrame], ArchiveReader]:
    reader = ArchiveReader(io.BytesIO(data).read)
    return list(reader.frames(lambda _: BODY)), reader


def test_what_was_written_is_read() -> None:
    frames, reader = read(written())
    assert (reader.hash_name, reader.created_s, reader.complete) == (
        "xxh3-128",
        1_700_000_000,
        True,
    )
    names = [frame for frame in frames if isinstance(frame, NameFrame)]
    assert [name.namespace.label for name in names] == ["model\0tenant", "other\0"]
    blocks = [frame for frame in frames if isinstance(frame, BlockFrame)]
    assert [(b.number, bytes(b.body or b"")) for b in blocks] == [
        (n, bytes([16 * n + b]) * BODY) for n in range(2) for b in range(3)
    ]
    assert all(block.whole for block in blocks)


def test_the_format_is_pinned() -> None:
    assert written(1) == GOLDEN.read_bytes()


def test_every_cut_is_found() -> None:
    data = written(1)
    for size in range(len(data)):
        with pytest.raises(ArchiveError):
            check_archive(io.BytesIO(data[:size]).read)
    with pytest.raises(ArchiveError):
        check_archive(io.BytesIO(data + b"\0").read)
    check_archive(io.BytesIO(data).read)


def test_every_flipped_bit_is_found() -> None:
    """A block's own is told with the block, so that the others can still be taken."""
    data = written(1)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArchiveError):
            check_archive(io.BytesIO(flipped).read)
        try:
            frames, reader = read(bytes(flipped))
        except ArchiveError:
            continue
        assert not reader.complete
        assert sum(isinstance(f, BlockFrame) and not f.whole for f in frames) == 1


def resealed(data: bytes, at: int, size: int) -> bytes:
    """The same bytes with a right checksum after `size` bytes at `at`: what a forger would do."""
    sum_ = struct.pack("<Q", xxhash.xxh3_64_intdigest(data[at : at + size]))
    return data[: at + size] + sum_ + data[at + size + 8 :]


@pytest.mark.parametrize("version", [0, 2, 7])
def test_another_version_is_refused(version: int) -> None:
    data = bytearray(written())
    data[8:12] = struct.pack("<I", version)
    with pytest.raises(ArchiveError, match=f"format {version}, this one reads 1"):
        check_archive(io.BytesIO(resealed(bytes(data), 0, 48)).read)


@pytest.mark.parametrize("length", [0, 35, 1 << 17, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("frame", [0, 1])
def test_no_length_is_trusted(length: int, frame: int) -> None:
    """Whatever a frame claims, no more is read into memory than such a frame can have."""
    data = bytearray(written())
    first = HEADER_BYTES
    at = first if frame == 0 else first + FRAME_BYTES + struct.unpack_from("<Q", data, first + 8)[0]
    data[at + 8 : at + 16] = struct.pack("<Q", length)
    hostile = resealed(bytes(data), at, 24)
    asked: list[int] = []
    source = io.BytesIO(hostile)

    def counted(size: int) -> bytes:
        asked.append(size)
        return source.read(size)

    reader = ArchiveReader(counted)
    with pytest.raises(ArchiveError):
        list(reader.frames(lambda _: BODY))
    assert max(asked) <= 1 << 20


def test_a_label_that_would_move_the_cursor_is_not_shown() -> None:
    sink = io.BytesIO()
    writer = ArchiveWriter(sink.write, "xxh3-128", 1)
    writer.namespace(Namespace(bytes(32), b"[]", "a\x1b[2J\0b"))
    writer.end()
    (frame,), _ = read(sink.getvalue())
    assert isinstance(frame, NameFrame)
    assert frame.namespace.label == ""


@pytest.mark.parametrize("data", [b"", b"KVEXPRT1", b"x" * 4096, bytes(64)])
def test_what_is_no_archive(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        check_archive(io.BytesIO(data).read)
