"""Documents that state facts about the code state those that hold."""

import re

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
