"""What the store asks of a device: streams, events, memory, copies, launches. Two forms have it.

    CudaDevice  cuda_device.py: CuPy and the driver
    CpuDevice   cpu_device.py: the same in host memory, with a thread for every stream

Everything here is asynchronous: a call returns when the work is queued. Two pieces of work that
touch the same bytes, at least one of them writing, must be ordered: by one stream, by an event that
the later stream waits for, or by the host, which waits and then asks. Every call therefore says
what it touches; the checker in the tests holds every pair of calls against this rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

STREAMS_MAX = 64  # of one device


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that a piece of work touches. writes: it writes them; otherwise it only reads."""

    address: int
    size_bytes: int
    writes: bool


Spans = Callable[[], Sequence[Span]]


def no_spans() -> Sequence[Span]:
    """Of a kernel that touches nothing beyond its Buffers."""
    return ()


class DeviceError(RuntimeError):
    """The device or its driver failed. What was queued on it may not have happened."""


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether everything queued before it has happened; if so, the host may rely on it."""

    def wait(self) -> None:
        """Let the host wait for it. Raises DeviceError if the device failed meanwhile."""


class Stream(Protocol):
    """Work in order. `handle` is the driver's, 0 where there is none."""

    @property
    def handle(self) -> int: ...

    def record(self) -> Event:
        """The point that this stream has been given work up to."""

    def wait(self, event: Event) -> None:
        """What is queued from now on happens after the event. The host does not wait."""


class Buffer(Protocol):
    """Memory of a device, or of the host where the device reaches it at full speed."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

    def view(self) -> npt.NDArray[np.uint8]:
        """Pinned memory as the host sees it. Raises TypeError for a device's own memory."""

    def free(self) -> None:
        """Give it back. Nothing may be queued any more that touches it."""


class Device(Protocol):
    """One device. Thread-safe; calls on one stream are ordered as they are made."""

    @property
    def name(self) -> str:
        """For people and for the file of its calibration: model, and driver."""

    def stream(self, purpose: str) -> Stream:
        """The stream of a purpose ("compute", "load", "save"): always the same one."""

    def allocate(self, size_bytes: int) -> Buffer:
        """The device's own memory, uninitialised. Raises DeviceError when there is none left."""

    def allocate_pinned(self, size_bytes: int) -> Buffer:
        """Host memory that copies reach without a detour. Raises DeviceError likewise."""

    def register(self, address: int, size_bytes: int) -> None:
        """Make host memory that is there already such memory: page-lock it. Blocks."""

    def unregister(self, address: int) -> None:
        """End a registration, by its first address."""

    def copy(self, stream: Stream, targets: UInt64s, sources: UInt64s, sizes: UInt64s) -> None:
        """Queue copies of `sizes` bytes between addresses of this device or of pinned memory.

        None may be empty, and none may overlap another.
        """

    def launch(
        self,
        stream: Stream,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        spans: Spans = no_spans,
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel of kernel_table.KERNELS.

        arguments: in the table's order: Buffers, or addresses of memory that `spans` declares, and
        numbers. spans: says what it touches beyond the Buffers; only a checker asks.
        """
