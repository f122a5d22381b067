"""Identity: two namespaces have one digest only if all their fields are equal."""

from collections.abc import Callable
from itertools import combinations

import pytest

from kvstore.hashing.namespace import FIELDS_MAX, VALUE_BYTES_MAX, namespace_digest, root_key

BASE = [("model", b"abc"), ("tenant", b""), ("salt", b"x")]


def test_fields_that_join_to_the_same_bytes_are_told_apart() -> None:
    lists = [
        BASE,
        [("model", b"ab"), ("tenant", b"c"), ("salt", b"x")],
        [("modela", b"bc"), ("tenant", b""), ("salt", b"x")],
        [("model", b"abc"), ("tenant", b"salt"), ("sal", b"x")],
        [("model", b"abc"), ("tenant", b"")],
        [("tenant", b""), ("model", b"abc"), ("salt", b"x")],
        [*BASE, ("more", b"")],
    ]
    for one, other in combinations(lists, 2):
        assert namespace_digest(one) != namespace_digest(other), (one, other)


def test_equal_fields_have_equal_digests_and_roots_of_their_length() -> None:
    digest = namespace_digest(BASE)
    assert digest == namespace_digest(tuple(BASE))
    assert len(digest) == 32
    assert root_key(digest) == root_key(digest)
    assert len(root_key(digest)) == 16
    assert root_key(digest) != digest[:16]


@pytest.mark.parametrize(
    "call",
    [
        lambda: namespace_digest([]),
        lambda: namespace_digest([("a", b""), ("a", b"")]),
        lambda: namespace_digest([("", b"")]),
        lambda: namespace_digest([("a", bytes(VALUE_BYTES_MAX + 1))]),
        lambda: namespace_digest([(str(i), b"") for i in range(FIELDS_MAX + 1)]),
        lambda: root_key(b"short"),
    ],
)
def test_misuse_is_refused(call: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError):
        call()
