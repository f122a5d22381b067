"""Every kernel once: where it is, what it takes, and what it reads and writes.

Launches, checks of arguments, and the declarations that a checker of orderings needs are all made
from this table; a test compares it with the compiled code.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

HEAD_DIMS: Final = (64, 80, 96, 128, 256)
DTYPES: Final = ("bf16", "fp16", "fp32")
DECODE_THREADS: Final = 128
COPY_THREADS: Final = 256
UNIT_BYTES: Final = 4096  # as in page_copy.cu
TILE_ROWS: Final = {"bf16": 16, "fp16": 16, "fp32": 4}  # as in decode_tensor.cu and decode_fp32.cu
WARPS, CHUNK = 4, 16  # likewise


class Kind(StrEnum):
    """What a parameter is, with its size in bytes as the compiler has it."""

    POINTER = "p"
    INT = "i4"
    LONG = "i8"
    FLOAT = "f4"

    @property
    def size_bytes(self) -> int:
        """4 or 8."""
        return 8 if self is Kind.POINTER else int(self.value[1:])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. reads, writes: of a pointer, whether the kernel does so at it."""

    name: str
    kind: Kind
    reads: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point. source: its file. threads: the most in a block."""

    name: str
    source: str
    threads: int
    parameters: tuple[Parameter, ...]


def _parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters of "name:kind ...", where r, w and rw are pointers, and what is done at them."""
    made = []
    for word in text.split():
        name, kind = word.split(":")
        if kind in ("r", "w", "rw"):
            made.append(Parameter(name, Kind.POINTER, "r" in kind, "w" in kind))
        else:
            made.append(Parameter(name, Kind(kind)))
    return tuple(made)


_PAGE_COPY = "n_blocks:i4 pages_per_block:i4 first_run:i4 last_run:i4 pool_pages:i4 skip_pages:i4"
_STRIDES = "k_page:i8 k_token:i8 k_head:i8 v_page:i8 v_token:i8 v_head:i8"
_DECODE = _parameters(
    "q:r k_pool:r v_pool:r table:r lengths:r partial:w sums:w output:w error:w q_token:i8 "
    + _STRIDES
    + " heads:i4 kv_heads:i4 n_q:i4 page_tokens:i4 table_stride:i4 pool_pages:i4 split_tokens:i4 "
    "window:i4 scale:f4"
)
_ROPE = _parameters(
    "mixed:rw rotary:r positions:r slots:r k_pool:w v_pool:w error:w "
    + _STRIDES
    + " heads:i4 kv_heads:i4 head_dim:i4 rotary_dim:i4 interleaved:i4 page_tokens:i4 pool_pages:i4"
)
_COMBINE = _parameters("partial:r sums:r output:w splits:i4 head_dim:i4")


def _copy(name: str) -> Kernel:
    # What lies behind the addresses in `runs` and `payloads` is declared by the caller.
    text = f"runs:r first_unit:r pages:r payloads:r error:w {_PAGE_COPY}"
    return Kernel(name, "page_copy.cu", COPY_THREADS, _parameters(text))


_PROBES = {
    "probe_copy_async": ("from:r to:w inside:r", 256),
    "probe_load_stream": ("from:r to:w", 256),
    "probe_mma_bf16": ("a:r b:r d:rw", 32),
    "probe_mma_fp16": ("a:r b:r d:rw", 32),
}
_ALL = [
    *(Kernel(name, "probe.cu", most, _parameters(text)) for name, (text, most) in _PROBES.items()),
    _copy("gather_pages"),
    _copy("scatter_pages"),
    *(Kernel(f"rope_write_{t}", "rope_write.cu", 256, _ROPE) for t in DTYPES),
    *(
        Kernel(
            f"decode_{t}_{d}",
            "decode_fp32.cu" if t == "fp32" else "decode_tensor.cu",
            DECODE_THREADS,
            _DECODE,
        )
        for t in DTYPES
        for d in HEAD_DIMS
    ),
    *(Kernel(f"combine_{t}", "decode_combine.cu", 128, _COMBINE) for t in DTYPES),
]
KERNELS: Final[dict[str, Kernel]] = {kernel.name: kernel for kernel in _ALL}
SOURCES: Final = tuple(dict.fromkeys(kernel.source for kernel in _ALL))


def decode_shared_bytes(dtype: str, head_dim: int) -> int:
    """Dynamic shared memory of decode_{dtype}_{head_dim}: the ring of chunks, or the merge."""
    rows = TILE_ROWS[dtype]
    merge = 4 * WARPS * rows * (head_dim + 2)
    if dtype == "fp32":
        return merge
    stages = 3 if head_dim <= 128 else 2
    return max(merge, 2 * WARPS * 2 * stages * CHUNK * (head_dim + 8))
