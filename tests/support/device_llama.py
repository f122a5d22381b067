"""The runtime's device path on this CPU: the kernels' own source through the shim, torch in host
memory, and streams that may be late."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.cuda.cpu_device import CpuDevice
from kvstore.cuda.device import Device
from kvstore.runtime.compute import Compute
from kvstore.runtime.models.config import ModelConfig
from kvstore.runtime.models.device_llama import DeviceLlama
from kvstore.runtime.pages import PagePool
from kvstore.runtime.weights import open_checkpoint
from support import cuda_shim
from support.cuda_shim import Kernels

_lock = threading.Lock()  # the shim runs one launch at a time
_kernels: list[Kernels] = []


def shim_launcher(
    kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared_bytes: int
) -> None:
    """Run a kernel of the shim's plain library, built once."""
    with _lock:
        if not _kernels:
            _kernels.append(Kernels(cuda_shim.build()))
        _kernels[0].launch(kernel, grid, threads, arguments, shared_bytes=shared_bytes)


def shim_device(delay: Callable[[str], None] | None = None) -> CpuDevice:
    """A device in host memory that has all kernels."""
    return CpuDevice(delay=delay, launcher=shim_launcher)


def host_compute(device: Device) -> Compute:
    """torch in host memory beside a device in host memory."""
    return Compute(device, torch.device("cpu"))


def device_llama(
    path: Path, compute: Compute, dtype: torch.dtype = torch.float32, *, graphs: bool = True
) -> DeviceLlama:
    return DeviceLlama(open_checkpoint(path), dtype, compute, graphs=graphs)


def pool_for(
    config: ModelConfig, compute: Compute, pages: int, dtype: torch.dtype, page_tokens: int = 16
) -> PagePool:
    return PagePool(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        pages=pages,
        page_tokens=page_tokens,
        dtype=dtype,
        compute=compute,
    )
