"""Where the bytes of an array are, for compiled code."""

import ctypes
from typing import Any

import numpy.typing as npt


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's first byte: several times as fast as its attribute `ctypes`.

    The array must outlive the use of it.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError, BufferError):  # It is read-only, empty, or not contiguous.
        address: int = array.__array_interface__["data"][0]
        return address
