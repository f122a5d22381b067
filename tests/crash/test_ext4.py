"""A real ext4 that stops without writing its journal out, under a store at work, mounted again.

Needs a loop device and the right to mount; the images of test_power_loss.py need neither.
"""

import fcntl
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.home import read_facts
from kvstore.tiers.arena_file import arena_path
from kvstore.tiers.io import FileIo
from support.after_kill import as_victims_do, check
from support.victims import Victims

ROUNDS = 40
IMAGE_BYTES = 64 << 20
FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)
TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def run(*command: str | Path) -> str:
    ran = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    """A loop device with an empty ext4."""
    if os.geteuid() or not all(shutil.which(tool) for tool in TOOLS):
        pytest.skip("needs the right to mount a filesystem")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    run("mkfs.ext4", "-q", "-F", image)
    try:
        name = run("losetup", "-f", "--show", image)
    except subprocess.CalledProcessError:
        pytest.skip("no loop device")
    yield name
    run("losetup", "-d", name)


def shut_down(place: Path) -> None:
    """The filesystem ends now: nothing that it has not written is ever written."""
    fd = os.open(place, os.O_RDONLY)
    fcntl.ioctl(fd, FS_IOC_SHUTDOWN, NO_LOG_FLUSH)
    os.close(fd)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ext4_that_ends_at_any_instant(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_victims_do(monkeypatch)
    place = tmp_path / "mounted"
    place.mkdir()
    victims = Victims()
    chance = np.random.default_rng(1)
    promised = 0
    try:
        for turn in range(ROUNDS):
            run("mount", "-t", "ext4", device, place)
            after_s = float(chance.uniform(0.02, 1.0))
            timer = threading.Timer(after_s, shut_down, (place,))
            timer.start()
            ended = victims.run(place / "store", turn, "none", 0)
            timer.join()
            run("umount", place)
            run("mount", "-t", "ext4", device, place)
            facts = read_facts(place / "store", FileIo()) if (place / "store").exists() else None
            if facts is not None:
                # Memory is gone with the power.
                arena_path(Path("/dev/shm"), facts.store_id).unlink(missing_ok=True)
            check(place / "store", turn, ended)
            promised += len(ended.promised.slots)
            run("umount", place)
    finally:
        victims.close()
        subprocess.run(["umount", str(place)], check=False, capture_output=True)
    print(f"{ROUNDS} ends of an ext4: {promised} synced blocks, all there and exact")
    assert promised > 0
