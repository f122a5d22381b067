"""A store for the commands to look into."""

from pathlib import Path

import pytest

from support.stored import Stored, make_store


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """A small store on disk, closed."""
    return make_store(tmp_path / "store")
