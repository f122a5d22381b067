"""Runs the kernels' cases on a device that has memory of its own: arrays go there and come back."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.cuda.device import Buffer, Device

Array = np.ndarray[Any, Any]


def one(value: int) -> Any:
    return np.array([value], np.uint64)


class DeviceLauncher:
    """Implements the cases' Device over one of kvstore.cuda's. Each array has an allocation of its
    own, so that a sanitizer sees what lies beyond it. A view travels with the array that it is of.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.stream("compute")
        self._there: dict[int, tuple[Array, Buffer]] = {}

    def place(self, array: Array) -> int:
        """Copy an array there, unless it is; its address there."""
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        start = int(whole.ctypes.data)
        if start not in self._there:
            buffer = self.device.allocate(max(whole.nbytes, 1))
            self._there[start] = whole, buffer
            self._move(whole, buffer, back=False)
        return self._there[start][1].address + int(array.ctypes.data) - start

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end. `seed` is for devices that order threads by one."""
        given = [self.place(a) if isinstance(a, np.ndarray) else a for a in arguments]
        try:
            self.device.launch(self.stream, name, grid, threads, given, shared_bytes=shared_bytes)
            self.stream.record().wait()
            for array, buffer in self._there.values():
                self._move(array, buffer, back=True)
        finally:
            for _, buffer in self._there.values():
                buffer.free()
            self._there.clear()

    def _move(self, array: Array, buffer: Buffer, *, back: bool) -> None:
        if not array.nbytes:
            return
        pinned = self.device.allocate_pinned(array.nbytes)
        assert array.flags.forc, "an array that is not in one piece"
        raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        memory = np.ndarray((array.nbytes,), np.uint8, memoryview(raw))
        if not back:
            pinned.view()[:] = memory
        ends = (pinned.address, buffer.address) if back else (buffer.address, pinned.address)
        self.device.copy(self.stream, one(ends[0]), one(ends[1]), one(array.nbytes))
        self.stream.record().wait()
        if back:
            memory[:] = pinned.view()
        pinned.free()
