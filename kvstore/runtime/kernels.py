"""The compiled kernels: compiles kernels.cpp at first use, and calls it on tensors.

The kernels run on torch's own thread pool: they are linked against the very libgomp that torch has
loaded, since two pools would fight for the same cores.
"""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvstore.native import build
from kvstore.runtime.attention import Step
from kvstore.runtime.models.config import ModelConfig

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "kernels.cpp"]
STORE, ADD, SILU_TIMES = 0, 1, 2  # How a product ends; the same numbers as in linear.hpp.

_lock = threading.Lock()
_libraries: list[ctypes.CDLL | None] = []


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "bf16")),
        ("epsilon", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
    )


class _Layer(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("input_norm", "post_norm", "qkv", "output", "gate_up", "down")
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "wanted", "table_stride")),
        *((name, ctypes.c_int64) for name in ("page_tokens", "threads")),
        *((name, ctypes.c_void_p) for name in ("positions", "pages", "offsets", "firsts")),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "tables")),
        *((name, ctypes.c_void_p) for name in ("wanted_rows", "wanted_of")),
        *((name, ctypes.c_void_p) for name in ("x", "mixed", "queries")),
        *((name, ctypes.c_void_p) for name in ("normed", "attended", "gated")),
    )


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "kv_row_bytes": (_SIZE,),
    "kv_packed_bytes": (_SIZE, _SIZE, _SIZE),
    "kv_pack": (_SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _SIZE),
    "kv_linear": (_SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE),
    "kv_rms_norm": (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, ctypes.c_double, _SIZE),
    "kv_rotate_and_write": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE),
    "kv_attend": (_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
    "kv_layer": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE),
}


def load_kernels() -> ctypes.CDLL | None:
    """The kernels' library, compiled once a machine and loaded once a process.

    Returns: the library | None (no compiler, or `build.fallback_only` is set).
    """
    if build.fallback_only:
        return None
    with _lock:
        if not _libraries:
            _libraries.append(load_library([]))
        return _libraries[0]


def load_library(extra_flags: list[str]) -> ctypes.CDLL | None:
    """A build of the kernels with more flags, such as another instruction set. For tests.

    Returns: the library | None (no compiler).
    """
    # Contraction to fused multiply-add everywhere: a sum must not round differently by tile height.
    flags = ["-ffp-contract=fast", "-fopenmp", "-Wno-psabi"]
    pool = _loaded_libgomp()
    if pool is not None:
        # Named first and kept, so that the compiler's own libgomp is not needed any more.
        flags += [f"-Wl,--no-as-needed,{pool},--as-needed"]
    path = build.compile_library("runtime", SOURCES, [*flags, *extra_flags])
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _SIZE if name.endswith("_bytes") else None
    return library


def _loaded_libgomp() -> Path | None:
    """The libgomp of this process that came with torch; None where torch uses the system's."""
    folder = str(Path(torch.__file__).parent)
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    # Wheels keep it in torch/lib or in torch.libs beside it.
    own = [path for path in paths if path.startswith(folder)]
    return Path(own[0]) if own else None


class PackedWeights:
    """One weight matrix [columns, inputs], packed for the kernels; `paired` = gate over up."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, paired: bool = False) -> None:
        weight = weight.contiguous()
        self.columns = weight.shape[0] // 2 if paired else weight.shape[0]
        self.inputs = weight.shape[1]
        self.bf16 = weight.dtype == torch.bfloat16
        self._library = library
        size = library.kv_packed_bytes(self.bf16, weight.shape[0], self.inputs)
        # Aligned to cache lines by hand: a panel's vectors must not straddle two.
        self._memory = torch.empty(size + 64, dtype=torch.uint8)
        self.address = -(-self._memory.data_ptr() // 64) * 64
        library.kv_pack(
            self.bf16,
            weight.data_ptr(),
            *weight.shape,
            paired,
            self.address,
            torch.get_num_threads(),
        )

    def linear(self, rows: Tensor, ending: int = STORE, onto: Tensor | None = None) -> Tensor:
        """rows [n, inputs] (float32, or as `row_dtype` says) -> float32 [n, columns]."""
        output = torch.empty(len(rows), self.columns) if onto is None else onto
        self._library.kv_linear(
            self.bf16,
            rows.data_ptr(),
            len(rows),
            self.inputs,
            self.address,
            self.columns,
            ending,
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output


def row_dtype(library: ctypes.CDLL, dtype: torch.dtype) -> torch.dtype:
    """The type of rows that products with weights of `dtype` take on this machine."""
    wide = library.kv_row_bytes(dtype == torch.bfloat16) == torch.float32.itemsize
    return torch.float32 if wide else torch.bfloat16


def native_rms_norm(
    library: ctypes.CDLL, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Root-mean-square norm of float32 rows, written as `dtype`."""
    output = torch.empty_like(x, dtype=dtype)
    library.kv_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        dtype == torch.bfloat16,
        *x.shape,
        epsilon,
        torch.get_num_threads(),
    )
    return output


