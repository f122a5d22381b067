"""Many copies in one call of the driver: cuMemcpyBatchAsync, from CUDA 12.8 on.

Addresses go to the driver as the arrays they are; no object is made for each copy. The entry point
is asked for by its version of 12.8, so CUDA 12 and 13 are called in one way.
Source: CUDA Driver API, cuMemcpyBatchAsync, cuGetProcAddress.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.cuda.device import DeviceError, UInt64s

VERSION = 12080
IN_STREAM_ORDER = 1  # The source may still be written by what the stream did before.
OVERLAP_WITH_COMPUTE = 1
COPIES_MAX = 1 << 16  # in one call
DEFAULT_STREAMS = (0, 1, 2)  # The driver takes no batch on these.

Entry = Callable[..., int]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """struct CUmemcpyAttributes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


def find_entry(driver: ctypes.CDLL) -> Entry | None:
    """The driver's entry point; None where the driver is older than 12.8."""
    found = ctypes.c_void_p()
    status = ctypes.c_int()
    try:
        ask = driver.cuGetProcAddress_v2
    except AttributeError:
        return None
    failed = ask(
        b"cuMemcpyBatchAsync",
        ctypes.byref(found),
        ctypes.c_int(VERSION),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if failed or not found.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind: Any = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    entry: Entry = kind(found.value)
    return entry


def copy_batch(
    entry: Entry, targets: UInt64s, sources: UInt64s, sizes: UInt64s, stream: int
) -> None:
    """Queue all copies. Raises ValueError for misuse, DeviceError with the place that failed."""
    if stream in DEFAULT_STREAMS:
        raise ValueError("the default stream takes no batch; use a stream of its own")
    if not len(sizes) or not sizes.all():
        raise ValueError("a batch has at least one copy, and no copy is empty")
    attributes = _Attributes(order=IN_STREAM_ORDER, flags=OVERLAP_WITH_COMPUTE)
    for first in range(0, len(sizes), COPIES_MAX):
        part = [
            np.ascontiguousarray(column[first : first + COPIES_MAX], np.uint64)
            for column in (targets, sources, sizes)
        ]
        begins, bad = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = entry(
            *(column.ctypes.data for column in part),
            len(part[0]),
            ctypes.addressof(attributes),
            ctypes.addressof(begins),
            1,
            ctypes.addressof(bad),
            stream,
        )
        if code:
            raise DeviceError(f"a batch of copies failed at {first + bad.value}: error {code}")
