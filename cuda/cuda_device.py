"""A CUDA device: streams, events and pinned memory of CuPy, kernels compiled by NVRTC.

Needs kvstore[cuda12] or kvstore[cuda13]. torch's tensors and CuPy's arrays are both only addresses
here: nothing is copied between the two, and neither is imported by the store.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.cuda import nvrtc
from kvstore.cuda.batch_copy import copy_batch, find_entry
from kvstore.cuda.device import (
    STREAMS_MAX,
    DeviceError,
    Event,
    Spans,
    Stream,
    UInt64s,
    no_spans,
)
from kvstore.cuda.kernel_table import KERNELS, Kind

STATIC_SHARED_MAX = 48 << 10  # More must be asked for.
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ANY_DIRECTION = 4  # cudaMemcpyDefault: the driver knows what an address is.
PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
SAME_ADDRESS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
NOT_READY = 600  # cudaErrorNotReady
DTYPES = {Kind.POINTER: np.uint64, Kind.INT: np.int32, Kind.LONG: np.int64, Kind.FLOAT: np.float32}


def load_cupy() -> Any:
    """CuPy, or DeviceError with what to install."""
    try:
        import cupy  # noqa: PLC0415  Only who asks for a CUDA device needs it.
    except ImportError:
        raise DeviceError("CuPy is not installed; install kvstore[cuda13] or [cuda12]") from None
    return cupy


@contextmanager
def checked() -> Iterator[None]:
    """What CuPy says of its driver becomes a DeviceError."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("cupy", "cupy_backends"):
            raise DeviceError(f"{type(error).__name__}: {error}") from error
        raise


class CudaEvent:
    """A point in a stream, without a time."""

    def __init__(self, cuda: Any, event: Any) -> None:
        self.event = event
        self._query = cuda.runtime.eventQuery

    @property
    def done(self) -> bool:
        """Whether the device has got there. Raises DeviceError if it failed."""
        with checked():
            status = self._query(self.event.ptr)
        if status not in (0, NOT_READY):
            raise DeviceError(f"the device failed: error {status}")
        return bool(status == 0)

    def wait(self) -> None:
        """Let the host wait for it, without the interpreter's lock."""
        with checked():
            self.event.synchronize()


