"""Where a model computes: a torch device and one of the store's devices, on one stream.

torch's work and the store's kernels follow each other on that stream, so nothing is waited for
between them. In host memory torch computes at once and in the calling thread; there every launch is
waited for, and the same code runs in the tests.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore.cuda.device import Buffer, Device, DeviceError, Spans, no_spans
from kvstore.tiers.errors import ConfigError

PROCESSORS = 16  # of a device that does not say how many it has


class Compute:
    """One device of torch and of the store. Belongs to the engine's thread.

    device: the store's; its stream "compute" must be `torch_stream`.  tensors: where torch keeps
    its tensors.  torch_stream: None for tensors in host memory.
    """

    def __init__(
        self,
        device: Device,
        tensors: torch.device,
        torch_stream: "torch.cuda.Stream | None" = None,
        processors: int = PROCESSORS,
    ) -> None:
        self.device = device
        self.tensors = tensors
        self.processors = processors
        self.stream = device.stream("compute")
        self._torch_stream = torch_stream
        self._graph_memory: Any = None  # shared by all graphs: none runs beside another

    def active(self) -> AbstractContextManager[Any]:
        """As a context: what torch is asked for goes to the stream, with its memory."""
        if self._torch_stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._torch_stream)

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        spans: Spans = no_spans,
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Queue one of the store's kernels between torch's work. Tensors go by their address."""
        given = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        self.device.launch(
            self.stream, kernel, grid, threads, given, spans, shared_bytes=shared_bytes
        )
        self._meet()

    def upload(self, target: Tensor, source: Buffer) -> None:
        """Queue a copy from pinned memory to a tensor of the same size."""
        to, at, size = (
            np.array([number], np.uint64)
            for number in (target.data_ptr(), source.address, target.nbytes)
        )
        self.device.copy(self.stream, to, at, size)
        self._meet()

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A graph of what `work` queues; calling it does all of that again, on the same memory.

        `work` runs once before, so that code is loaded and workspaces are made. Where there are no
        graphs it is given back as it is.
        """
        if self._torch_stream is None:
            return work
        work()
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the store's threads go on allocating and waiting meanwhile.
        with torch.cuda.graph(
            graph,
            pool=self._graph_memory,
            stream=self._torch_stream,
            capture_error_mode="thread_local",
        ):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    def _meet(self) -> None:
        """Where torch does not follow the stream by itself, it waits for it."""
        if self._torch_stream is None:
            self.stream.record().wait()


def open_device(name: str) -> Compute | None:
    """What to compute on, by its name: "cuda", or "cpu" for None.

    Raises ConfigError, with what to install, where there is none.
    """
    if name == "cpu":
        return None
    if name != "cuda":
        raise ConfigError(f"device is {name!r}; use cpu or cuda")
    return open_cuda()


def open_cuda() -> Compute:
    """The current CUDA device. Raises ConfigError, with what to install, where there is none."""
    if torch.version.cuda is None:
        raise ConfigError(
            'device="cuda" needs a torch built for CUDA, and this one is not; '
            "install torch from its CUDA packages, and kvstore[cuda13] or kvstore[cuda12]"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            'device="cuda" needs an NVIDIA GPU and its driver, and torch finds none; '
            "install the driver, or use the CPU"
        )
    from kvstore.cuda import nvrtc  # noqa: PLC0415  These need what only some have.
    from kvstore.cuda.cuda_device import CudaDevice  # noqa: PLC0415

    ordinal = torch.cuda.current_device()
    # A stream of its own: neither graphs nor batches of copies go to the default one.
    stream = torch.cuda.Stream(ordinal)  # type: ignore[no-untyped-call]
    try:
        device = CudaDevice(ordinal, compute=stream.cuda_stream)
        # The smallest kernel, so that a missing compiler is found now and not in a step.
        nvrtc.compile_source("rope_write.cu", device.architecture)
    except (DeviceError, nvrtc.CompileError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f'device="cuda" cannot be used: {reason}') from None
    return Compute(device, torch.device("cuda", ordinal), stream, device.processors)
