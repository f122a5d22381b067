"""Counters: exact under threads, kept across owners, read beside one; junk is refused."""

import threading
import time
from pathlib import Path

import pytest

from kvstore.counters import FILE_BYTES, NAMES, Counters, summary
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo


def test_threads_lose_no_count() -> None:
    counters = Counters.in_memory()

    def add() -> None:
        for _ in range(2000):
            counters.add("lookups")
            counters.add("tokens_asked", 3)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.get("lookups") == 16_000
    assert counters.get("tokens_asked") == 48_000


def test_an_unknown_name_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Counters.in_memory().add("lokups")


def test_counters_outlive_their_owner_and_are_read_beside_it(tmp_path: Path) -> None:
    path, io = tmp_path / "counters", FileIo()
    counters = Counters.open(path, io)
    counters.add("tokens_hit.disk", 2**40)
    assert Counters.read(path, io)["tokens_hit.disk"] == 2**40  # while the owner lives
    counters.close()
    again = Counters.open(path, io)
    again.add("tokens_hit.disk")
    assert again.get("tokens_hit.disk") == 2**40 + 1
    again.close()
    assert path.stat().st_size == FILE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_boots_only_go_up_even_where_the_file_was_lost(tmp_path: Path) -> None:
    io = FileIo()
    counters = Counters.open(tmp_path / "a", io)
    first = counters.next_boot(time.time())
    second = counters.next_boot(time.time())
    counters.close()
    lost = Counters.open(tmp_path / "b", io)
    assert second > first
    assert first <= lost.next_boot(time.time()) < 2**32
    lost.close()


@pytest.mark.parametrize(
    "content", [b"x", bytes(2 * FILE_BYTES), b"KVCOUNT1" + b"\xff" * (FILE_BYTES - 8), b"a" * 5000]
)
def test_what_is_no_counters_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counters"
    path.write_bytes(content)
    for call in (Counters.open, Counters.read):
        with pytest.raises(StoreError, match="not a counters file") as caught:
            call(path, FileIo())
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 512, 4096])
def test_a_file_whose_page_never_reached_the_device_is_a_new_one(tmp_path: Path, size: int) -> None:
    (tmp_path / "counters").write_bytes(bytes(size))
    counters = Counters.open(tmp_path / "counters", FileIo())
    counters.add("lookups")
    counters.close()
    assert Counters.read(tmp_path / "counters", FileIo())["lookups"] == 1


def test_summary_has_the_shape_that_scripts_read() -> None:
    shape = summary(dict.fromkeys(NAMES, 7))
    assert shape["tokens_asked"] == 7
    assert set(shape["tokens_hit"]) == {"device", "host", "disk"}  # type: ignore[call-overload]
    assert shape["misses"]["collision"] == 7  # type: ignore[index]
    assert shape["tiers"]["disk"] == {  # type: ignore[index]
        "capacity_bytes": 7,
        "used_bytes": 7,
        "blocks": 7,
    }


def test_a_damaged_counter_starts_anew(tmp_path: Path) -> None:
    counters = Counters.open(tmp_path / "counters", FileIo())
    counters.set("lookups", 2**64 - 1)
    counters.set("loads", 7)
    counters.set("boot", 2**40)
    counters.close()
    counters = Counters.open(tmp_path / "counters", FileIo())
    assert (counters.get("lookups"), counters.get("loads")) == (0, 7)
    assert counters.next_boot(time.time()) < 2**31
    counters.close()
