"""The helper compiles once, is never another user's code, and is never needed."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstore.native import build
from kvstore.native.cache import FILES_KEPT

ANSWER = 'extern "C" int answer() { return %d; }\n'
HEADER_ANSWER = '#include "answer.hpp"\nextern "C" int answer() { return ANSWER; }\n'
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the directory in it that libraries go to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "kvstore"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER % 42, encoding="utf-8")
    return path


def answer(path: Path | None) -> int:
    assert path is not None
    return int(ctypes.CDLL(str(path)).answer())


def test_the_helper_is_there_exactly_if_a_compiler_is() -> None:
    library = build.load()
    assert (library is not None) == (COMPILER is not None)
    assert build.load() is library


def test_a_forced_fallback_hides_it_and_ends_even_after_an_error() -> None:
    before = build.load()
    with pytest.raises(KeyError), build.forced_fallback():
        with build.forced_fallback():
            assert build.load() is None
        assert build.load() is None
        assert build.compile_library("x", [], []) is None
        raise KeyError
    assert build.load() is before


@needs_compiler
def test_a_library_is_compiled_once_and_again_when_anything_changes(
    cache: Path, source: Path
) -> None:
    first = build.compile_library("x", [source], [])
    assert answer(first) == 42
    assert first is not None and first.parent == cache
    inode = first.stat().st_ino
    assert build.compile_library("x", [source], []) == first
    assert first.stat().st_ino == inode
    flagged = build.compile_library("x", [source], ["-DX=1"])
    source.write_text(HEADER_ANSWER, encoding="utf-8")
    (source.parent / "answer.hpp").write_text("#define ANSWER 43\n", encoding="utf-8")
    with_header = build.compile_library("x", [source], [])
    assert answer(with_header) == 43
    (source.parent / "answer.hpp").write_text("#define ANSWER 44\n", encoding="utf-8")
    changed = build.compile_library("x", [source], [])
    assert answer(changed) == 44
    assert len({first, flagged, with_header, changed}) == 4
    assert sorted(cache.iterdir()) == sorted({first, flagged, with_header, changed} - {None})


@needs_compiler
def test_what_lies_in_the_cache_is_closed_to_others(cache: Path, source: Path) -> None:
    before = os.umask(0)
    try:
        path = build.compile_library("x", [source], [])
    finally:
        os.umask(before)
    assert path is not None
    for made in (path, cache):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@needs_compiler
def test_a_source_that_does_not_compile_is_one_warning_with_the_reason(
    cache: Path, source: Path
) -> None:
    source.write_text("int broken(\n", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="error") as caught:
        assert build.compile_library("x", [source], []) is None
    assert len(caught) == 1
    assert list(cache.iterdir()) == []


def test_a_source_that_is_not_there_is_misuse(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.cpp"):
        build.compile_library("x", [tmp_path / "none.cpp"], [])


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(
    cache: Path, source: Path, tmp_path: Path
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    private = tmp_path / f"kvstore-{os.geteuid()}"
    path = build.compile_library("x", [source], [])
    assert answer(path) == 42
    assert path is not None and path.parent == private
    assert list(cache.iterdir()) == []
    private.chmod(0o770)
    with pytest.warns(RuntimeWarning, match="XDG_CACHE_HOME"):
        assert build.compile_library("x", [source], []) is None


@needs_compiler
def test_a_cache_directory_that_is_a_link_is_not_used(
    cache: Path, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    path = build.compile_library("x", [source], [])
    assert path is not None and path.parent == tmp_path / f"kvstore-{os.geteuid()}"


@needs_compiler
@pytest.mark.parametrize("kind", ["writable", "link"])
def test_a_library_that_others_could_have_written_is_refused(
    cache: Path, source: Path, kind: str
) -> None:
    path = build.compile_library("x", [source], [])
    assert path is not None
    if kind == "writable":
        path.chmod(0o722)
    else:
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    with pytest.warns(RuntimeWarning, match="remove it"):
        assert build.compile_library("x", [source], []) is None


@needs_compiler
def test_processes_that_race_all_get_a_whole_library(cache: Path, source: Path) -> None:
    command = [sys.executable, "-c", RACES, str(source)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    for process in processes:  # Each says that it is ready, and only then all may start.
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    assert [process.communicate(timeout=60)[0] for process in processes] == [b"42\n"] * 4
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_the_cache_keeps_the_newest_libraries_of_a_name(cache: Path, source: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for age in range(12):
        for name in ("x", "y"):
            old = cache / f"{name}-{age:032x}.so"
            old.touch()
            os.utime(old, (1000 - age, 1000 - age))
    path = build.compile_library("x", [source], [])
    assert path is not None
    kept = {f"x-{age:032x}.so" for age in range(FILES_KEPT - 1)} | {path.name}
    assert {found.name for found in cache.glob("x-*")} == kept
    assert len(list(cache.glob("y-*"))) == 12


RACES = """
import ctypes, sys
from pathlib import Path
from kvstore.native import build, cache
print("ready", flush=True)
sys.stdin.read()
path = build.compile_library("x", [Path(sys.argv[1])], [])
print(ctypes.CDLL(str(path)).answer())
"""

LOADS = """
import sys, warnings
import numpy as np
from kvstore.hashing.checksum import run_checksums
from kvstore.native import build, cache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = [build.load() is not None for _ in range(2)]
one = np.array([3], np.int64)
print(found, len(caught), run_checksums(np.arange(9, dtype=np.uint8), one, one)[0])
"""


def loads_anew(**environment: str) -> str:
    command = [sys.executable, "-c", LOADS]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_without_a_compiler_it_warns_once_and_everything_works(tmp_path: Path) -> None:
    checksum = loads_anew(PATH=os.environ["PATH"], HOME=str(Path.home())).split()[-1]
    found = loads_anew(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert found == f"[False, False] 1 {checksum}"


@needs_compiler
@pytest.mark.slow
def test_a_cached_library_that_lost_its_bytes_is_made_anew(tmp_path: Path) -> None:
    settings = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path)}
    first = loads_anew(**settings)
    assert first.startswith("[True, True] 0 ")
    (library,) = (tmp_path / "kvstore").iterdir()
    os.truncate(library, 0)
    assert loads_anew(**settings) == first
    assert library.stat().st_size > 0
