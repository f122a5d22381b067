"""Labels tell model and tenant apart, whatever their length, and stay equal only to themselves."""

import itertools

import pytest

from kvstore.labels import make_label, model_part, parts_of, shown, tenant_part
from kvstore.tiers.catalogue_tables import LABEL_BYTES_MAX, Namespace

TEXTS = ["", "a", "b c", "é" * 100, "x" * 159, "x" * 160, "x" * 161, "x" * 4096, "a\0b", "ÿ" * 2000]


@pytest.mark.parametrize(("model", "tenant"), list(itertools.product(TEXTS[1:], TEXTS)))
def test_a_label_fits_and_tells_its_parts(model: str, tenant: str) -> None:
    label = make_label(model, tenant)
    assert len(label.encode()) <= LABEL_BYTES_MAX
    assert parts_of(label) == (model_part(model), tenant_part(tenant))
    kept = Namespace.parse(Namespace(bytes(32), b"", label).pack())
    assert kept is not None and kept.label == label


@pytest.mark.parametrize("part", [model_part, tenant_part])
def test_what_is_cut_is_equal_only_to_itself(part: object) -> None:
    assert callable(part)
    longer = [*TEXTS, "x" * 4095 + "y", "x" * 4095]
    assert len({part(text) for text in longer}) == len(longer)


def test_a_label_without_parts_tells_neither() -> None:
    assert parts_of("") is None
    assert parts_of("a-model a-tenant") is None


def test_what_people_see() -> None:
    assert shown(make_label("a-model", "a-tenant")) == "a-model a-tenant"
    assert shown(make_label("a-model", "")) == "a-model"
    assert shown("") == "?"
