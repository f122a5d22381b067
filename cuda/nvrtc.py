"""Compiles the .cu files with NVRTC, for one architecture at a time, and keeps what it made.

NVRTC is a library without a driver: what is here works on a machine that has no GPU. The cache's
names are digests of source, headers, options, architecture and the compiler's version, so nothing
made for another GPU or from another source is ever loaded.
"""

import ctypes
import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.native import cache

FOLDER: Final = Path(__file__).parent
# CuPy compiles with the first two as well, so code behaves the same whoever compiles it.
OPTIONS: Final = (
    *("-std=c++17", "-ftz=true", "--device-as-default-execution-space"),
    *("--ptxas-options=-v", "--ptxas-options=--warn-on-spills"),
)
TOOLKITS: Final = (Path("/usr/local/cuda"),)
LIBRARY_FOLDERS: Final = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
HEADER_FOLDERS: Final = ("nvidia/cu13/include", "nvidia/cuda_runtime/include")
LOWEST_ARCHITECTURE: Final = 80  # cp.async, and mma of 16 x 8 x 16


class CompileError(RuntimeError):
    """A kernel did not compile, or there is nothing to compile it with."""


@dataclass(frozen=True)
class Compiled:
    """Code for one architecture. log: what the compiler said, with the registers of each kernel."""

    cubin: bytes
    log: str


@dataclass(frozen=True)
class Resources:
    """What one kernel takes. spill_bytes: registers that went to memory; should be 0."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def compile_source(
    source: str, architecture: int, definitions: Sequence[str] = (), *, folder: Path = FOLDER
) -> Compiled:
    """Compile one .cu file of `folder` for sm_<architecture>, or find it in the cache.

    definitions: such as "KV_HEAD_DIM=128". Raises CompileError with the compiler's words.
    """
    if architecture < LOWEST_ARCHITECTURE:
        raise CompileError(f"sm_{architecture} is too old; the kernels need sm_80 or newer")
    library = _library()
    options = [f"-arch=sm_{architecture}", *OPTIONS, *(f"-D{word}" for word in definitions)]
    key = hashlib.sha256(repr((source, options, _version(library))).encode())
    for path in sorted(folder.glob("*.cu*")):
        if path.suffix == ".cuh" or path.name == source:
            key.update(path.read_bytes())
    directory = cache.cache_directory()
    stem = f"{Path(source).stem}-{key.hexdigest()[:32]}"
    if directory is not None:
        cubin, log = cache.read(directory / f"{stem}.cubin"), cache.read(directory / f"{stem}.log")
        if cubin is not None and log is not None:
            return Compiled(cubin, log.decode())
    made = _compile(library, folder / source, [*options, *_includes(folder)])
    if directory is not None:
        cache.publish(directory / f"{stem}.log", made.log.encode())
        cache.publish(directory / f"{stem}.cubin", made.cubin)
    return made


def resources(log: str) -> dict[str, Resources]:
    """Registers, spills and shared memory of each kernel, from a compiler's log."""
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            current = found.setdefault(entry[1], {"spills": 0, "stack": 0})
        elif frame := re.search(r"(\d+) bytes stack.* (\d+) bytes spill.* (\d+) bytes spill", line):
            current["stack"] = int(frame[1])
            current["spills"] = int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            current["registers"], current["shared"] = int(used[1]), int(shared[1]) if shared else 0
    return {
        name: Resources(entry["registers"], entry["spills"], entry["stack"], entry["shared"])
        for name, entry in found.items()
    }


def warnings_in(log: str) -> list[str]:
    """The lines of a log that warn."""
    return [line for line in log.splitlines() if "warning" in line.lower()]


def _compile(library: ctypes.CDLL, path: Path, options: list[str]) -> Compiled:
    program = ctypes.c_void_p()
    text, name = path.read_bytes(), path.name.encode()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), words)
        log = _text(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if failed:
            raise CompileError(f"{path.name} does not compile with {options[0]}:\n{log}")
        return Compiled(_text(library, "CUBIN", program), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(code: int) -> None:
    if code:
        raise CompileError(f"NVRTC says error {code}")


def _library() -> ctypes.CDLL:
    """NVRTC from NVIDIA's wheels, or from a toolkit. Its own second library must be there first."""
    places = [Path(base) / folder for base in sys.path for folder in LIBRARY_FOLDERS]
    places += [toolkit / "lib64" for toolkit in TOOLKITS]
    for place in places:
        for path in sorted(place.glob("libnvrtc.so.1[23]")):
            for builtins in place.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    raise CompileError("NVRTC is not installed; install kvstore[cuda13] or kvstore[cuda12]")


def _includes(folder: Path) -> list[str]:
    places: list[Path] = [Path(base) / part for base in sys.path for part in HEADER_FOLDERS]
    places += [toolkit / "include" for toolkit in TOOLKITS]
    for place in places:
        if (place / "cuda_fp16.h").exists():
            return [f"-I{folder}", f"-I{place}"]
    raise CompileError("CUDA's headers are not installed; install kvstore[cuda13] or [cuda12]")
