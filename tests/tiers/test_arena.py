"""The arena's file: who may have it, what is taken over, what is refused, and what it costs."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.arena import Arena
from kvstore.tiers.arena_file import ArenaStart, arena_path
from kvstore.tiers.arena_header import CLASSES_AT, header_bytes_of, segments_in
from kvstore.tiers.errors import ConfigError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo

MIB = 1 << 20
STORE = bytes(range(16))


def arena(directory: Path, capacity: int = 4 * MIB, **settings: object) -> Arena:
    chosen = {"store_id": STORE, "persist": True, "directory": directory, **settings}
    return Arena(capacity, MIB - 4096, **chosen)  # type: ignore[arg-type]


def crash(owner: Arena) -> None:
    """What a kill leaves: the file as it is, without its owner's lock."""
    assert owner._file is not None
    os.close(owner._file.lock)


@given(capacity=st.integers(0, 1 << 44), segment=st.integers(2, 1 << 16).map(lambda n: n * 4096))
@settings(deadline=None)
def test_as_many_segments_as_fit_beside_their_header(capacity: int, segment: int) -> None:
    segments = segments_in(capacity, segment)
    total = header_bytes_of(segments) + segments * segment
    assert total <= capacity or segments == 0
    assert header_bytes_of(segments + 1) + (segments + 1) * segment > capacity


def test_the_file_is_at_most_the_capacity(tmp_path: Path) -> None:
    for capacity in (MIB, 4 * MIB - 1, 4 * MIB, 4 * MIB + 4096):
        owner = arena(tmp_path, capacity)
        size = owner.path.stat().st_size
        assert capacity - MIB < size == owner.file_bytes <= capacity
        owner.close(keep=False)


def test_a_memfd_leaves_no_name_and_a_clean_stop_removes_the_file(tmp_path: Path) -> None:
    private = arena(tmp_path, persist=False)
    assert list(tmp_path.iterdir()) == []
    assert not arena_path(Path("/dev/shm"), STORE).exists()
    private.close(keep=True)
    owner = arena(tmp_path)
    assert owner.path == tmp_path / f"kvstore-{os.geteuid()}-{STORE.hex()}.arena"
    assert owner.path.stat().st_mode & 0o777 == 0o600
    owner.close(keep=False)
    owner.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_what_was_kept_is_taken_over_with_its_bytes_and_classes(tmp_path: Path) -> None:
    first = arena(tmp_path)
    assert (first.start, first.boot, first.was_clean) == (ArenaStart.NEW, 1, False)
    first.buffer[first.segments_at :][:5] = b"hello"
    first.set_class(2, 12288)
    first.close(keep=True)
    second = arena(tmp_path)
    assert (second.start, second.boot, second.was_clean) == (ArenaStart.TAKEN_OVER, 2, True)
    assert bytes(second.buffer[second.segments_at :][:5]) == b"hello"
    assert second.classes().tolist() == [0, 0, 12288, 0]
    crash(second)
    third = arena(tmp_path)
    assert (third.start, third.boot, third.was_clean) == (ArenaStart.TAKEN_OVER, 3, False)
    third.close(keep=False)


class Room(FileIo):
    """A tmpfs with little room; remembers whether anything was made or given memory."""

    def __init__(self, free: int) -> None:
        self.free, self.made = free, 0

    def free_bytes(self, place: int | str | Path) -> int:
        return self.free

    def allocate(self, fd: int, size: int, offset: int = 0) -> None:
        self.made += 1
        if size > self.free:
            raise OSError(28, "No space left on device")
        self.free -= size
        super().allocate(fd, size, offset)

    def truncate(self, fd: int, size: int) -> None:
        self.made += 1
        super().truncate(fd, size)


def test_a_capacity_above_what_is_free_is_refused_before_a_page_is_touched(tmp_path: Path) -> None:
    io = Room(4 * (MIB - 4096) + 4095)
    with pytest.raises(ConfigError, match=r"host capacity of \d+ bytes does not fit: .*lower"):
        arena(tmp_path, io=io)
    assert io.made == 0 and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="does not fit: this machine has"):
        Arena(1 << 50, 64 * MIB, store_id=STORE, persist=False)
    assert Arena(4 * MIB, MIB, store_id=STORE, persist=False).segments == 3


