"""Power lost at any instant of a recorded run, the catalogue's file included, and what is found.

Row 3: nothing wrong is served, and nothing that was synced is lost. What an image is, is told in
support/power_image.py; what is run, in support/power_workload.py; what is asked of each image, in
support/power_check.py.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.shim import TESTS, Event, entries, environment

IMAGES = 1_000
LONG_IMAGES = 20_000
LONG_RUNS = 4
STORES_IN = 40  # One in so many images is opened as a whole store.
PROMPTS = 60


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory: images are written thousands of times."""
    root = Path(tempfile.mkdtemp(prefix="power-loss-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)


def run(*arguments: str | int | Path, env: dict[str, str] | None = None) -> list[str]:
    """A program of tests/support in a process of its own. Returns: the lines that it printed."""
    ran = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=TESTS,
        env=env,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, f"died at {lines[-1:]}: {ran.stderr}"
    return lines


def record(place: Path, bug: str = "") -> Path:
    """Run the workload once. Returns: its log."""
    log = place / "log"
    run("support.power_workload", place / "root", PROMPTS, bug, env=environment(log=log))
    return log


def lose_power(place: Path, log: Path, seed: int, images: int, stores: int) -> dict[str, Any]:
    """Images of a log. Returns: what was found in them."""
    lines = run("support.power_check", log, place / "root", seed, images, stores)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def assert_nothing_is_wrong_or_lost(found: dict[str, Any], images: int) -> None:
    print(found)
    assert found["faults"] == []
    assert found["walks that died"] == 0
    assert found["images"] + found["stores"] == images
    assert found["synced blocks"] > 20 * images  # or there was nothing to lose
    assert found["rebuilt"] > 0
    assert found["blocks of stores"] > 0


@pytest.mark.slow
def test_power_loss(place: Path) -> None:
    (place / "root").mkdir()
    log = record(place)
    events = [entry.event for entry in entries(log)]
    assert events.count(Event.DURABLE_WRITE) > 50  # LMDB's meta pages: a commit each
    assert events.count(Event.SYNC) > 100
    found = lose_power(place, log, 1, IMAGES, IMAGES // STORES_IN)
    assert_nothing_is_wrong_or_lost(found, IMAGES)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_power_loss_in_twenty_thousand_images(place: Path) -> None:
    part = LONG_IMAGES // LONG_RUNS
    for seed in range(LONG_RUNS):
        (place / "root").mkdir()
        found = lose_power(place, record(place), seed, part, part // STORES_IN)
        assert_nothing_is_wrong_or_lost(found, part)
        shutil.rmtree(place / "root")
        (place / "log").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        ("publish_before_sync", "a record that fails its check"),
        ("reuse_before_commit", "another block's record"),
        ("leaf_first", "parents missing"),
    ],
)
def test_a_planted_bug_is_caught(place: Path, bug: str, fault: str) -> None:
    (place / "root").mkdir()
    found = lose_power(place, record(place, bug), 1, 60, 0)
    assert any(fault in text for text in found["faults"]), found
