"""What people get wrong: each is one sentence that says what to do, and nothing is lost by it."""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError, KvstoreError, LayoutError, StoreError, TokenError
from support.checks import assert_at_rest
from support.engine import WAIT_S, Engine, prompt
from support.faulty import FullIo, NoDirectIo
from support.layouts import small_layout

BLOCK = 4
BLOCKS = 6
TOKENS = prompt(BLOCKS * BLOCK + 1)
SIZES: dict[str, Any] = {"host": "8MiB", "disk_capacity": "32MiB"}


def assert_one_sentence(text: str, *needles: str) -> None:
    """One line, no trace of code, and it names what matters."""
    assert text and "\n" not in text and len(text) < 400, text
    assert "Traceback" not in text and "Error(" not in text, text
    for needle in needles:
        assert needle in text, text


def refused(call: Callable[[], Any], kind: type[KvstoreError], *needles: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert_one_sentence(str(caught.value), *needles)


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(small_layout(BLOCK), model="m"), 16)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A store with one prompt; whatever a test does, it must open and hit afterwards."""
    path = tmp_path / "store"
    with open_store(path, **SIZES) as store:
        engine_of(store).save(TOKENS)
    yield path
    with open_store(path, host="8MiB") as store:
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK
        assert_at_rest(store)


# --- the store's place


def test_a_second_writer(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        refused(lambda: open_store(home, **SIZES), StoreError, "in use by process", "kvstore stats")
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK


def test_a_second_writer_in_another_process(home: Path) -> None:
    code = (
        "import kvstore, sys\n"
        "try: kvstore.open(sys.argv[1], host='8MiB')\n"
        "except kvstore.StoreBusyError as error: print(error)\n"
    )
    with open_store(home, **SIZES):
        ran = subprocess.run(
            [sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True
        )
    assert_one_sentence(ran.stdout.strip(), "in use by process", str(os.getpid()))


AS_NOBODY = """
import os, sys
import kvstore
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    kvstore.open(sys.argv[1], host="8MiB", disk_capacity="32MiB")
except kvstore.KvstoreError as error:
    print(error)
