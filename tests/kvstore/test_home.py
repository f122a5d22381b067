"""A store's directory: whose it is, what may lie in it, and that a refusal changes nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.home import (
    COUNTERS_FILE,
    LOCK_FILE,
    STORE_FILE,
    Home,
    StoreFacts,
    new_store_id,
    owner_alive,
    read_facts,
    require_store,
)
from kvstore.tiers.errors import ConfigError, KvstoreError, StoreBusyError, StoreError
from kvstore.tiers.io import FileIo

IO = FileIo()


def facts_of(path: Path) -> StoreFacts:
    return StoreFacts(new_store_id(), "xxh3-128", 1 << 30, 1 << 20, (path, Path("/b c/é\"'")))


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "store"
    home = Home(path, IO)
    assert home.facts() is None
    facts = facts_of(path)
    home.write_facts(facts)
    assert home.facts() == facts == require_store(path, IO)
    home.write_facts(facts)
    home.close()
    assert Home(path, IO).facts() == facts
    assert path.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in path.iterdir()} == {LOCK_FILE, STORE_FILE}


def test_a_store_that_was_moved_or_copied_lies_where_its_file_lies(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    home = Home(old, IO)
    home.write_facts(facts_of(old))
    home.close()
    shutil.copytree(old, new)
    facts = require_store(new, IO)
    assert facts.paths == (new, *facts_of(old).paths[1:])
    assert require_store(old, IO).paths[0] == old


def test_a_directory_that_is_refused_keeps_its_lock_file(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("somebody's own")
    (tmp_path / STORE_FILE).write_text("no store's facts")
    with pytest.raises(StoreError, match="damaged"):
        Home(tmp_path, IO)
    assert (tmp_path / LOCK_FILE).read_text() == "somebody's own"


def test_a_second_owner_is_refused_by_name_and_may_come_later(tmp_path: Path) -> None:
    home = Home(tmp_path, IO)
    with pytest.raises(StoreBusyError, match=f"process {os.getpid()}") as caught:
        Home(tmp_path, IO)
    assert "\n" not in str(caught.value)
    assert owner_alive(tmp_path, IO)
    home.close()
    assert not owner_alive(tmp_path, IO)
    Home(tmp_path, IO).close()


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from kvstore.home import Home;"
        "from kvstore.tiers.io import FileIo;"
        f"home = Home(Path({str(tmp_path)!r}), FileIo()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    Home(tmp_path, IO).close()


def test_a_reader_that_asks_for_the_owner_does_not_shut_one_out(tmp_path: Path) -> None:
    for _ in range(50):
        assert not owner_alive(tmp_path, IO)
        Home(tmp_path, IO).close()


def _refused(path: Path, needle: str, kind: type[KvstoreError]) -> None:
    before = sorted(p.name for p in path.iterdir()) if path.is_dir() else None
    with pytest.raises(kind, match=needle) as caught:
        Home(path, IO).facts()
    assert "\n" not in str(caught.value)
    after = sorted(p.name for p in path.iterdir()) if path.is_dir() else None
    assert after == before


def test_a_directory_with_other_files_is_no_place_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    _refused(tmp_path, "choose an empty directory", StoreError)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    _refused(tmp_path / "file", "file", KvstoreError)
    _refused(tmp_path / "file" / "below", "below", KvstoreError)
    _refused(tmp_path / "a" / "b", "does not exist; make it", ConfigError)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _refused(tmp_path / "link", "is a link", StoreError)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    _refused(tmp_path / "dangling", "link", StoreError)
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_that_others_may_write_to(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    _refused(path, "chmod go-w", StoreError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o755)
    os.chown(path, 65_534, 65_534)
    _refused(path, "belongs to user 65534", StoreError)


@pytest.mark.parametrize("name", [LOCK_FILE, STORE_FILE, COUNTERS_FILE])
@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_names_of_ours_that_are_something_else(tmp_path: Path, name: str, kind: str) -> None:
    from kvstore.store import open as open_store  # noqa: PLC0415

    store = tmp_path / "store"
    open_store(store, host="4MiB", disk_capacity="16MiB").close()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store / name).unlink()
    if kind == "link":
        (store / name).symlink_to(victim)
    elif kind == "directory":
        (store / name).mkdir()
    else:
        os.mkfifo(store / name)
    with pytest.raises(StoreError) as caught:
        open_store(store, host="4MiB")
    assert "\n" not in str(caught.value)
    assert str(store) in str(caught.value)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("format = 2\n", "format 2, this version reads 1"),
        ("format = 1\n", "damaged"),
        ("format = 1\nid = 'zz'\n", "damaged"),
        ("format = 'x", "damaged"),
        ("", "damaged"),
        ("\x00" * 5000, "damaged"),
        (
            "format = 1\nid = 'ab'\nhash = 'sha256'\n"
            "disk_capacity_bytes = 'x'\ndisk_segment_bytes = 1\npaths = []\n",
            "damaged",
        ),
        (
            "format = 1\nid = 'ab'\nhash = 'sha256'\n"
            "disk_capacity_bytes = 1\ndisk_segment_bytes = 1\npaths = []\n",
            "damaged",
        ),
        (
            "format = 1\nid = '" + "ab" * 16 + "'\nhash = 'sha256'\n"
            "disk_capacity_bytes = -5\ndisk_segment_bytes = 1\npaths = ['/a']\n",
            "damaged",
        ),
    ],
)
def test_a_damaged_or_later_store_file(tmp_path: Path, text: str, needle: str) -> None:
    (tmp_path / STORE_FILE).write_text(text)
    with pytest.raises(StoreError, match=needle) as caught:
        read_facts(tmp_path, IO)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / STORE_FILE).read_text() == text


def test_what_is_no_store_yet(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="is not a store"):
            require_store(path, IO)
