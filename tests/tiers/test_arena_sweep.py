"""Arenas that dead owners of other stores left are removed when memory is short, and only then."""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.arena import Arena
from kvstore.tiers.arena_file import ArenaStart, arena_path
from kvstore.tiers.arena_sweep import sweep_arenas
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo

MIB = 1 << 20
SEGMENT = MIB
ROOM = 8 * MIB


class SmallIo(FileIo):
    """A directory in which all files together may take ROOM bytes."""

    def free_bytes(self, place: int | str | Path) -> int:
        return ROOM - sum(
            os.stat(name, dir_fd=place, follow_symlinks=False).st_blocks * 512  # type: ignore[arg-type]
            for name in os.listdir(place)
        )


def store(number: int) -> bytes:
    return bytes([number]) * 16


def left_behind(directory: Path, number: int, segments: int = 3) -> Path:
    """The arena of a dead owner, with memory taken."""
    arena = Arena(
        segments * SEGMENT + 4096,
        SEGMENT,
        store_id=store(number),
        persist=True,
        directory=directory,
    )
    assert all(arena.commit(segment) for segment in range(segments))
    arena.close(keep=True)
    os.utime(arena.path, (number, number))
    return arena.path


def open_arena(directory: Path, number: int, segments: int) -> Arena:
    return Arena(
        segments * SEGMENT + 4096,
        SEGMENT,
        store_id=store(number),
        persist=True,
        directory=directory,
        io=SmallIo(),
    )


def test_the_oldest_go_first_and_no_more_than_need_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    younger, older = left_behind(tmp_path, 2), left_behind(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        arena = open_arena(tmp_path, 9, 4)
    assert arena.start is ArenaStart.NEW
    assert younger.exists() and not older.exists()
    assert [str(older) in record.getMessage() for record in caplog.records] == [True]
    arena.close(keep=False)


def test_nothing_is_swept_while_there_is_room(tmp_path: Path) -> None:
    left = left_behind(tmp_path, 1)
    open_arena(tmp_path, 9, 2).close(keep=False)
    assert left.exists()


def test_what_is_in_use_stays_and_is_told(tmp_path: Path) -> None:
    living = open_arena(tmp_path, 1, 5)
    assert all(living.commit(segment) for segment in range(5))
    with pytest.raises(ConfigError, match="1 arenas of running stores") as caught:
        open_arena(tmp_path, 9, 6)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert living.path.exists()
    assert not arena_path(tmp_path, store(9)).exists()
    living.close(keep=False)


def test_its_own_arena_is_never_swept_and_what_is_no_arena_stays(tmp_path: Path) -> None:
    own = left_behind(tmp_path, 9)
    others = [
        tmp_path / f"kvstore-{os.geteuid() + 1}-{'0' * 32}.arena",
        tmp_path / f"kvstore-{os.geteuid()}-{'0' * 31}.arena",
        tmp_path / "notes",
    ]
    for path in others:
        path.write_bytes(bytes(4 * MIB))
    link = tmp_path / f"kvstore-{os.geteuid()}-{'1' * 32}.arena"
    link.symlink_to(others[2])
    swept = sweep_arenas(SmallIo(), tmp_path, until_free_bytes=1 << 60, keep=own.name)
    assert swept.removed == () and swept.in_use == ()
    assert all(path.exists() for path in (own, link, *others))
    assert open_arena(tmp_path, 9, 3).start is ArenaStart.TAKEN_OVER


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of ROOM bytes."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place)]
    mounted = shutil.which("mount") and subprocess.run(command, check=False, capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("no filesystem can be mounted here; SmallIo stands in for it above")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_on_a_tmpfs_that_is_too_small(tiny: Path) -> None:
    """Refused before a page is touched; what runs out later is an outcome, never a signal."""
    with pytest.raises(ConfigError, match="does not fit"):
        Arena(2 * ROOM, SEGMENT, store_id=store(1), persist=True, directory=tiny)
    assert list(tiny.iterdir()) == []
    arena = Arena(ROOM, SEGMENT, store_id=store(1), persist=True, directory=tiny)
    (tiny / "other").write_bytes(bytes(4 * MIB))
    taken = [arena.commit(segment) for segment in range(arena.segments)]
    assert True in taken and taken[-1] is False
    assert not arena.populate_segment(arena.segments - 1)
    (tiny / "other").unlink()
    arena.close(keep=True)
    # A second store finds it in its way, and its owner gone.
    other = Arena(ROOM, SEGMENT, store_id=store(2), persist=True, directory=tiny)
    assert all(other.commit(segment) for segment in range(other.segments))
    other.close(keep=False)
    assert list(tiny.iterdir()) == []
