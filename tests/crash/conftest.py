"""Directories in memory, for trials that damage what lies in files and never lose power."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


def in_memory(otherwise: Path) -> TemporaryDirectory[str]:
    """A directory on tmpfs where there is one: no trial waits for a device."""
    shared = Path("/dev/shm")
    return TemporaryDirectory(dir=shared if shared.is_dir() else otherwise)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory for one test."""
    with in_memory(tmp_path) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def module_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for the tests of a file."""
    with in_memory(tmp_path_factory.getbasetemp()) as directory:
        yield Path(directory)
