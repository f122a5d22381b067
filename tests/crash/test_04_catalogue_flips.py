"""Row 4 in what a store keeps beside its blocks: catalogue, marks, headers, counters, store.toml.

At the next start it is rebuilt, or refused in one sentence; what is found is right, no process
dies, none goes round in a circle.
"""

import json
import random
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore.invalidation import Scope
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.errors import KvstoreError
from support.checks import assert_at_rest
from support.damaged_volumes import cut, flip_bits, noise, zero_page
from support.engine import Engine, prompt
from support.layouts import small_layout
from support.shim import TESTS

IMAGES = 200
LONG_IMAGES = 5_000
ANSWER_S = 60.0
BLOCK = 4
BLOCKS = 6
TOKENS = prompt(BLOCKS * BLOCK + 1)
SMALL_FILES = ("counters", "store.toml", "lock", "invalidated")
SMALL_IMAGES = 40
LONG_SMALL_IMAGES = 2_000


def damaged_volumes(root: Path, first: int, images: int) -> dict[str, int]:
    """What came of the images. A child that dies or hangs is blamed on the image it was at."""
    child = subprocess.Popen(
        [sys.executable, "-m", "support.damaged_volumes", str(root), str(first), str(images)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert child.stdout is not None and child.stderr is not None
    last = line = b""
    while select.select([child.stdout], [], [], ANSWER_S)[0]:
        line = child.stdout.readline()
        if not line or line.startswith(b"{"):
            break
        last = line
    done = line.startswith(b"{")
    if not done:
        child.kill()
    problem = child.communicate()[1].decode()
    assert done and child.returncode == 0, f"image {last.decode()}{problem}"
    found: dict[str, int] = json.loads(line)["outcomes"]
    print(f"{images} damaged volumes: {found}")
    return found


def assert_of_every_kind(outcomes: dict[str, int], images: int) -> None:
    assert sum(outcomes.values()) == images
    assert {"all found", "rebuilt, all found", "refused"} <= outcomes.keys()


@pytest.mark.slow
def test_damaged_catalogues_are_rebuilt_or_refused(memory: Path) -> None:
    assert_of_every_kind(damaged_volumes(memory, 1, IMAGES), IMAGES)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_damaged_catalogues(memory: Path) -> None:
    assert_of_every_kind(damaged_volumes(memory, 10_000, LONG_IMAGES), LONG_IMAGES)


def engine_of(store: Store) -> Engine:
    return Engine(store.namespace(small_layout(BLOCK), model="m"), 2 * BLOCKS)


def fill_up(rng: random.Random, data: bytearray) -> bytes:
    """All numbers behind the first 64 bytes are as large, or as odd, as they can be."""
    data[64:] = rng.choice([b"\xff", b"\x80", b"\x7f", b"\x01"]) * len(data[64:])
    return bytes(data)


def damage_small_files(directory: Path, first: int, images: int) -> Counter[str]:
    """Open a store whose small files are damaged; it serves what it had, and takes what is new."""
    pristine = directory / "pristine"
    sizes: dict[str, Any] = {"host": "4MiB", "disk_capacity": "4MiB", "disk_writes_per_day": "1GiB"}
    sizes |= {"direct": False}
    with open_store(pristine, **sizes) as store:
        engine = engine_of(store)
        engine.save(TOKENS)
        engine.save(prompt(BLOCKS * BLOCK + 1, seed=9))
        sequence = engine.space.sequence(prompt(BLOCKS * BLOCK + 1, seed=9))
        store.flush()
        store.invalidate(Scope(prefix=sequence.keys[0].tobytes().hex()))
    outcomes: Counter[str] = Counter()
    for number in range(first, first + images):
        rng = random.Random(number)
        copy = directory / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(pristine, copy)
        place = copy / SMALL_FILES[number % len(SMALL_FILES)]
        kind = rng.choice((flip_bits, zero_page, cut, noise, fill_up))
        place.write_bytes(kind(rng, bytearray(place.read_bytes())))
        what = f"image {number}: {kind.__name__} {place.name}"
        try:
            store = open_store(copy, **sizes)
        except KvstoreError as refused:
            assert "\n" not in str(refused), what
            outcomes["refused"] += 1
            continue
        with store:
            engine = engine_of(store)
            assert engine.ask(TOKENS).tokens in (0, BLOCKS * BLOCK), what
            assert engine.ask(prompt(BLOCKS * BLOCK + 1, seed=9)).tokens == 0, what
            assert engine.save(prompt(BLOCKS * BLOCK + 1, seed=number))[1].saved == BLOCKS, what
            assert_at_rest(store)
            store.stats()
        outcomes[f"opened with {place.name}"] += 1
    print(f"{images} stores with damaged small files: {dict(outcomes)}")
    return outcomes


@pytest.mark.slow
def test_damaged_small_files_cost_at_most_the_store(memory: Path) -> None:
    outcomes = damage_small_files(memory, 1, SMALL_IMAGES)
    assert outcomes["refused"] and outcomes["opened with counters"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_damaged_small_files(memory: Path) -> None:
    damage_small_files(memory, 10_000, LONG_SMALL_IMAGES)


def test_a_child_that_dies_is_blamed_on_its_image(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="image"):
        damaged_volumes(tmp_path / "missing" / "too", 1, 1)
    assert time.monotonic() - began < ANSWER_S
