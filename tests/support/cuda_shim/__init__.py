"""The kernels of cuda/*.cu as a library for this CPU, built once for each sanitizer and source.

A planted bug is a change of the source: (file, text, text in its place). The text must be there, so
a kernel that is rewritten takes its planted bugs along.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.cuda.kernel_table import KERNELS, SOURCES, Kind

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CUDA = ROOT / "cuda"
BUILD = ROOT / "build" / "cuda_shim"
FLAGS = {
    "plain": ["-O2"],
    "asan": [
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize=vptr"),
        *("-fsanitize-sections=shim_shared", "-fno-sanitize-recover=undefined"),
    ],
    "tsan": ["-O1", "-fsanitize=thread"],
}


class KernelError(RuntimeError):
    """A launch that a GPU would not survive: a deadlock, a barrier that is not reached by all."""


@dataclass(frozen=True)
class Bug:
    """A change of one source file."""

    file: str
    old: str
    new: str


def headers() -> list[str]:
    """-I options for CUDA's headers: of the wheels, or of a toolkit."""
    found = []
    for base in sys.path:
        for place in ("nvidia/cu13/include", "nvidia/cuda_runtime/include"):
            folder = Path(base) / place
            if (folder / "cuda_fp16.h").exists():
                found += [folder, folder / "cccl"]
    for folder in (Path("/usr/local/cuda/include"),):
        if not found and (folder / "cuda_fp16.h").exists():
            found += [folder, folder / "cccl"]
    if not found:
        raise RuntimeError("no CUDA headers; install the `test` extra")
    return [f"-I{folder}" for folder in found if folder.exists()]


def exports(sources: Sequence[str], head_dim: int | None) -> str:
    """One C++ file with these sources and their entry points; of one head_dim if it is given."""
    lines = [] if head_dim is None else [f"#define KV_HEAD_DIM {head_dim}"]
    lines += [f'#include "{source}"' for source in sources]
    for name, kernel in KERNELS.items():
        other = name.startswith("decode_") and head_dim and not name.endswith(f"_{head_dim}")
        if kernel.source in sources and not other:
            lines.append(f"SHIM_EXPORT({name}, {name})")
    return "\n".join(lines) + "\n"


def _digest(mode: str, bugs: Sequence[Bug], exported: str) -> str:
    digest = hashlib.sha256(repr((mode, list(bugs), FLAGS, exported)).encode())
    for path in sorted([*CUDA.glob("*.cu*"), *HERE.glob("*.?pp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    mode: str = "plain",
    bugs: Sequence[Bug] = (),
    *,
    sources: Sequence[str] = SOURCES,
    head_dim: int | None = None,
) -> Path:
    """The library, built if it is not there. Safe beside other processes that build the same."""
    exported = exports(sources, head_dim)
    digest = _digest(mode, bugs, exported)
    folder = BUILD / f"{mode}-{digest}"
    library = folder / "kernels.so"
    if library.exists():
        return library
    work = BUILD / f"work-{os.getpid()}-{mode}-{digest}"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(CUDA, work, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for bug in bugs:
        text = (work / bug.file).read_text()
        assert text.count(bug.old) == 1, f"{bug.file} has not one {bug.old!r}: mend the bug"
        (work / bug.file).write_text(text.replace(bug.old, bug.new))
    (work / "exports.cpp").write_text(exported)
    common = ["g++", "-std=c++17", "-g", "-fPIC", "-Wno-attributes", "-fno-strict-aliasing"]
    common += ["-ffp-contract=off", "-Wno-unknown-pragmas", *headers(), f"-I{HERE}", f"-I{work}"]
    kernel_side = ["-Wall", "-Wno-unused-function", "-include", "cuda_on_cpu.hpp"]
    steps = [
        [*common, "-O2", "-w", "-fno-tree-loop-distribute-patterns", "-c", HERE / "scheduler.cpp"],
        [*common, *FLAGS[mode], *kernel_side, "-c", work / "exports.cpp"],
        ["g++", "-shared", *FLAGS[mode], "scheduler.o", "exports.o", "-o", "kernels.so"],
    ]
    for step in steps:
        done = subprocess.run(
            [str(word) for word in step], cwd=work, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the kernels do not compile for a CPU:\n{done.stderr[-4000:]}")
    folder.mkdir(parents=True, exist_ok=True)
    os.replace(work / "kernels.so", library)
    shutil.rmtree(work)
    return library


class Kernels:
    """The entry points of one library. Arguments are checked by the table."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_last_error.restype = ctypes.c_char_p
        for call in (self._library.shim_poison, self._library.shim_unpoison):
            call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def sizes(self, name: str) -> list[int]:
        """Bytes of each parameter, as the compiler has them."""
        found = (ctypes.c_int * 64)()
        count = getattr(self._library, f"argsizes_{name}")(found)
        return list(found[:count])

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end. arguments: arrays, addresses and numbers, in order."""
        kernel = KERNELS[name]
        assert threads <= kernel.threads
        kept: list[Any] = []
        for parameter, value in zip(kernel.parameters, arguments, strict=True):
            if parameter.kind is Kind.POINTER:
                address = value.ctypes.data if isinstance(value, np.ndarray) else value
                kept.append(ctypes.c_void_p(address))
            elif parameter.kind is Kind.FLOAT:
                kept.append(ctypes.c_float(value))
            else:
                kept.append((ctypes.c_int if parameter.kind is Kind.INT else ctypes.c_int64)(value))
        pointers = (ctypes.c_void_p * len(kept))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in kept)
        )
        dims = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], threads, 1, 1)
        call = getattr(self._library, f"launch_{name}")
        if call(pointers, dims, ctypes.c_size_t(shared_bytes), ctypes.c_uint64(seed)):
            raise KernelError(self._library.shim_last_error().decode())

    @staticmethod
    def place(array: "np.ndarray[Any, Any]") -> int:
        """The array's own address: a kernel on this CPU reaches it."""
        return int(array.ctypes.data)

    def poison(self, array: "np.ndarray[Any, Any]") -> None:
        """Under ASan, any access to this memory is an error until `unpoison`."""
        self._library.shim_poison(array.ctypes.data, array.nbytes)

    def unpoison(self, array: "np.ndarray[Any, Any]") -> None:
        """Allow access again."""
        self._library.shim_unpoison(array.ctypes.data, array.nbytes)
