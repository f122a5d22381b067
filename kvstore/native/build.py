"""Compiles C++ at first use and loads it: one shared library for each set of sources, cached.

A library's file name is the digest of its sources, the compiler's version, the flags and the
CPU, so a cache that is shared by machines or survives an upgrade never serves code made for
another. Processes may race: each compiles to a name of its own and renames, so a reader sees a
whole library or none.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.native.cache import cache_directory, ours_alone, prune

SOURCES_DIR = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 300
MESSAGE_MAX = 2000  # characters of the compiler's own words in a warning

# While this is true `load` and `compile_library` give None and every caller takes its Python form.
fallback_only = False

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_tried = False


def load() -> ctypes.CDLL | None:
    """The compiled helper, made from every *.cpp in this folder; loaded once a process.

    Takes seconds the first time on a machine, afterwards milliseconds. Never raises: without a
    compiler, or with one that fails, it warns once and the callers' Python forms take over.
    ctypes releases the GIL while a function of the library runs.

    Returns: the library | None (no compiler, compilation failed, or `fallback_only` is set).
    """
    global _library, _tried  # noqa: PLW0603  One library a process is the point.
    if fallback_only:
        return None
    if _tried:
        return _library
    with _lock:
        if not _tried:
            _library = _load_fresh()
            _tried = True
    return _library


def compile_library(name: str, sources: list[Path], extra_flags: list[str]) -> Path | None:
    """Compile C++ sources into a shared library in the cache, or find it there.

    name: a plain word, the library's name in the cache. sources: the .cpp files; headers (*.hpp)
    that lie beside them count towards the digest. extra_flags: added to FLAGS, after the sources,
    so that they may name libraries too. Never loads the library. A source that does not exist
    raises FileNotFoundError.

    Returns: the library's path | None, after one warning (no compiler, no cache directory that is
    ours alone, or the compilation failed), or without one if `fallback_only` is set.
    """
    if fallback_only:
        return None
    for source in sources:
        if not source.is_file():
            raise FileNotFoundError(f"{source} does not exist; name the C++ files to compile")
    try:
        return _find_or_compile(name, sources, extra_flags)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or b""
        _warn(f"{error}: {said.decode(errors='replace')[:MESSAGE_MAX]}")
    except OSError as error:
        _warn(str(error))
    return None


@contextmanager
def forced_fallback() -> Iterator[None]:
    """Within it nothing native is used, in any thread: how tests run the Python forms."""
    global fallback_only  # noqa: PLW0603  The switch is a plain module attribute.
    before, fallback_only = fallback_only, True
    try:
        yield
    finally:
        fallback_only = before


def _load_fresh() -> ctypes.CDLL | None:
    sources = sorted(SOURCES_DIR.glob("*.cpp"))
    path = compile_library("native", sources, [])
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # A power cut can leave a cached file empty: make it anew, once.
        with suppress(OSError):
            path.unlink()
    path = compile_library("native", sources, [])
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError as error:
        _warn(f"the compiled library does not load ({error})")
        return None


def _find_or_compile(name: str, sources: list[Path], extra_flags: list[str]) -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++ and start again")
    directory = cache_directory()
    if directory is None:
        raise PermissionError("no cache directory is ours alone; set XDG_CACHE_HOME to one")
    target = directory / f"{name}-{_digest(compiler, sources, extra_flags)}.so"
    if not ours_alone(target, stat.S_ISREG):
        _compile(compiler, sources, extra_flags, target)
        prune(directory, name, keep=target)
    return target


def _digest(compiler: str, sources: list[Path], extra_flags: list[str]) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S
    ).stdout
    headers = sorted({header for source in sources for header in source.parent.glob("*.hpp")})
    parts = [version, "\0".join([*FLAGS, *extra_flags]).encode(), _cpu()]
    for path in [*sources, *headers]:
        parts += [path.name.encode(), path.read_bytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _cpu() -> bytes:
    """What -march=native looks at: the model and feature flags of the first CPU."""
    try:
        first = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0]
    except OSError:
        return os.uname().machine.encode()
    wanted = (b"model", b"flags", b"Features", b"CPU")
    return b"\n".join(line for line in first.split(b"\n") if line.startswith(wanted))


def _compile(compiler: str, sources: list[Path], extra_flags: list[str], target: Path) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f"{target.stem}-", suffix=".tmp", dir=target.parent)
    os.close(handle)
    command = [compiler, *FLAGS, "-o", temporary, *map(str, sources), *extra_flags]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S)
        # The compiler's file has the umask's mode; others may read it and never write it.
        os.chmod(temporary, 0o700)
        os.replace(temporary, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _warn(reason: str) -> None:
    warnings.warn(f"kvstore runs in its slower Python form: {reason}", RuntimeWarning, stacklevel=3)
