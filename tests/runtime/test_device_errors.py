"""A device that is not there is refused in one sentence that says what to do; nobody else needs
what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvstore.cli.main import app
from kvstore.cuda.device import DeviceError
from kvstore.runtime.api import Runtime
from kvstore.runtime.compute import open_device
from kvstore.tiers.errors import ConfigError
from support.tiny_llama import write_model


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, whatever this one has."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def refusal(device: str) -> str:
    with pytest.raises(ConfigError) as caught:
        open_device(device)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_is_missing_is_named(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch built for CUDA" in refusal("cuda") and "kvstore[cuda13]" in refusal("cuda")
    assert "cpu or cuda" in refusal("tpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "NVIDIA GPU" in refusal("cuda")


def test_a_missing_cupy_is_named(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class Stream:
        cuda_stream = 7

        def __init__(self, ordinal: int) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "CuPy is not installed; install kvstore[cuda13]" in refusal("cuda")


def test_a_driver_that_fails_is_told(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda ordinal: torch)  # never looked at
    monkeypatch.setattr(torch, "cuda_stream", 7, raising=False)

    def broken(ordinal: int, compute: int) -> None:
        raise DeviceError("the driver is too old")

    monkeypatch.setattr("kvstore.cuda.cuda_device.CudaDevice", broken)
    assert "the driver is too old" in refusal("cuda")


def test_the_runtime_and_its_commands_refuse_too(no_gpu: None, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="built for CUDA"):
        Runtime.load(model, device="cuda")
    with pytest.raises(ConfigError, match="use float32 or bfloat16"):
        Runtime.load(model, dtype="float16")
    (tmp_path / "prompt").write_text("x")
    options = ["--model", str(model), "--prompt-file", str(tmp_path / "prompt")]
    options += ["--store", str(tmp_path / "store"), "--device", "cuda"]
    done = CliRunner().invoke(app, ["generate", *options])
    assert done.exit_code != 0
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_the_cpu_runtime_asks_for_no_cuda() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None; import kvstore, kvstore.runtime.api;"
        "assert 'kvstore.cuda.cuda_device' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
