"""`kvstore bench`: it runs, prints figures, and leaves nothing behind."""

from pathlib import Path

import pytest

from support.stored import run


@pytest.mark.slow
def test_all_parts(tmp_path: Path) -> None:
    ran = run("bench", "--directory", tmp_path, "--size", "16MiB", "--json")
    assert ran.code == 0, ran.err
    document = ran.document
    assert document["lookup"]["tokens"] == 100_000
    for part, names in {
        "lookup": ("hit_ms", "miss_ms"),
        "host": ("save_bytes_per_s", "load_bytes_per_s", "memcpy_bytes_per_s"),
        "disk": ("write_bytes_per_s", "read_bytes_per_s"),
    }.items():
        assert all(document[part][name] > 0 for name in names)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_part_for_people(tmp_path: Path) -> None:
    ran = run("bench", "host", "--size", "8MiB", "--block", "64KiB", "--directory", tmp_path)
    assert ran.code == 0, ran.err
    assert "memcpy" in ran.out
    assert "Lookup" not in ran.out
