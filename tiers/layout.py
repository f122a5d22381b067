"""What the bytes of a block are: an explicit, frozen description, never guessed from tensor shapes.

A block is the KV of `block_tokens` consecutive tokens over all layers. Its payload is a sequence of
runs in this order, with nothing between them:

    for each group, for each layer of the group, for each run of a layer (K, then V, then scales)

One run is contiguous in the payload, so a layer can be moved, and verified, by itself.
"""

import json
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore.tiers.errors import LayoutError

GroupKind = Literal["full", "mla", "window", "state", "opaque"]

KINDS: tuple[GroupKind, ...] = ("full", "mla", "window", "state", "opaque")
STORED_KINDS: tuple[GroupKind, ...] = ("full", "mla", "opaque")
BLOCK_TOKENS_MAX = 4096
RUNS_MAX = 8192
RUN_BYTES_MAX = 1 << 30
BLOCK_BYTES_MAX = 1 << 32
CANONICAL_BYTES_MAX = 64 << 10  # It lies in the catalogue, and in every namespace's digest.

DTYPE_BITS: dict[str, int] = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV has one shape.

    kind: `full` (K and V of every token), `mla` (one latent per token), `window` (the last
      `window_tokens` only), `state` (one recurrent state), or `opaque` (an engine's page, whole).
    layers: how many layers.
    run_bytes: bytes of each contiguous run of ONE layer for ONE block, in payload order.
    dtype: the effective storage type; for opaque pages whatever the engine calls it.
    scales: format of quantisation scales that travel in the runs, or "none".
    format: for opaque pages the engine, its version and its kernel's instruction set.
    """

    kind: GroupKind
    layers: int
    run_bytes: tuple[int, ...]
    dtype: str
    scales: str = "none"
    window_tokens: int = 0
    format: str = ""

    def __post_init__(self) -> None:
        # Equal layouts have equal canonical bytes, so 16.0 or numpy's 16 may not differ from 16.
        object.__setattr__(self, "layers", _whole("layers", self.layers))
        object.__setattr__(self, "window_tokens", _whole("window_tokens", self.window_tokens))
        sizes = tuple(_whole("run_bytes", size) for size in self.run_bytes)
        object.__setattr__(self, "run_bytes", sizes)
        if self.kind not in KINDS:
            raise LayoutError(f"group kind {self.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if self.layers < 1 or not self.run_bytes:
            raise LayoutError("a cache group needs at least one layer and one run in each layer")
        if not all(0 < size <= RUN_BYTES_MAX for size in self.run_bytes):
            raise LayoutError(f"run_bytes must lie in 1..{RUN_BYTES_MAX}; got {self.run_bytes}")
        if not self.dtype:
            raise LayoutError("a cache group names its effective dtype; 'auto' or '' is not one")
        if self.kind == "opaque" and not self.format:
            raise LayoutError("an opaque group needs format=: engine, version and instruction set")
        if self.kind == "window" and self.window_tokens < 1:
            raise LayoutError("a window group needs window_tokens=, the length of its window")


@dataclass(frozen=True)
class Layout:
    """The layout of one block. Frozen; equal layouts have equal digests in every process.

    Build one with `attention`, `mla` or `opaque`, or list the groups yourself.
    """

    block_tokens: int
    groups: tuple[CacheGroup, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_tokens", _whole("block_tokens", self.block_tokens))
        object.__setattr__(self, "groups", tuple(self.groups))
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise LayoutError(
                f"block_tokens must lie in 1..{BLOCK_TOKENS_MAX}; got {self.block_tokens}"
            )
        if not self.groups:
            raise LayoutError("a layout needs at least one cache group")
        if sum(group.layers * len(group.run_bytes) for group in self.groups) > RUNS_MAX:
            raise LayoutError(f"a layout has at most {RUNS_MAX} runs; group the layers' K and V")
        if self.payload_bytes > BLOCK_BYTES_MAX:
            raise LayoutError(f"a block has at most {BLOCK_BYTES_MAX} bytes; lower block_tokens")
        if len(self.canonical()) > CANONICAL_BYTES_MAX:
            raise LayoutError(
                f"a layout is described in at most {CANONICAL_BYTES_MAX} bytes; put layers of one "
                "shape into one group, and shorten format="
            )

    @classmethod
    def attention(
        cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, block_tokens: int = 16
    ) -> "Layout":
        """Full attention (MHA, GQA, MQA): each layer has a run of K and one of V.

        A run is [tokens][kv_heads][head_dim].
        """
        _refuse_below_one(kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens)
        run = block_tokens * kv_heads * head_dim * _bits(dtype) // 8
        return cls(block_tokens, (CacheGroup("full", layers, (run, run), dtype),))

    @classmethod
    def mla(cls, *, layers: int, width: int, dtype: str, block_tokens: int = 16) -> "Layout":
        """Multi-head latent attention: one run of [tokens][width] a layer, latent and RoPE."""
        _refuse_below_one(width=width, block_tokens=block_tokens)
        run = block_tokens * width * _bits(dtype) // 8
        return cls(block_tokens, (CacheGroup("mla", layers, (run,), dtype),))

    @classmethod
    def opaque(
        cls, *, layers: int, run_bytes: tuple[int, ...], dtype: str, format: str, block_tokens: int
    ) -> "Layout":
        """An engine's pages as they are: moved whole and never sliced by token."""
        group = CacheGroup("opaque", layers, tuple(run_bytes), dtype, format=format)
        return cls(block_tokens, (group,))

    @cached_property
    def run_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of every run, in payload order: int64 [runs]."""
        lengths = [size for group in self.groups for size in group.run_bytes * group.layers]
        return _frozen(np.array(lengths, dtype=np.int64))

    @cached_property
    def run_offsets(self) -> npt.NDArray[np.int64]:
        """Where each run starts in the payload: int64 [runs]."""
        ends = np.cumsum(self.run_lengths)
        return _frozen(np.concatenate([np.zeros(1, np.int64), ends[:-1]]))

    @cached_property
    def layer_runs(self) -> tuple[tuple[int, int], ...]:
        """For each layer, in payload order, its runs as (first, one past the last)."""
        spans, at = [], 0
        for group in self.groups:
            for _ in range(group.layers):
                spans.append((at, at + len(group.run_bytes)))
                at += len(group.run_bytes)
        return tuple(spans)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block, without any header or padding."""
        return sum(group.layers * sum(group.run_bytes) for group in self.groups)

    @property
    def runs(self) -> int:
        """How many runs a block has."""
        return len(self.run_lengths)

    @property
    def layers(self) -> int:
        """How many layers a block has, over all groups."""
        return len(self.layer_runs)

    def __str__(self) -> str:
        """For people: "16 tokens, 368640 bytes, 30 layers of bfloat16"."""
        dtypes = "/".join(dict.fromkeys(group.dtype for group in self.groups))
        size = f"{self.block_tokens} tokens, {self.payload_bytes} bytes"
        return f"{size}, {self.layers} layers of {dtypes}"

    def canonical(self) -> bytes:
        """The layout as bytes, equal in every process and version: what identity is made of."""
        groups = [
            [g.kind, g.layers, list(g.run_bytes), g.dtype, g.scales, g.window_tokens, g.format]
            for g in self.groups
        ]
        return json.dumps(["layout", 1, self.block_tokens, groups], separators=(",", ":")).encode()

    def refuse_unstorable(self) -> None:
        """Raise LayoutError for groups that can be described but not stored yet (window, state)."""
        for group in self.groups:
            if group.kind not in STORED_KINDS:
                raise LayoutError(
                    f"{group.kind} groups can be described but not stored by this version; "
                    "store the full-attention groups and let the engine keep the others"
                )


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} must be a whole number; got {value!r}") from None


def _refuse_below_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if _whole(name, size) < 1:
            raise LayoutError(f"{name} must be at least 1; got {size}")


def _frozen(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    array.flags.writeable = False  # Shared by all who have the layout.
    return array


def _bits(dtype: str) -> int:
    try:
        return DTYPE_BITS[dtype]
    except KeyError:
        names = ", ".join(DTYPE_BITS)
        raise LayoutError(f"dtype {dtype!r} is unknown; use the effective one of {names}") from None
