"""File calls: nothing is half written, no link is followed, no path is touched unseen."""

import os
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.errors import ConfigError, KvstoreError, StoreError
from kvstore.tiers.io import (
    FileIo,
    aligned_buffer,
    check_own_directory,
    open_own_directory,
    read_text,
)

IO = FileIo()


def made(path: Path, text: bytes = b"") -> int:
    fd = IO.open(path, create=True, write=True)
    IO.pwrite(fd, text, 0)
    return fd


def test_what_is_written_is_read(tmp_path: Path) -> None:
    fd = made(tmp_path / "x")
    parts = [bytes([n % 251]) * 7 for n in range(3000)]  # more buffers than one call takes
    IO.pwritev(fd, parts, 5)
    back = bytearray(7 * 3000)
    assert IO.pread(fd, back, 5) == len(back)
    assert bytes(back) == b"".join(parts)
    IO.close(fd)


def test_a_read_beyond_the_end_says_how_much_there_was(tmp_path: Path) -> None:
    fd = made(tmp_path / "x", b"0123456789")
    assert IO.pread(fd, bytearray(100), 4) == 6
    assert IO.pread(fd, bytearray(100), 50) == 0
    IO.close(fd)


def test_a_short_write_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    fd = made(tmp_path / "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError):
            IO.pwritev(fd, [b"a" * 3000, b"b" * 3000], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert IO.size(fd) == 5000
    IO.close(fd)


def test_files_and_directories_are_for_us_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        IO.close(made(tmp_path / "x"))
        IO.make_directory(tmp_path / "d")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_links_and_what_is_no_file_are_not_opened(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "."):
        with pytest.raises(OSError):
            IO.close(IO.open(tmp_path / name, create=True, write=True))
    assert target.read_bytes() == b"precious"


def test_buffers_are_fit_for_o_direct() -> None:
    for size in (1, 4096, 100_000):
        buffer = aligned_buffer(size)
        assert len(buffer) == size
        assert np.frombuffer(buffer, np.uint8).ctypes.data % 4096 == 0


def test_the_o_direct_probe_leaves_nothing(tmp_path: Path) -> None:
    found = IO.supports_direct(tmp_path)
    fd = IO.open_directory(tmp_path)
    assert IO.supports_direct(fd) == found
    assert IO._direct_by_name(tmp_path) == found
    IO.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_one_lock_for_one_owner(tmp_path: Path) -> None:
    first = made(tmp_path / "lock")
    second = IO.open(tmp_path / "lock", write=True)
    assert IO.lock(first)
    assert not IO.lock(second)
    IO.close(first)
    assert IO.lock(second)
    IO.close(second)


def test_a_missing_directory_is_made_only_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "new"
    assert not check_own_directory(IO, path, "disk path")
    assert not path.exists()
    IO.close(open_own_directory(IO, path, "disk path"))
    assert check_own_directory(IO, path, "disk path")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("missing/new", ConfigError),
        ("link", StoreError),
        ("dangling", StoreError),
        ("file", ConfigError),
        ("shared", StoreError),
    ],
)
def test_a_refused_path_says_why_and_stays_as_it_was(
    tmp_path: Path, place: str, fault: type[KvstoreError]
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(fault) as error:
        open_own_directory(IO, tmp_path / place, "disk path")
    assert "\n" not in str(error.value) and ";" in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    os.chown(path, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        open_own_directory(IO, path, "disk path")


def test_a_place_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(ConfigError):
        open_own_directory(IO, Path("/proc/kvstore-test"), "disk path")


def test_text_of_the_system_never_fails(tmp_path: Path) -> None:
    assert read_text(tmp_path / "nothing") == ""
    (tmp_path / "some").write_bytes(b"12\xff\n")
    assert read_text(tmp_path / "some").startswith("12")
