"""Where the steps run: a CUDA device, or its twin on the CPU with tiny sizes."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore.space
from kvstore.cuda.calibration import Calibration
from kvstore.cuda.device import Buffer, Device, Stream
from kvstore.runtime.compute import Compute, open_cuda

MIB = 1 << 20


class Place:
    """One process's device. Made once; steps take from it what they need."""

    def __init__(self, twin: bool) -> None:
        self.twin = twin
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-gpu-"))
        self.kept: dict[str, Any] = {}  # what one step made and a later one uses
        if twin:
            from support.device_llama import host_compute, shim_device  # noqa: PLC0415

            torch.set_num_threads(1)
            self.compute: Compute = host_compute(shim_device())
            # What the twin would measure for seconds means nothing.
            kvstore.space.calibration_of = lambda device: Calibration(device.name)  # type: ignore[assignment, misc]
        else:
            self.compute = open_cuda()

    @property
    def device(self) -> Device:
        """The store's device; its stream "compute" is torch's."""
        return self.compute.device

    def pick(self, full: Any, tiny: Any) -> Any:
        """A size for the device, or for the twin."""
        return tiny if self.twin else full

    def seconds(self, stream: Stream, queue: Callable[[], None], rounds: int = 5) -> float:
        """The shortest time from queueing to the end, of some rounds after one that warms up."""
        best = float("inf")
        for number in range(self.pick(rounds, 1) + 1):
            began = time.perf_counter()
            queue()
            stream.record().wait()
            if number:
                best = min(best, time.perf_counter() - began)
        return max(best, 1e-9)


def one(value: int) -> Any:
    """A number as an array of addresses or sizes."""
    return np.array([value], np.uint64)


def upload(device: Device, target: int, data: np.ndarray[Any, Any]) -> None:
    """Copy an array to the device and wait."""
    with_buffer(device, data.nbytes, lambda b: _up(device, target, data, b))


def download(device: Device, source: int, size_bytes: int) -> np.ndarray[Any, Any]:
    """Bytes from the device: uint8 [size_bytes]."""
    found = np.zeros(size_bytes, np.uint8)

    def down(buffer: Buffer) -> None:
        stream = device.stream("setup")
        device.copy(stream, one(buffer.address), one(source), one(size_bytes))
        stream.record().wait()
        found[:] = buffer.view()

    with_buffer(device, size_bytes, down)
    return found


def with_buffer(device: Device, size_bytes: int, work: Callable[[Buffer], None]) -> None:
    """Run `work` with pinned memory, which is freed afterwards."""
    buffer = device.allocate_pinned(size_bytes)
    try:
        work(buffer)
    finally:
        buffer.free()


def _up(device: Device, target: int, data: np.ndarray[Any, Any], buffer: Buffer) -> None:
    stream = device.stream("setup")
    buffer.view()[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    device.copy(stream, one(target), one(buffer.address), one(data.nbytes))
    stream.record().wait()
