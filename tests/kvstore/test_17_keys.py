"""Row 17: what differs in one field of its identity has another key, in every process.

Also when two fields, joined, have the same bytes as two others.
"""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore import identity as identity_module
from kvstore.hashing.chain import chain_function
from kvstore.hashing.namespace import namespace_digest, root_key
from kvstore.identity import Identity
from kvstore.tiers.layout import CacheGroup, Layout

PAIRS = 10_000
LONG_PAIRS = 1_000_000
PROCESSES = 8
WORD = "abcdef0123\0/.@:= é"
DTYPES = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8", "uint8")


def word(rng: random.Random) -> str:
    return "".join(rng.choices(WORD, k=rng.randint(1, 12)))


def layout(rng: random.Random) -> Layout:
    groups = tuple(
        CacheGroup(rng.choice(["full", "mla"]), rng.randint(1, 40), (rng.randint(1, 9) * 8,), dtype)
        for dtype in rng.sample(DTYPES, rng.randint(1, 2))
    )
    return Layout(rng.choice([4, 8, 16, 32]), groups)


def base(rng: random.Random) -> Identity:
    names = {word(rng): word(rng) for _ in range(rng.randint(0, 3))}
    return Identity(
        model=word(rng),
        layout=layout(rng),
        hash="xxh3-128",
        tenant=word(rng) if rng.random() < 0.5 else "",
        salt=rng.randbytes(rng.choice([0, 1, 16])),
        adapter=word(rng) if rng.random() < 0.5 else "",
        shards=rng.randint(1, 8),
        attributes=names,
    )


def other_layout(one: Identity, rng: random.Random) -> Identity:
    while (changed := layout(rng)) == one.layout:
        pass
    return replace(one, layout=changed)


def other_dtype(one: Identity, rng: random.Random) -> Identity:
    first, *rest = one.layout.groups
    dtype = rng.choice([name for name in DTYPES if name != first.dtype])
    return replace(
        one, layout=Layout(one.layout.block_tokens, (replace(first, dtype=dtype), *rest))
    )


def other_attribute(one: Identity, rng: random.Random) -> Identity:
    names = dict(one.attributes)
    if names and rng.random() < 0.5:
        name = rng.choice(sorted(names))
        names[name] = names[name] + "x" if rng.random() < 0.5 else names[name][:-1]
    else:
        names["new " + word(rng)] = word(rng)
    return replace(one, attributes=names)


CHANGES: tuple[Callable[[Identity, random.Random], Identity], ...] = (
    lambda one, rng: replace(one, model=one.model + word(rng)),
    lambda one, rng: replace(one, tenant=one.tenant + word(rng)),
    lambda one, rng: replace(one, adapter=one.adapter + word(rng)),
    lambda one, rng: replace(one, salt=one.salt + rng.randbytes(1)),
    lambda one, rng: replace(one, shards=one.shards + rng.randint(1, 8)),
    lambda one, rng: replace(one, hash="sha256"),
    lambda one, rng: replace(one, layout=Layout(one.layout.block_tokens * 2, one.layout.groups)),
    other_layout,
    other_dtype,
    other_attribute,
)
TOKENS_CHANGED, MOVED, SCHEMA_CHANGED = range(len(CHANGES), len(CHANGES) + 3)


def first_key(one: Identity, tokens: Any, parent: bytes | None = None) -> bytes:
    """The key of a block of these tokens: the namespace's first one, or the one after `parent`."""
    before = root_key(one.digest()) if parent is None else parent
    return chain_function(one.hash)(before, tokens, None)[0].tobytes()