"""


def _as_nobody(path: Path) -> str:
    """What a user who is nobody is told."""
    ran = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that all users may enter, as pytest's are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_path_that_is_not_writable(public: Path) -> None:
    place = public / "read-only"
    place.mkdir(mode=0o555)
    assert_one_sentence(_as_nobody(place / "store"), str(place), "not writable", "choose")
    assert list(place.iterdir()) == []
    # Nor can one look into it.
    place.chmod(0o700 if os.geteuid() == 0 else 0o000)
    assert_one_sentence(_as_nobody(place / "store"), str(place), "choose")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_store_of_somebody_else(public: Path) -> None:
    place = public / "theirs"
    with open_store(place, **SIZES) as store:
        engine_of(store).save(TOKENS)
    place.chmod(0o755)
    assert_one_sentence(_as_nobody(place), str(place), "choose")
    place.chmod(0o700)
    assert_one_sentence(_as_nobody(place), str(place), "choose")
    with open_store(place, host="8MiB") as store:
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK


def test_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("a face")
    refused(lambda: open_store(tmp_path, **SIZES), StoreError, "not a store", "empty directory")
    assert [p.name for p in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("second", ["file", "a/b"])
def test_a_second_path_that_cannot_be_a_disk(tmp_path: Path, second: str) -> None:
    (tmp_path / "file").write_text("x")
    paths = [tmp_path / "store", tmp_path / second]
    needle = str(paths[1].parent)
    refused(lambda: open_store(disk=paths, **SIZES), KvstoreError, needle)
    # The refusal leaves nothing that would be in the way of a store there.
    open_store(tmp_path / "store", **SIZES).close()


def test_a_path_that_was_lost(home: Path, tmp_path: Path) -> None:
    two = tmp_path / "two", tmp_path / "three"
    with open_store(disk=two, **SIZES) as store:
        engine_of(store).save(TOKENS)
    shutil.move(two[1], tmp_path / "elsewhere")
    two[1].write_text("something else is here now")
    refused(lambda: open_store(two[0], host="8MiB"), KvstoreError, str(two[1]))
    two[1].unlink()
    shutil.move(tmp_path / "elsewhere", two[1])
    with open_store(two[0], host="8MiB") as store:
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK


def test_two_stores_that_would_share_a_path(home: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "other", home]
    refused(lambda: open_store(disk=paths, **SIZES), KvstoreError, str(home))


# --- sizes


def test_a_capacity_above_the_free_space(home: Path, tmp_path: Path) -> None:
    refused(
        lambda: open_store(tmp_path / "big", host="8MiB", disk_capacity="900TB"),
        ConfigError,
        str(tmp_path / "big"),
        "900000000000000",
        "free",
    )
    refused(lambda: open_store(host="900TB"), ConfigError, "host", "free")
    # The directory can still become a store.
    open_store(tmp_path / "big", **SIZES).close()


@pytest.mark.parametrize("sizes", [{"host": "1MiB"}, {"host": "8MiB", "disk_capacity": "1MiB"}])
def test_a_capacity_that_holds_nothing(tmp_path: Path, sizes: dict[str, Any]) -> None:
    refused(lambda: open_store(tmp_path / "small", **sizes), ConfigError, "capacity", "at least")


def test_another_capacity_or_hash_than_the_store_was_made_with(home: Path) -> None:
    refused(
        lambda: open_store(home, host="8MiB", disk_capacity="64MiB"),
        ConfigError,
        "33554432",
        "none",
    )
    refused(lambda: open_store(home, host="8MiB", hash="sha256"), ConfigError, "xxh3-128")


def test_a_capacity_that_the_first_block_does_not_fit(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        refused(
            lambda: store.namespace(small_layout(16, layers=4000), model="m"),
            LayoutError,
            "lower block_tokens",
        )


# --- O_DIRECT, and a full disk


def test_a_filesystem_without_o_direct_is_used_and_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.warns(RuntimeWarning, match=f"{path}.*O_DIRECT") as caught:
        store = open_store(path, io=NoDirectIo(), **SIZES)
    assert_one_sentence(str(caught[0].message))
    with store:
        engine_of(store).save(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_store(path, host="8MiB", direct=False, io=NoDirectIo()) as store:
            assert engine_of(store).ask(TOKENS).by_tier[TierName.DISK] == BLOCKS * BLOCK
    with open_store(path, host="8MiB") as store:  # and with O_DIRECT afterwards
        assert engine_of(store).ask(TOKENS).by_tier[TierName.DISK] == BLOCKS * BLOCK


def test_a_disk_that_fills_up_costs_writes_and_nothing_else(tmp_path: Path) -> None:
    io = FullIo()
    with open_store(tmp_path / "store", io=io, **SIZES) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        store.flush()
        io.full = True
        other = prompt(BLOCKS * BLOCK + 1, 2)
        assert engine.save(other)[1].saved == BLOCKS
        store.flush()  # ends
        assert store.counters()["write_failures"] > 0
        assert engine.ask(TOKENS).tokens == engine.ask(other).tokens == BLOCKS * BLOCK
        io.full = False
        store.flush()
    with open_store(tmp_path / "store", host="8MiB") as store:
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK
        assert engine_of(store).ask(other).tokens == BLOCKS * BLOCK  # written once there was room
        assert_at_rest(store)


def test_a_disk_that_is_full_when_the_store_is_made(tmp_path: Path) -> None:
    io = FullIo()
    io.full = True
    refused(lambda: open_store(tmp_path / "store", io=io, **SIZES), KvstoreError, str(tmp_path))
    open_store(tmp_path / "store", **SIZES).close()


# --- layouts, pools and tokens


def test_pages_of_another_layout_than_the_namespace(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        space = store.namespace(small_layout(BLOCK), model="m")
        wrong = [np.zeros((4, int(n) * 2), np.uint8) for n in space.layout.run_lengths]
        refused(lambda: space.pool(wrong), LayoutError, "check dtype")


def test_a_model_of_another_layout_finds_nothing_and_harms_nothing(home: Path) -> None:
    """The same model in another dtype, as after "auto" resolved to something else."""
    layout = small_layout(BLOCK, dtype="bfloat16")
    with open_store(home, **SIZES) as store:
        refused(lambda: store.namespace(layout, model="m"), LayoutError, "bfloat16", "mixed=True")
        other = Engine(store.namespace(layout, model="m", mixed=True), 16)
        with other.space.sequence(TOKENS).lookup() as ticket:
            assert ticket.tokens == 0
        assert other.save(TOKENS)[1].saved == BLOCKS
        assert other.ask(TOKENS).tokens == BLOCKS * BLOCK
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK


@pytest.mark.parametrize(
    ("tokens", "needles"),
    [
        ([2**31], ("0..2147483647", "tokenizer")),
        ([-1], ("0..2147483647",)),
        ([0.5], ("float64", "int32")),
        (np.zeros((2, 2), np.int32), ("2 dimensions", "flat")),
        ("hello", ("flat list of ids",)),
    ],
)
def test_what_are_no_tokens(home: Path, tokens: Any, needles: tuple[str, ...]) -> None:
    with open_store(home, **SIZES) as store:
        sequence = engine_of(store).space.sequence(TOKENS)
        refused(lambda: sequence.extend(tokens), TokenError, *needles)
        refused(lambda: engine_of(store).space.sequence(tokens), TokenError, *needles)
        engine = engine_of(store)
        with sequence.lookup() as ticket:  # the sequence is as it was
            assert engine.load(ticket).tokens == BLOCKS * BLOCK


def test_misuse_of_a_save(home: Path) -> None:
    with open_store(home, **SIZES) as store:
        engine = engine_of(store)
        sequence = engine.space.sequence(TOKENS)
        refused(lambda: sequence.save(engine.pool, [99] * BLOCKS), LayoutError, "0..15")
        refused(lambda: sequence.save(engine.pool, "ab" * 9), LayoutError, "page ids")
        assert sequence.save(engine.pool, []).result(WAIT_S).saved == 0


def test_the_errors_are_there_to_be_caught() -> None:
    for name in ("ConfigError", "LayoutError", "TokenError", "StoreError", "ClosedError"):
        assert issubclass(getattr(kvstore, name), kvstore.KvstoreError)
