"""A device in host memory: the same interface, a thread for every stream.

It moves bytes, with the same kernels' names for gather and scatter; attention and the like it has
only where a library of compiled kernels is given, as the tests do. `delay` is called before each
piece of work, so that a test may let work happen late, in any order that the streams allow.
"""

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.cuda.copy import RunTable, gather, scatter
from kvstore.cuda.device import STREAMS_MAX, DeviceError, Event, Spans, Stream, UInt64s, no_spans

Launcher = Callable[[str, Sequence[int], int, Sequence[Any], int], None]


class CpuEvent:
    """Set by the stream's thread when it gets there."""

    def __init__(self, device: "CpuDevice") -> None:
        self._device = device
        self.reached = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the stream has got there."""
        return self.reached.is_set()

    def wait(self) -> None:
        """Wait for it. Raises DeviceError if a piece of work failed before."""
        self.reached.wait()
        self._device.refuse_failed()


class CpuStream:
    """A queue and its thread."""

    handle = 0

    def __init__(self, device: "CpuDevice", purpose: str) -> None:
        self.purpose = purpose
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"kvstore-stream-{purpose}", daemon=True
        )
        self._thread.start()

    def record(self) -> CpuEvent:
        """The point that this stream has been given work up to."""
        event = CpuEvent(self._device)
        self._work.put(event.reached.set)
        return event

    def wait(self, event: Event) -> None:
        """What is queued from now on happens after the event."""
        assert isinstance(event, CpuEvent)
        self._work.put(lambda: void(event.reached.wait()))

    def add(self, work: Callable[[], None]) -> None:
        """Queue a piece of work."""
        self._device.refuse_failed()

        def late() -> None:
            self._device.delay(self.purpose)
            work()

        self._work.put(late)

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as failure:
                self._device.failure = self._device.failure or failure


class CpuBuffer:
    """Host memory. The device's own cannot be viewed, as on a GPU."""

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._pinned = pinned
        self._memory: npt.NDArray[np.uint8] = np.full(size_bytes, 0xCB, np.uint8)
        self.address = self._memory.ctypes.data

    def view(self) -> npt.NDArray[np.uint8]:
        """The memory, if it is pinned. Raises TypeError otherwise."""
        if not self._pinned:
            raise TypeError("the host cannot look into a device's memory; copy it first")
        return self._memory

    def free(self) -> None:
        """Let others find that it was given back."""
        self._memory[:] = 0xDD


class CpuDevice:
    """See device.Device. delay: called with a stream's purpose before each piece of its work."""

    name = "cpu"

    def __init__(
        self, *, delay: Callable[[str], None] | None = None, launcher: Launcher | None = None
    ) -> None:
        self.delay = delay or void
        self.failure: Exception | None = None
        self._launcher = launcher
        self._streams: dict[str, CpuStream] = {}
        self._lock = threading.Lock()

    def stream(self, purpose: str) -> CpuStream:
        """The stream of a purpose, always the same one."""
        with self._lock:
            if purpose not in self._streams:
                if len(self._streams) >= STREAMS_MAX:
                    raise DeviceError(f"a device has at most {STREAMS_MAX} streams")
                self._streams[purpose] = CpuStream(self, purpose)
            return self._streams[purpose]

    def allocate(self, size_bytes: int) -> CpuBuffer:
        """Memory that the host is not to look into."""
        return CpuBuffer(size_bytes, pinned=False)

    def allocate_pinned(self, size_bytes: int) -> CpuBuffer:
        """Memory that it may look into."""
        return CpuBuffer(size_bytes, pinned=True)

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to do: all memory is the host's."""

    def unregister(self, address: int) -> None:
        """Likewise."""

    def copy(self, stream: Stream, targets: UInt64s, sources: UInt64s, sizes: UInt64s) -> None:
        """Queue copies, which happen in the order given."""
        assert isinstance(stream, CpuStream)
        todo = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def copy_all() -> None:
            for target, source, size in todo:
                ctypes.memmove(target, source, size)

        stream.add(copy_all)

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
        """Queue a kernel: gather_pages and scatter_pages, or what the launcher has."""
        assert isinstance(stream, CpuStream)
        given = [value.address if hasattr(value, "address") else value for value in arguments]
        if self._launcher is not None:
            launcher = self._launcher
            stream.add(lambda: launcher(kernel, grid, threads, given, shared_bytes))
        elif kernel in ("gather_pages", "scatter_pages"):
            stream.add(lambda: _copy_pages(kernel, given))
        else:
            raise DeviceError(f"this device has no kernel {kernel}; give it a launcher")

    def refuse_failed(self) -> None:
        """Raise DeviceError once a piece of work has failed: as on a GPU, nothing works after."""
        if self.failure is not None:
            raise DeviceError(f"the device failed: {self.failure}") from self.failure

    def close(self) -> None:
        """Finish all queues and end their threads."""
        for stream in self._streams.values():
            stream.close()


def void(*_: object) -> None:
    """Nothing."""


def _copy_pages(kernel: str, arguments: Sequence[Any]) -> None:
    """gather_pages or scatter_pages by the host's own copies: see page_copy.cu."""
    runs_at, _, pages_at, payloads_at, _, count, per_block, first, last, pool, skip = arguments
    runs = _array(runs_at, np.int64, last * 6).reshape(-1, 6)
    base, page_stride, rows, row_bytes, row_stride, offset = (
        np.ascontiguousarray(runs[:, column]) for column in range(6)
    )
    pages = _array(pages_at, np.int32, count * per_block).reshape(count, per_block)
    payloads = _array(payloads_at, np.uint64, count).copy()
    for nth in range(per_block):
        table = RunTable(
            base=base.view(np.uint64),
            page_stride=page_stride,
            rows=rows,
            row_bytes=row_bytes,
            row_stride=row_stride,
            payload_offset=offset + nth * rows * row_bytes,
            pages=pool,
        )
        some = slice(1, None) if nth < skip else slice(None)
        ids = np.ascontiguousarray(pages[some, nth : nth + 1].astype(np.int64))
        if kernel == "scatter_pages":
            scatter(table, ids, np.ascontiguousarray(payloads[some]), first, last)
        elif first == 0:
            gather(table, ids, np.ascontiguousarray(payloads[some]), None)
        else:
            raise DeviceError("a gather on this device starts with the first run")


def _array(address: int, dtype: Any, count: int) -> npt.NDArray[Any]:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)
