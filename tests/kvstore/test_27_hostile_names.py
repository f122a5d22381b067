"""Row 27: no name leads out of the store's directory, and a directory that is not ours is refused.

Names of models, tenants, adapters and attributes never become names of files; what lies under the
names that are ours (links, pipes, devices, directories) is refused, and never followed.
"""

import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.home import Home
from kvstore.store import open as open_store
from kvstore.tiers.errors import KvstoreError
from kvstore.tiers.io import FileIo
from support.engine import Engine, prompt
from support.layouts import small_layout

NAMES = 10_000
NAMES_EACH = 5  # in one namespace: model, tenant, adapter, and an attribute with its value
SAVED = 12  # of them are names of namespaces whose blocks go to disk
PIECES = (
    *("..", "../", "/", "//", "/etc/passwd", ".", "\0", "\n", "\r\n", "\x1b[2J", " ", "~", "$HOME"),
    *("%2e%2e%2f", "..\\", "C:\\", "ü", "\u202e", "\ufeff", "é" * 20, "\U0001f600", "a" * 4096),
    *("'; rm -rf /", "`id`", "{}", "%s%n", "lock", "store.toml", "disk0", "-rf", "\ud7ff", "CON"),
)
BLOCK = 4


class Recording(FileIo):
    """Knows every name that is opened, made, removed or renamed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def _note(self, path: str | Path, directory: int | None = None) -> None:
        before = os.readlink(f"/proc/self/fd/{directory}") if directory is not None else ""
        self.names.add(os.path.join(before, os.fspath(path)))

    def open(self, path: str | Path, **options: Any) -> int:
        self._note(path, options.get("directory"))
        return super().open(path, **options)

    def make_directory(self, path: str | Path) -> None:
        self._note(path)
        super().make_directory(path)

    def unlink(self, path: str | Path, *, directory: int | None = None) -> None:
        self._note(path, directory)
        super().unlink(path, directory=directory)

    def rename(self, old: str | Path, new: str | Path, *, directory: int | None = None) -> None:
        self._note(old, directory)
        self._note(new, directory)
        super().rename(old, new, directory=directory)

    def outside(self, root: Path) -> list[str]:
        """The names that do not lie in a directory, links resolved."""
        inside = os.path.realpath(root)
        return [n for n in self.names if not os.path.realpath(n).startswith(inside)]


def hostile(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(1, 4)))[:5000]


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, time and bytes of everything in a directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        state = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
        found[str(path)] = (state.st_mode, state.st_mtime_ns, data)
    return found


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Path]:
    """What lies beside the root, and must stay as it is."""
    (tmp_path / "root").mkdir(mode=0o700)
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    for name in ("lock", "store.toml", "counters", "passwd", "data.mdb", "00000000.seg"):
        (outside / name).write_bytes(b"precious\n" * 1000)
    (outside / "disk0").mkdir(mode=0o700)
    before = snapshot(outside)
    yield outside
    assert snapshot(outside) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "root"]


@pytest.mark.slow
def test_names_of_tenants_and_models_touch_no_file(around: Path) -> None:
    rng, io = random.Random(27), Recording()
    root = around.parent / "root"
    refused = made = 0
    with open_store(root / "store", host="4MiB", disk_capacity="8MiB", io=io) as store:
        before = len(io.names)
        for number in range(NAMES // NAMES_EACH):
            names = {"model": hostile(rng), "tenant": hostile(rng), "adapter": hostile(rng)}
            try:
                space = store.namespace(
                    small_layout(BLOCK),
                    salt=hostile(rng).encode()[:64],
                    attributes={hostile(rng)[:100]: hostile(rng)},
                    **names,
                )
            except (KvstoreError, ValueError) as error:
                assert len(str(error)) < 500
                refused += 1
                continue
            made += 1
            if made <= SAVED:
                engine = Engine(space, 3)
                _, saved = engine.save(prompt(3 * BLOCK + 1, seed=number))
                assert saved.saved == 3
        store.flush()
        labels = store.labels()
        assert len(labels) > SAVED // 2
    assert io.outside(root) == []
    assert {Path(name).name for name in io.names if "/store/" in name} <= OURS
    assert made > NAMES // NAMES_EACH // 4 and refused > 0 and before > 0
    names_on_disk = {path.name for path in (root / "store").rglob("*")}
    assert names_on_disk <= OURS
    print(f"{NAMES} hostile names: {made} namespaces, {refused} refused, 0 files outside")


OURS = {
    *("lock", "store.toml", "store.toml.new", "counters", "control", "invalidated", "disk0"),
    *("invalidated.new", "volume", "clean", "clean.new", "catalogue", "data.mdb", "lock.mdb"),
    *(f"{number:08x}.seg" for number in range(16)),
}
PLACES = (
    *("lock", "store.toml", "counters", "invalidated", "control", "disk0", "disk0/volume"),
    *("disk0/clean", "disk0/catalogue", "disk0/catalogue/data.mdb", "disk0/catalogue/lock.mdb"),
    *("disk0/00000000.seg", "disk0/clean.new", "store.toml.new", "invalidated.new"),
)


def put_link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "lock")


def put_link_to_directory(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "disk0")


def put_dangling_link(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "new")


def put_pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def put_directory(place: Path, outside: Path) -> None:
    place.mkdir()


def put_device(place: Path, outside: Path) -> None:
    os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: without an end


PUTS = [put_link, put_link_to_directory, put_dangling_link, put_pipe, put_directory]
PUTS += [put_device] if os.geteuid() == 0 else []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("put", PUTS)
def test_what_lies_under_our_names_is_not_followed(put: Any, around: Path) -> None:
    """Refused in one sentence, or done without: never written through, and never waited for."""
    root = around.parent / "root"
    tokens = prompt(3 * BLOCK + 1)
    with open_store(root / "pristine", host="4MiB", disk_capacity="4MiB") as store:
        Engine(store.namespace(small_layout(BLOCK), model="m"), 3).save(tokens)
    for name in PLACES:
        shutil.rmtree(root / "store", ignore_errors=True)
        shutil.copytree(root / "pristine", root / "store")
        place = root / "store" / name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        put(place, around)
        try:
            store = open_store(root / "store", host="4MiB")
        except KvstoreError as refused:
            assert "\n" not in str(refused), name
            continue
        with store:
            engine = Engine(store.namespace(small_layout(BLOCK), model="m"), 3)
            assert engine.ask(tokens).tokens in (0, 3 * BLOCK), name
            store.flush()


def test_hostile_paths_of_a_store_are_refused_or_lie_where_they_say(around: Path) -> None:
    rng = random.Random(28)
    root = around.parent / "root"
    io = Recording()
    refused = 0
    for _ in range(500):
        name = hostile(rng)
        path = root / name.lstrip("/") if name.strip("/") else root / "x"
        if not os.path.normpath(os.fspath(path)).startswith(os.fspath(root) + "/"):
            continue  # An operator may say `..`; then it is no name in this root.
        try:
            Home(path, io).close()
        except (KvstoreError, ValueError) as error:
            assert len(str(error)) < 10_000
            refused += 1
    assert refused > 50
    assert io.outside(root) == []


def test_foreign_directories_are_refused_untouched(around: Path) -> None:
    holidays = around.parent / "root" / "holidays"
    (holidays / "disk0").mkdir(parents=True, mode=0o700)
    holidays.chmod(0o700)
    (holidays / "beach.jpg").write_bytes(b"sand")
    before = snapshot(holidays)
    for path in (
        around,
        around / "disk0" / ".." / ".." / "outside",
        holidays,
        "/proc",
        "/dev",
        "/",
    ):
        with pytest.raises(KvstoreError) as refused:
            open_store(path, host="4MiB")
        assert "\n" not in str(refused.value)
    assert snapshot(holidays) == before
