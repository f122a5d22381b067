"""Layouts: runs that tile the payload, one identity for equal layouts, and clear refusals."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.errors import LayoutError
from kvstore.tiers.layout import DTYPE_BITS, CacheGroup, Layout

GROUPS = st.builds(
    CacheGroup,
    kind=st.sampled_from(["full", "mla", "opaque", "window", "state"]),
    layers=st.integers(1, 80),
    run_bytes=st.lists(st.integers(1, 100_000), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from([*DTYPE_BITS, "int4-packed"]),
    scales=st.sampled_from(["none", "float32 per head"]),
    window_tokens=st.integers(1, 4096),
    format=st.sampled_from(["vllm 0.11 cpu avx512", "x"]),
)
LAYOUTS = st.builds(
    Layout, block_tokens=st.integers(1, 4096), groups=st.lists(GROUPS, min_size=1, max_size=4)
)


@given(LAYOUTS)
@settings(deadline=None)
def test_runs_tile_the_payload_layer_by_layer(layout: Layout) -> None:
    expected, at, spans = [], 0, []
    for group in layout.groups:
        for _ in range(group.layers):
            first = len(expected)
            for size in group.run_bytes:
                expected.append((at, size))
                at += size
            spans.append((first, len(expected)))
    found = zip(layout.run_offsets.tolist(), layout.run_lengths.tolist(), strict=True)
    assert list(found) == expected
    assert layout.payload_bytes == at
    assert layout.runs == len(expected) and layout.layers == len(spans)
    assert list(layout.layer_runs) == spans


@given(LAYOUTS, LAYOUTS)
@settings(deadline=None)
def test_canonical_bytes_are_equal_exactly_for_equal_layouts(one: Layout, two: Layout) -> None:
    assert (one.canonical() == two.canonical()) == (one == two)
    name, version, block_tokens, groups = json.loads(one.canonical())
    assert (name, version) == ("layout", 1)
    assert Layout(block_tokens, tuple(CacheGroup(g[0], g[1], *g[2:]) for g in groups)) == one


def test_every_field_is_in_the_canonical_bytes() -> None:
    base = CacheGroup("opaque", 2, (8, 8), "float16", "none", 5, "vllm")
    changes: list[dict[str, object]] = [
        {"kind": "full"},
        {"layers": 3},
        {"run_bytes": (8, 9)},
        {"run_bytes": (16,)},
        {"dtype": "bfloat16"},
        {"scales": "float32"},
        {"window_tokens": 6},
        {"format": "sglang"},
    ]
    assert {name for change in changes for name in change} == {f.name for f in fields(base)}
    layouts = [Layout(16, (base,)), Layout(17, (base,)), Layout(16, (base, base))]
    layouts += [Layout(16, (replace(base, **change),)) for change in changes]  # type: ignore[arg-type]
    assert len({layout.canonical() for layout in layouts}) == len(layouts)


def test_canonical_bytes_are_these() -> None:
    layout = Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
    expected = b'["layout",1,16,[["full",30,[6144,6144],"bfloat16","none",0,""]]]'
    assert layout.canonical() == expected
    opaque = Layout.opaque(
        layers=2, run_bytes=(7,), dtype="auto-é", format='vllm "x"', block_tokens=128
    )
    expected = b'["layout",1,128,[["opaque",2,[7],"auto-\\u00e9","none",0,"vllm \\"x\\""]]]'
    assert opaque.canonical() == expected


@pytest.mark.parametrize(
    ("layout", "block_bytes", "runs"),
    [
        (Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"), 360 << 10, 60),
        (Layout.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"), 2 << 20, 64),
        (Layout.mla(layers=61, width=576, dtype="bfloat16"), 70_272 * 16, 61),
        (Layout.attention(layers=1, kv_heads=1, head_dim=1, dtype="int8", block_tokens=1), 2, 2),
    ],
)
def test_known_models_have_known_sizes(layout: Layout, block_bytes: int, runs: int) -> None:
    assert (layout.payload_bytes, layout.runs) == (block_bytes, runs)


def test_numpys_numbers_and_lists_describe_the_same_layout() -> None:
    plain = Layout(16, (CacheGroup("full", 2, (64, 64), "float16"),))
    group = CacheGroup("full", np.int64(2), [np.int32(64), 64], "float16")  # type: ignore[arg-type]
    other = Layout(np.int64(16), [group])  # type: ignore[arg-type]
    assert other == plain and hash(other) == hash(plain)
    assert other.canonical() == plain.canonical()


def test_nobody_can_change_a_layout() -> None:
    layout = Layout.attention(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    for array in (layout.run_lengths, layout.run_offsets):
        with pytest.raises(ValueError):
            array[0] = 1
    with pytest.raises(AttributeError):
        layout.block_tokens = 8  # type: ignore[misc]


def group(**changes: object) -> CacheGroup:
    chosen = {"kind": "full", "layers": 2, "run_bytes": (64, 64), "dtype": "float32", **changes}
    return CacheGroup(**chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "paged"}, "group kind 'paged' is unknown; use one of full, mla"),
        ({"layers": 0}, "at least one layer"),
        ({"layers": 1.5}, "layers must be a whole number; got 1.5"),
        ({"run_bytes": ()}, "at least one layer and one run"),
        ({"run_bytes": (64, 0)}, r"run_bytes must lie in 1\.\."),
        ({"run_bytes": ((1 << 30) + 1,)}, r"run_bytes must lie in 1\.\."),
        ({"run_bytes": (64.0,)}, "run_bytes must be a whole number; got 64.0"),
        ({"dtype": ""}, "names its effective dtype"),
        ({"kind": "opaque"}, "format=: engine, version and instruction set"),
        ({"kind": "window"}, "window_tokens=, the length of its window"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        group(**changes)


@pytest.mark.parametrize(
    ("block_tokens", "groups", "said"),
    [
        (0, (group(),), r"block_tokens must lie in 1\.\.4096; got 0"),
        (4097, (group(),), r"block_tokens must lie in 1\.\.4096; got 4097"),
        (16.0, (group(),), "block_tokens must be a whole number; got 16.0"),
        (16, (), "at least one cache group"),
        (16, (group(layers=4096), group(layers=1)), "at most 8192 runs"),
        (16, (group(layers=5, run_bytes=(1 << 30,)),), "lower block_tokens"),
        (16, (group(format="x" * 70_000),), "at most 65536 bytes; put layers of one shape"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    block_tokens: int, groups: tuple[CacheGroup, ...], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout(block_tokens, groups)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_heads": 0}, "kv_heads must be at least 1; got 0"),
        ({"kv_heads": -2, "head_dim": -64}, "kv_heads must be at least 1; got -2"),
        ({"head_dim": 64.5}, "head_dim must be a whole number"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"dtype": "auto"}, "dtype 'auto' is unknown; use the effective one of float32, float16"),
    ],
)
def test_attention_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    chosen = {"layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32", **changes}
    with pytest.raises(LayoutError, match=said):
        Layout.attention(**chosen)  # type: ignore[arg-type]


def test_only_what_can_be_stored_is_stored() -> None:
    for kind in ("full", "mla", "opaque"):
        Layout(16, (group(kind=kind, format="x"),)).refuse_unstorable()
    for kind in ("window", "state"):
        layout = Layout(16, (group(), group(kind=kind, window_tokens=128)))
        with pytest.raises(LayoutError, match=f"{kind} groups can be described but not stored"):
            layout.refuse_unstorable()
