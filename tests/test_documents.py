"""Documents that state facts about the code state those that hold."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.arena_header import ARENA_HEADER
from kvstore.tiers.catalogue_row import row_dtype
from kvstore.tiers.record import HEADER
from support.tree import ROOT

FORMATS = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def stated(section: str) -> set[tuple[int, int]]:
    """(offset, size) of every field with fixed numbers in the table of a section of formats.md."""
    text = FORMATS.split(f"\n## {section}")[1].split("\n## ")[0]
    return {(int(at), int(size)) for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", text, re.M)}


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ("Record", HEADER),
        ("Catalogue", row_dtype(16)),
        ("Host arena", ARENA_HEADER),
    ],
)
def test_formats_are_as_documented(section: str, dtype: np.dtype[np.void]) -> None:
    assert dtype.fields is not None
    fields = {
        (int(offset), field.itemsize)
        for name, (field, offset) in dtype.fields.items()
        if name not in {"tokens", "flags"}  # tokens: of variable size; flags: always 0
    }
    assert fields <= stated(section)


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    records = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [name for name in records if f"({name})" not in index] == []
    assert len({name[:4] for name in records}) == len(records), "two records have one number"


@pytest.mark.slow
def test_the_readmes_library_example_runs(tmp_path: Path) -> None:
    """Twice, as the README says: the second time the blocks come from disk."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "np.arange" in c]
    said = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert said == [
        "0 of 1000 tokens loaded, 0 of them from disk\n",
        "992 of 1000 tokens loaded, 992 of them from disk\n",
    ]