class ForeignStream:
    """Somebody else's stream by its handle: CuPy asks a stream for nothing but `ptr`."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class CudaStream:
    """A stream of CuPy's, or somebody else's by its handle."""

    def __init__(self, cupy: Any, handle: int | None = None) -> None:
        self._cuda = cupy.cuda
        with checked():
            own = handle is None
            self.stream = cupy.cuda.Stream(non_blocking=True) if own else ForeignStream(handle or 0)

    @property
    def handle(self) -> int:
        """cudaStream_t."""
        return int(self.stream.ptr)

    def record(self) -> CudaEvent:
        """The point that this stream has been given work up to."""
        with checked():
            event = self._cuda.Event(disable_timing=True)
            event.record(self.stream)
        return CudaEvent(self._cuda, event)

    def wait(self, event: Event) -> None:
        """What is queued from now on happens after the event."""
        assert isinstance(event, CudaEvent)
        with checked():
            self._cuda.runtime.streamWaitEvent(self.handle, event.event.ptr)


class CudaBuffer:
    """Device memory, or pinned host memory, by itself: not from a pool that others draw from."""

    def __init__(self, memory: Any, address: int, size_bytes: int, pinned: bool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._memory = memory
        self._pinned = pinned

    def view(self) -> npt.NDArray[np.uint8]:
        """Pinned memory as the host sees it. Raises TypeError for device memory."""
        if not self._pinned:
            raise TypeError("the host cannot look into a device's memory; copy it first")
        memory = (ctypes.c_uint8 * self.size_bytes).from_address(self.address)
        return np.ndarray((self.size_bytes,), np.uint8, memoryview(memory))

    def free(self) -> None:
        """Give it back."""
        self._memory = None


class CudaDevice:
    """See device.Device.

    compute: the handle of the stream that the engine computes on, which its pages are ordered by.
    """

    def __init__(self, ordinal: int = 0, *, compute: int | None = None) -> None:
        self._cupy = load_cupy()
        self._ordinal = ordinal
        with checked():
            self._cupy.cuda.Device(ordinal).use()
            properties = self._cupy.cuda.runtime.getDeviceProperties(ordinal)
            version = self._cupy.cuda.runtime.driverGetVersion()
        self.architecture = int(properties["major"]) * 10 + int(properties["minor"])
        self.processors = int(properties["multiProcessorCount"])
        same = self._cupy.cuda.runtime.deviceGetAttribute(SAME_ADDRESS, ordinal)
        self._same_address = bool(same)
        self.name = f"{properties['name'].decode()} driver {version}"
        self._batch = find_entry(ctypes.CDLL("libcuda.so.1"))
        self._lock = threading.Lock()
        self._streams: dict[str, CudaStream] = {}
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        if compute is not None:
            self._streams["compute"] = CudaStream(self._cupy, compute)

    def stream(self, purpose: str) -> CudaStream:
        """The stream of a purpose, always the same one."""
        with self._lock:
            if purpose not in self._streams:
                if len(self._streams) >= STREAMS_MAX:
                    raise DeviceError(f"a device has at most {STREAMS_MAX} streams")
                self.use()
                self._streams[purpose] = CudaStream(self._cupy)
            return self._streams[purpose]

    def use(self) -> None:
        """Make it this thread's device: once in every thread that calls it."""
        with checked():
            self._cupy.cuda.Device(self._ordinal).use()

    def allocate(self, size_bytes: int) -> CudaBuffer:
        """Device memory by cudaMalloc."""
        self.use()
        with checked():
            memory = self._cupy.cuda.Memory(size_bytes)
        return CudaBuffer(memory, int(memory.ptr), size_bytes, pinned=False)

    def allocate_pinned(self, size_bytes: int) -> CudaBuffer:
        """Host memory by cudaHostAlloc."""
        self.use()
        with checked():
            memory = self._cupy.cuda.PinnedMemory(size_bytes)
        return CudaBuffer(memory, int(memory.ptr), size_bytes, pinned=True)

    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock memory that is there already."""
        if not self._same_address:  # Kernels are given the host's addresses.
            raise DeviceError("this device gives page-locked memory another address")
        self.use()
        with checked():
            self._cupy.cuda.runtime.hostRegister(address, size_bytes, PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        """End it."""
        self.use()
        with checked():
            self._cupy.cuda.runtime.hostUnregister(address)

    def copy(self, stream: Stream, targets: UInt64s, sources: UInt64s, sizes: UInt64s) -> None:
        """One call of the driver, or, before CUDA 12.8, one for each copy."""
        self.use()  # A batch is the driver's own call: it takes the thread's context as it is.
        if self._batch is not None and len(sizes) > 1:
            copy_batch(self._batch, targets, sources, sizes, stream.handle)
            return
        copy_one = self._cupy.cuda.runtime.memcpyAsync
        with checked():
            for target, source, size in zip(
                targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
            ):
                copy_one(target, source, size, ANY_DIRECTION, stream.handle)

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
        """Queue a kernel; compiled and loaded when it is first asked for."""
        assert isinstance(stream, CudaStream)
        parameters = KERNELS[kernel].parameters
        given = tuple(
            # Never a bare number: CuPy would choose its size.
            DTYPES[parameter.kind](getattr(value, "address", value))
            for parameter, value in zip(parameters, arguments, strict=True)
        )
        self.use()
        function = self._function(kernel, shared_bytes)
        with checked():
            size = (*grid, 1, 1)[:3]
            function(size, (threads, 1, 1), given, shared_mem=shared_bytes, stream=stream.stream)

    # --- inside

    def _function(self, kernel: str, shared_bytes: int) -> Any:
        with self._lock:
            if kernel not in self._functions:
                self._functions[kernel] = self._load(kernel)
            function = self._functions[kernel]
        if shared_bytes > STATIC_SHARED_MAX:
            with checked():
                self._cupy.cuda.driver.funcSetAttribute(
                    function.ptr, MAX_DYNAMIC_SHARED, shared_bytes
                )
        return function

    def _load(self, kernel: str) -> Any:
        source, last = KERNELS[kernel].source, kernel.rpartition("_")[2]
        # Attention is compiled for one head_dim at a time: all of them take many seconds.
        definitions = [f"KV_HEAD_DIM={last}"] if kernel.startswith("decode_") else []
        key = " ".join([source, *definitions])
        if key not in self._modules:
            compiled = nvrtc.compile_source(source, self.architecture, definitions)
            with checked():
                module = self._cupy.cuda.function.Module()
                module.load(compiled.cubin)
            self._modules[key] = module
        with checked():
            return self._modules[key].get_function(kernel)