class KernelLayer:
    """The packed weights of one layer, and their addresses as the kernels take them."""

    def __init__(
        self, library: ctypes.CDLL, norms: Sequence[Tensor], matrices: Sequence[Tensor]
    ) -> None:
        """norms: input, post-attention (float32); matrices: qkv, output, gate over up, down."""
        self._norms = [norm.float().contiguous() for norm in norms]
        self._packed = [
            PackedWeights(library, weight, paired=place == 2)
            for place, weight in enumerate(matrices)
        ]
        addresses = [norm.data_ptr() for norm in self._norms]
        addresses += [packed.address for packed in self._packed]
        self.arguments = _Layer(*addresses)


class KernelModel:
    """What all steps of one model share: sizes and rotary tables, as the kernels take them."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        dtype: torch.dtype,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        """rotary: cosines and sines, float32 [positions, head_dim / 2]."""
        self.library = library
        self.config = config
        self.rows = row_dtype(library, dtype)
        self._rotary = tuple(table.contiguous() for table in rotary)
        self.arguments = _Model(
            config.hidden_size,
            config.intermediate_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
            dtype == torch.bfloat16,
            config.norm_epsilon,
            *(table.data_ptr() for table in self._rotary),
        )


class KernelStep:
    """One step's arrays and work space, for as long as the step runs. Starts from `x`."""

    def __init__(self, model: KernelModel, step: Step, page_tokens: int, x: Tensor) -> None:
        """x: the tokens' embeddings, float32 [tokens, hidden]; overwritten by every layer."""
        config, tokens = model.config, len(x)
        width = config.heads * config.head_dim
        self._model = model
        self._plan = step  # Its arrays are read by address.
        self.x = x
        self.mixed = torch.empty(tokens, width + 2 * config.kv_heads * config.head_dim)
        self.queries = torch.empty(tokens, config.heads, config.head_dim)
        self._rows = tuple(
            torch.empty(tokens, columns, dtype=model.rows)
            for columns in (config.hidden_size, width, config.intermediate_size)
        )
        arrays = (step.positions, step.pages, step.offsets, step.firsts, step.starts, step.lengths)
        after = (step.tables, step.wanted, step.wanted_of, x, self.mixed, self.queries, *self._rows)
        self._arguments = _Step(
            tokens,
            len(step.starts),
            len(step.wanted),
            step.tables.stride(0),
            page_tokens,
            torch.get_num_threads(),
            *(array.data_ptr() for array in (*arrays, *after)),
        )

    def run(self, layer: KernelLayer, keys: Tensor, values: Tensor, last: bool) -> None:
        """One layer, in place on x; after the last one x begins with the wanted rows."""
        self._model.library.kv_layer(
            ctypes.byref(self._model.arguments),
            ctypes.byref(layer.arguments),
            ctypes.byref(self._arguments),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            last,
        )

    def rotate_and_write(self, keys: Tensor, values: Tensor) -> None:
        """From `mixed`: rotated, scaled `queries`; keys and values into their pages."""
        self._model.library.kv_rotate_and_write(
            ctypes.byref(self._model.arguments),
            ctypes.byref(self._arguments),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
        )

    def attend(self, keys: Tensor, values: Tensor, wanted_only: bool) -> Tensor:
        """Attention of `queries` alone: float32 [tokens or wanted, heads, head_dim]."""
        rows = len(self._plan.wanted) if wanted_only else len(self.x)
        output = torch.empty(rows, *self.queries.shape[1:])
        arguments = _Step.from_buffer_copy(self._arguments)
        arguments.attended = output.data_ptr()
        self._model.library.kv_attend(
            ctypes.byref(self._model.arguments),
            ctypes.byref(arguments),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            wanted_only,
        )
        return output