def test_memory_that_runs_out_later_is_an_outcome_and_no_signal(tmp_path: Path) -> None:
    io = Room(5 * MIB)
    owner = arena(tmp_path, io=io)
    io.free = 2 * MIB  # Others filled the rest meanwhile.
    assert [owner.commit(segment) for segment in (0, 1, 0, 2, 3)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    owner.close(keep=False)


@pytest.mark.parametrize(
    ("capacity", "segment", "store", "said"),
    [
        (MIB, MIB, STORE, f"give at least {MIB + 4096}"),
        (-1, MIB, STORE, "too small"),
        (MIB, 4096, STORE, "multiple of 4096"),
        (MIB, 100_000, STORE, "multiple of 4096"),
        (4 * MIB, MIB, b"short", "16 bytes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    capacity: int, segment: int, store: bytes, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Arena(capacity, segment, store_id=store, persist=False)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot hold shared memory .* name a tmpfs"):
        arena(tmp_path / "nowhere")


# --- what is found under the name is not trusted


def test_a_link_or_a_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    name, target = arena_path(tmp_path, STORE), tmp_path / "target"
    target.write_bytes(b"precious")
    name.symlink_to(target)
    with pytest.raises(StoreError, match=r"is a link.*remove it"):
        arena(tmp_path)
    assert target.read_bytes() == b"precious" and name.is_symlink()
    name.unlink()
    name.mkdir()
    with pytest.raises(StoreError, match="remove it"):
        arena(tmp_path)
    name.rmdir()
    os.mkfifo(name)
    with pytest.raises(StoreError, match="remove it"):
        arena(tmp_path)


class Foreign(FileIo):
    """Every file belongs to another user."""

    def stat(self, fd: int) -> os.stat_result:
        state = list(super().stat(fd))
        state[4] = os.geteuid() + 1
        return os.stat_result(state)


def test_another_users_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    first = arena(tmp_path)
    first.close(keep=True)
    before = first.path.read_bytes()
    with pytest.raises(StoreError, match=f"belongs to user {os.geteuid() + 1}; remove it"):
        arena(tmp_path, io=Foreign())
    assert first.path.read_bytes() == before


def replaced(directory: Path) -> bool:
    """Opens the store's arena; whether it began empty in place of the old one."""
    owner = arena(directory)
    segments = np.frombuffer(owner.buffer, np.uint8)[owner.segments_at :]
    empty = not segments.any() and not owner.classes().any()
    assert empty == (owner.start is ArenaStart.REPLACED)
    assert owner.boot == 1 or not empty
    owner.close(keep=False)
    return empty


def left_behind(directory: Path, **settings: object) -> Path:
    first = arena(directory, **settings)
    first.buffer[first.segments_at] = 1
    first.set_class(0, 8192)
    first.close(keep=True)
    return first.path


def test_another_stores_arena_under_the_name_is_swept(tmp_path: Path) -> None:
    assert not replaced(left_behind(tmp_path).parent)
    other = left_behind(tmp_path, store_id=b"another store id")
    other.rename(arena_path(tmp_path, STORE))
    assert replaced(tmp_path)


def test_an_arena_of_another_size_is_swept(tmp_path: Path) -> None:
    left_behind(tmp_path, capacity=3 * MIB)
    assert replaced(tmp_path)
    path = left_behind(tmp_path)
    os.truncate(path, path.stat().st_size - 4096)
    assert replaced(tmp_path)
    arena_path(tmp_path, STORE).touch(0o600)  # Killed between the name and the header.
    assert replaced(tmp_path)


def test_every_flipped_bit_of_the_fixed_header_is_noticed(tmp_path: Path) -> None:
    for bit in range(0, 128 * 8, 7):
        path = left_behind(tmp_path)
        with path.open("r+b") as file:
            byte = file.read(128)[bit // 8] ^ 1 << bit % 8
            file.seek(bit // 8)
            file.write(bytes([byte]))
        assert replaced(tmp_path), f"bit {bit}"


def test_an_arena_that_others_could_write_is_swept(tmp_path: Path) -> None:
    left_behind(tmp_path).chmod(0o660)
    assert replaced(tmp_path)
    path, alias = left_behind(tmp_path), tmp_path / "alias"
    os.link(path, alias)
    assert replaced(tmp_path)
    assert alias.stat().st_size == 4 * (MIB - 4096) + 4096


def test_every_flipped_bit_of_a_class_word_means_no_class(tmp_path: Path) -> None:
    owner = arena(tmp_path, persist=False)
    owner.set_class(1, 16384)
    for bit in range(64):
        at = CLASSES_AT + 8 + bit // 8
        owner.buffer[at] ^= 1 << bit % 8
        assert owner.classes().tolist() == [0, 0, 0, 0]
        owner.buffer[at] ^= 1 << bit % 8
    word = bytes(owner.buffer[CLASSES_AT + 8 : CLASSES_AT + 16])
    owner.buffer[CLASSES_AT : CLASSES_AT + 8] = word  # A good word in another's place.
    assert owner.classes().tolist() == [0, 16384, 0, 0]
    owner.close(keep=False)


# --- one owner


def test_a_second_owner_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = arena(tmp_path)
    with pytest.raises(StoreBusyError, match="in use by another process"):
        arena(tmp_path)
    program = (
        "import sys; from pathlib import Path; from kvstore.tiers.arena import Arena\n"
        "Arena(4 << 20, (1 << 20) - 4096, store_id=bytes(range(16)), persist=True,"
        " directory=Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1 and "StoreBusyError" in other.stderr
    first.close(keep=True)
    arena(tmp_path).close(keep=False)


def test_views_and_descriptors_given_away_do_not_keep_the_lock(tmp_path: Path) -> None:
    first = arena(tmp_path)
    view = np.frombuffer(first.buffer, np.uint8)
    given = os.dup(first.fd)
    first.close(keep=True)
    second = arena(tmp_path)
    assert second.start is ArenaStart.TAKEN_OVER
    second.buffer[second.segments_at] = 7
    assert view[second.segments_at] == 7  # Still the same memory, and still readable.
    os.close(given)
    second.close(keep=False)


def test_close_leaves_a_file_that_took_the_name_alone(tmp_path: Path) -> None:
    owner = arena(tmp_path)
    owner.path.unlink()
    owner.path.write_bytes(b"someone's")
    owner.close(keep=False)
    assert owner.path.read_bytes() == b"someone's"


def test_a_file_that_vanishes_between_open_and_lock_is_not_used(tmp_path: Path) -> None:
    path = left_behind(tmp_path)

    class Racing(FileIo):
        def lock(self, fd: int) -> bool:
            if not gone:
                gone.append(path.unlink())
            return super().lock(fd)

    gone: list[None] = []
    owner = arena(tmp_path, io=Racing())
    assert path.stat().st_ino == os.fstat(owner.fd).st_ino
    assert not owner.classes().any()
    owner.close(keep=False)


def test_no_descriptor_is_left_after_a_refusal_or_a_close(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first = arena(tmp_path)
    for chosen in ({}, {"io": Foreign()}, {"io": Room(0), "store_id": bytes(16)}):
        with pytest.raises((StoreError, ConfigError)):
            arena(tmp_path, **chosen)
    first.close(keep=False)
    arena(tmp_path, persist=False).close(keep=False)
    assert len(os.listdir("/proc/self/fd")) == before


# --- memory


def status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def test_pages_are_taken_by_commit_and_populate_only_and_are_never_anonymous() -> None:
    shared, anonymous = status_bytes("RssShmem"), status_bytes("RssAnon")
    owner = Arena(65 * MIB, 8 * MIB, store_id=STORE, persist=False)

    def taken() -> int:
        return os.fstat(owner.fd).st_blocks * 512

    assert taken() == owner.segments_at
    assert owner.commit(3) and taken() == owner.segments_at + 8 * MIB
    assert owner.populate(threads=2)
    assert taken() == owner.file_bytes
    assert status_bytes("RssShmem") - shared >= 64 * MIB
    assert status_bytes("RssAnon") - anonymous < 16 * MIB
    assert not any(owner.buffer[owner.segments_at :: 4096])
    owner.close(keep=False)
    assert status_bytes("RssShmem") - shared < 8 * MIB


def test_a_core_dump_leaves_the_arena_out() -> None:
    owner = arena(Path("/dev/shm"), persist=False)
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = next(
        after.split("\n")[0].split()
        for before, after in pairwise(maps)
        if f"{owner.address:x}-" in before
    )
    assert "dd" in flags
    owner.close(keep=False)
