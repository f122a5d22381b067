"""Open segment files: bounded, least recently used first, never one that is in use."""

import os
import threading
import time
from pathlib import Path

import pytest

from kvstore.tiers.io import FileIo
from kvstore.tiers.open_files import OpenFiles
from support.disk_blocks import fill, found_blocks, open_rig


class Folder:
    """Files named by numbers, and the descriptors that are open now."""

    def __init__(self, root: Path, count: int) -> None:
        for number in range(count):
            (root / str(number)).write_bytes(bytes([number]))
        self.root = root
        self.gate = threading.Event()
        self.gate.set()

    def open(self, number: int) -> int:
        self.gate.wait(30)
        return FileIo().open(self.root / str(number))

    def open_now(self) -> int:
        names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(Path(name).parent == self.root for name in names)


def holds(files: OpenFiles, number: int) -> bool:
    with files.use(number) as fd:
        return os.pread(fd, 1, 0) == bytes([number])


def test_the_least_recently_used_is_closed_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 6)
    files = OpenFiles(FileIo(), folder.open, open_max=3)
    assert all(holds(files, n) for n in (0, 1, 2, 0, 3))
    assert (files.count(), files.opened, folder.open_now()) == (3, 4, 3)
    assert holds(files, 0) and files.opened == 4  # 1 gave way, and 0 did not
    assert holds(files, 1) and files.opened == 5
    for number in range(6):
        files.forget(number)
    assert (files.count(), folder.open_now()) == (0, 0)


def test_a_file_in_use_stays_open_under_its_descriptor(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 8)
    files = OpenFiles(FileIo(), folder.open, open_max=2)
    with files.use(0) as first, files.use(1), files.use(2):
        assert all(holds(files, n) for n in range(3, 8))
        assert files.in_use(0) and not files.in_use(7)
        with files.use(0) as again:
            assert again == first and os.pread(first, 1, 0) == b"\0"
        assert folder.open_now() == 3  # more than the limit: each is in use
    assert folder.open_now() == 2


def test_a_forgotten_file_is_opened_anew_and_closed_by_its_last_user(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 2)
    files = OpenFiles(FileIo(), folder.open)
    with files.use(1) as old:
        files.forget(1)
        (tmp_path / "1").unlink()
        (tmp_path / "1").write_bytes(b"new")
        with files.use(1) as new:
            assert os.pread(new, 3, 0) == b"new" and os.pread(old, 1, 0) == b"\1"
    assert folder.open_now() == 1
    with pytest.raises(OSError):
        os.fstat(old)


def test_a_file_opened_while_it_is_forgotten_is_not_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    files = OpenFiles(FileIo(), folder.open)
    folder.gate.clear()
    thread = threading.Thread(target=holds, args=(files, 0))
    thread.start()
    time.sleep(0.05)
    files.forget(0)  # does not wait for the device, which is slow to open
    folder.gate.set()
    thread.join(30)
    assert (files.count(), folder.open_now()) == (0, 0)


def test_a_file_that_cannot_be_opened_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    files = OpenFiles(FileIo(), Folder(tmp_path, 1).open)
    with pytest.raises(FileNotFoundError), files.use(5):
        pass
    assert files.count() == 0 and holds(files, 0)


def test_many_threads_read_what_they_ask_for(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 40)
    files = OpenFiles(FileIo(), folder.open, open_max=5)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(400):
            number = (turn * (2 * seed + 1) + seed) % 40
            if turn % 50 == seed:
                files.forget(number)
            if not holds(files, number):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and files.opened > 100
    assert folder.open_now() == files.count() <= 5


def test_a_use_of_an_open_file_costs_microseconds(tmp_path: Path) -> None:
    files = OpenFiles(FileIo(), Folder(tmp_path, 1).open)
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            with files.use(0):
                pass
        best = min(best, (time.perf_counter() - began) / 1000)
    assert files.opened == 1
    assert best < 20e-6, f"{best * 1e6:.1f} us"  # about 1 us on a quiet machine


def test_a_tier_of_more_segments_than_files(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d", capacity_bytes=12 << 20)
    stored = fill(rig)
    assert len({slot // rig.tier.per for slot in stored.values()}) > 60
    before = len(os.listdir("/proc/self/fd"))
    assert all(rig.good(slot, number) for number, slot in list(stored.items())[::7])
    assert len(os.listdir("/proc/self/fd")) == before
    rig.tier.close()
    rig = open_rig(tmp_path / "d", capacity_bytes=12 << 20)
    assert found_blocks(rig) == stored
    rig.tier.close()
