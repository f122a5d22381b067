"""Layouts for tests: small canned ones, and random ones of every storable kind and size."""

import numpy as np

from kvstore.tiers.layout import CacheGroup, Layout

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")


def small_layout(block_tokens: int = 4, layers: int = 3, dtype: str = "float16") -> Layout:
    """A few hundred bytes a run: fast, and still with several layers."""
    return Layout.attention(
        layers=layers, kv_heads=2, head_dim=8, dtype=dtype, block_tokens=block_tokens
    )


def uneven_layout() -> Layout:
    """Runs of odd sizes, in two groups: what opaque pages and latent attention look like."""
    return Layout(
        4,
        (
            CacheGroup("mla", 2, (4 * 132,), "uint8"),
            CacheGroup("opaque", 3, (4097, 31), "int4", format="engine-1 avx512"),
        ),
    )


def random_layout(random: np.random.Generator) -> Layout:
    """1 to 80 layers of full attention, latent attention or opaque pages; at most 1 MiB a block."""
    layers = int(random.integers(1, 81))
    kind = random.choice(["full", "full", "mla", "opaque", "mixed"])
    block_tokens = int(random.choice([1, 2, 4, 8, 16]))
    dtype = str(random.choice(DTYPES))
    width = int(random.choice([1, 2, 3, 8, 24]))
    if kind == "full":
        return Layout.attention(
            layers=layers, kv_heads=width, head_dim=8, dtype=dtype, block_tokens=block_tokens
        )
    if kind == "mla":
        return Layout.mla(layers=layers, width=width * 9, dtype=dtype, block_tokens=block_tokens)
    sizes = tuple(int(size) for size in random.integers(1, 3000, int(random.integers(1, 4))))
    opaque = CacheGroup("opaque", layers, sizes, "fp8-with-scales", format="engine-1 amx")
    if kind == "opaque":
        return Layout(block_tokens, (opaque,))
    latent = CacheGroup("mla", int(random.integers(1, 10)), (block_tokens * 132,), "uint8")
    return Layout(block_tokens, (latent, opaque))