def pairs(count: int, seed: int) -> Iterator[tuple[int, bytes, bytes]]:
    """What was changed, and the keys of the two."""
    rng = random.Random(seed)
    for number in range(count):
        one, what = base(rng), number % (len(CHANGES) + 3)
        size = one.layout.block_tokens
        tokens = np.array([rng.choices(range(50_000), k=size)], np.int32)
        key = first_key(one, tokens)
        if what == TOKENS_CHANGED:
            changed = tokens.copy()
            changed[0, rng.randrange(size)] ^= 1 << rng.randrange(31)
            yield what, key, first_key(one, changed)
        elif what == MOVED:
            yield what, key, first_key(one, tokens, parent=key)
        elif what == SCHEMA_CHANGED:
            kept, identity_module.SCHEMA = identity_module.SCHEMA, b"2"
            try:
                other = first_key(one, tokens)
            finally:
                identity_module.SCHEMA = kept
            yield what, key, other
        else:
            # The same tokens, as far as a changed block size leaves them the same.
            other_one = CHANGES[what](one, rng)
            resized = np.resize(tokens, (1, other_one.layout.block_tokens))
            yield what, key, first_key(other_one, resized)


def assert_distinct(count: int, seed: int) -> None:
    seen: set[bytes] = set()
    for what, one, other in pairs(count, seed):
        assert one != other, f"change {what} of seed {seed} does not count"
        seen |= {one, other}
    assert len(seen) == 2 * count
    print(f"{count} pairs that differ in one field: {len(seen)} distinct keys")


def test_pairs_that_differ_in_one_field_have_distinct_keys() -> None:
    assert_distinct(PAIRS, seed=17)


@pytest.mark.long
def test_a_million_pairs() -> None:
    assert_distinct(LONG_PAIRS, seed=18)


def test_bytes_that_move_over_a_border_of_fields_count() -> None:
    """("a", "bc") and ("ab", "c") in every pair of fields, and of a name and its value."""
    one = base(random.Random(1))
    names = [name for name, _ in fields_of(one)]
    for first in range(len(names)):
        for second in range(len(names)):
            if first == second:
                continue
            digests = set()
            for left, right in ((b"a", b"bc"), (b"ab", b"c"), (b"abc", b""), (b"", b"abc")):
                values = [b"same"] * len(names)
                values[first], values[second] = left, right
                digests.add(namespace_digest(list(zip(names, values, strict=True))))
            assert len(digests) == 4, (names[first], names[second])
    whole = Identity("m", one.layout, "xxh3-128")
    aliases = [
        *(replace(whole, model=m, tenant=t) for m, t in (("a", "bc"), ("ab", "c"), ("abc", ""))),
        *(replace(whole, tenant=t, salt=s) for t, s in (("a", b"bc"), ("ab", b"c"), ("", b"abc"))),
        *(replace(whole, adapter=a, tenant=t) for a, t in (("a", "bc"), ("ab", "c"), ("", "abc"))),
        *(replace(whole, attributes={n: v}) for n, v in (("a", "bc"), ("ab", "c"), ("abc", ""))),
        replace(whole, attributes={"a": "b", "c": "d"}),
        replace(whole, attributes={"a": "battribute.c", "": "d"}),
        replace(whole, adapter="X"),
        replace(whole, salt=b"X"),
        replace(whole, tenant="X"),
    ]
    # Of a tenant without a salt and the like there are two ways to get there; count each once.
    assert len({alias.digest() for alias in aliases}) == len(set(map(repr_of, aliases)))


def repr_of(one: Identity) -> tuple[object, ...]:
    return (one.model, one.tenant, one.salt, one.adapter, *sorted(one.attributes.items()))


def fields_of(one: Identity) -> list[tuple[str, bytes]]:
    """The fields as the digest has them."""
    seen: list[tuple[str, bytes]] = []
    kept = identity_module.namespace_digest
    identity_module.namespace_digest = lambda fields: seen.extend(fields) or bytes(32)  # type: ignore[assignment,func-returns-value]
    try:
        one.digest()
    finally:
        identity_module.namespace_digest = kept
    return seen


def all_keys(count: int) -> str:
    """One digest over many keys."""
    digest = hashlib.sha256()
    for _, one, other in pairs(count, seed=8):
        digest.update(one + other)
    return digest.hexdigest()


@pytest.mark.slow
def test_keys_are_equal_over_processes_and_hash_seeds() -> None:
    children = []
    for seed in [*range(PROCESSES - 1), "random"]:
        children.append(
            subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "PYTHONHASHSEED": str(seed)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    keys = {child.communicate(timeout=120)[0].strip() for child in children}
    assert keys == {all_keys(260)}


if __name__ == "__main__":
    print(all_keys(260))
