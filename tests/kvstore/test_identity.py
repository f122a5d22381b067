"""Identity: every field that changes the bytes, or who may see them, changes the namespace."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from kvstore.identity import TEXT_MAX_BYTES, Identity
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.layout import Layout

LAYOUT = Layout.attention(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
BASE = Identity("sha256:abc", LAYOUT, "xxh3-128")
OTHERS: list[dict[str, Any]] = [
    {"model": "sha256:abd"},
    {
        "layout": Layout.attention(
            layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4
        )
    },
    {"layout": Layout.attention(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=8)},
    {"layout": Layout.attention(layers=2, kv_heads=1, head_dim=16, dtype="int8", block_tokens=4)},
    {"hash": "sha256"},
    {"tenant": "a"},
    {"tenant": "b"},
    {"salt": b"a"},
    {"adapter": "a"},
    {"adapter": "a@2"},
    {"shards": 2},
    {"attributes": {"rope_theta": "10000"}},
    {"attributes": {"rope_theta": "1000"}},
    {"attributes": {"a": "b", "c": "d"}},
    {"attributes": {"a": "bc", "": "d"}},
]


def test_every_field_counts() -> None:
    digests = [BASE.digest(), *(replace(BASE, **other).digest() for other in OTHERS)]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {32}


def test_the_order_of_attributes_does_not_count() -> None:
    one = replace(BASE, attributes={"a": "1", "b": "2"})
    other = replace(BASE, attributes={"b": "2", "a": "1"})
    assert one.digest() == other.digest()


def test_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from kvstore.identity import Identity; from kvstore.tiers.layout import Layout;"
        "layout = Layout.attention("
        "layers=2, kv_heads=2, head_dim=8, dtype='float16', block_tokens=4);"
        "print(Identity('sha256:abc', layout, 'xxh3-128').digest().hex())"
    )
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == BASE.digest().hex()


def test_the_salt_is_never_shown() -> None:
    assert "verysecret" not in repr(replace(BASE, salt=b"verysecret"))


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model": ""}, "model="),
        ({"model": "x" * (TEXT_MAX_BYTES + 1)}, "longer than"),
        ({"tenant": "é" * TEXT_MAX_BYTES}, "longer than"),
        ({"attributes": {"a": "x" * (TEXT_MAX_BYTES + 1)}}, "longer than"),
        ({"shards": 0}, "shards="),
        ({"shards": 65_536}, "shards="),
    ],
)
def test_what_is_refused(change: dict[str, Any], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle) as caught:
        replace(BASE, **change)
    assert "\n" not in str(caught.value)
