"""Every kernel compiles for three architectures, without a warning or a spill, and is then kept."""

from pathlib import Path

import pytest

from bench.kernel_resources import TABLE, table
from kvstore.cuda import nvrtc
from kvstore.cuda.kernel_table import SOURCES
from kvstore.cuda.nvrtc import CompileError

KERNEL = 'extern "C" __global__ void k(int* p) { %s }\n'


@pytest.mark.slow
def test_the_committed_table_is_what_the_compiler_says() -> None:
    # After a change of a kernel: python -m bench.kernel_resources --write
    assert table() == TABLE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_nvcc_without_an_architecture_takes_the_source(source: str) -> None:
    """nvcc 13 means sm_75 then: the source must compile there, though it will not run."""
    includes = nvrtc._includes(nvrtc.FOLDER)
    options = ["-arch=sm_75", "-std=c++17", "-DKV_HEAD_DIM=64", *includes]
    made = nvrtc._compile(nvrtc._library(), nvrtc.FOLDER / source, options)
    assert made.cubin[:4] == b"\x7fELF"


def test_an_old_gpu_and_a_wrong_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="sm_75 is too old"):
        nvrtc.compile_source("page_copy.cu", 75)
    (tmp_path / "x.cu").write_text(KERNEL % "this is not C")
    with pytest.raises(CompileError, match=r"x\.cu does not compile with -arch=sm_90"):
        nvrtc.compile_source("x.cu", 90, folder=tmp_path)


def test_compiled_code_is_kept_and_a_change_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.cu").write_text(KERNEL % "*p = 1;")
    first = nvrtc.compile_source("x.cu", 90, folder=tmp_path)
    with monkeypatch.context() as none:
        none.setattr(nvrtc, "_compile", None)  # Nobody may compile it again.
        assert nvrtc.compile_source("x.cu", 90, folder=tmp_path) == first
    assert nvrtc.resources(first.log)["k"].spill_bytes == 0
    (tmp_path / "x.cu").write_text(KERNEL % "*p = 2;")
    assert nvrtc.compile_source("x.cu", 90, folder=tmp_path).cubin != first.cubin
    assert nvrtc.compile_source("x.cu", 80, folder=tmp_path).cubin != first.cubin
