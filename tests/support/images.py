"""Copies of a store's directory as it is at an instant: what a kill of its owner would leave."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.tiers.failpoints import armed

SOCKETS = shutil.ignore_patterns("control")  # A socket has no bytes; its owner's ends with it.


def copy_store(directory: Path, copy: Path) -> None:
    """Copy the directory of a store, also while it is open."""
    shutil.copytree(directory, copy, ignore=SOCKETS)


@contextmanager
def image_at(failpoint: str, directory: Path, copy: Path) -> Iterator[None]:
    """The first time the failpoint is reached, `copy` is made."""

    def take() -> None:
        if not copy.exists():
            copy_store(directory, copy)

    with armed(failpoint, take):
        yield
