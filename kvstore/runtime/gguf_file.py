"""Reads a GGUF file: its metadata and its tensors, dequantised to float32.

The metadata is parsed here and not by the gguf package: a file is untrusted input, so every length
is checked against the bytes that are left, and parsing 100,000 strings takes 0.1 s instead of 4 s.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvstore.tiers.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MIN = 24
ENTRIES_MAX = 1 << 20
DIMENSIONS_MAX = 4
ARRAY_DEPTH_MAX = 2

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `shape` rows first, `offset` in bytes from the file's start."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    size_bytes: int


class _Cursor:
    """Walks a header; raises ValueError instead of reading past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        end = self.at + layout.size
        if end > len(self.data):
            raise ValueError("ends inside its header")
        (value,) = layout.unpack_from(self.data, self.at)
        self.at = end
        return value

    def count(self) -> int:
        value: int = self.number("Q")
        if value > len(self.data) - self.at:
            raise ValueError("claims more entries than it has bytes")
        return value

    def numbers(self, code: str, count: int) -> list[object]:
        layout = struct.Struct(f"<{count}{code}")
        end = self.at + layout.size
        if end > len(self.data):
            raise ValueError("ends inside its header")
        values = list(layout.unpack_from(self.data, self.at))
        self.at = end
        return values

    def text(self) -> str:
        length = self.count()
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            if depth >= ARRAY_DEPTH_MAX:
                raise ValueError("nests arrays too deeply")
            item, count = self.number("I"), self.count()
            if item in _NUMBERS:
                return self.numbers(_NUMBERS[item], count)
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"has a value of unknown type {kind}")
        return self.number(_NUMBERS[kind])


class GgufFile:
    """One opened GGUF file. Reads tensors on demand; never keeps them.

    `metadata` maps each key to a number, a string or a list; `tensors` maps a tensor's name to its
    TensorEntry. Raises ConfigError for a file that is not GGUF, is cut short, or lies.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < HEADER_BYTES_MIN:
                    raise ValueError("is not a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as header:
                    self._parse(header, size)
        except OSError as error:
            raise ConfigError(f"Cannot read model file {path}: {error.strerror}.") from error
        except (ValueError, struct.error) as error:
            raise ConfigError(f"Model file {path} {error}; fetch it again.") from error

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, rows first, dequantised.

        Raises KeyError for an unknown name, ConfigError for a file that changed in the meantime.
        """
        entry = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.size_bytes)
        if len(data) != entry.size_bytes:
            raise ConfigError(f"Model file {self.path} is shorter than before; fetch it again.")
        if entry.quantization == GGMLQuantizationType.F32:
            return np.frombuffer(data, np.float32).reshape(entry.shape).copy()
        if entry.quantization == GGMLQuantizationType.F16:
            return np.frombuffer(data, np.float16).reshape(entry.shape).astype(np.float32)
        block, block_bytes = GGML_QUANT_SIZES[entry.quantization]
        row_bytes = entry.shape[-1] // block * block_bytes
        rows = np.frombuffer(data, np.uint8).reshape(*entry.shape[:-1], row_bytes)
        values: NDArray[np.float32] = dequantize(rows, entry.quantization)
        return np.ascontiguousarray(values, np.float32).reshape(entry.shape)

    def _parse(self, header: mmap.mmap, file_bytes: int) -> None:
        cursor = _Cursor(header)
        if header[:4] != MAGIC:
            raise ValueError("is not a GGUF file")
        cursor.at = 4
        version = cursor.number("I")
        if version not in VERSIONS:
            raise ValueError(f"has GGUF version {version}, not 2 or 3")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        if max(tensors, entries) > ENTRIES_MAX:
            raise ValueError("claims too many entries")
        for _ in range(entries):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number("I"))
        table = [self._table_row(cursor) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("has an impossible alignment")
        start = -(-cursor.at // alignment) * alignment
        for name, shape, quantization, offset in table:
            size = _size_bytes(shape, quantization)
            if start + offset + size > file_bytes:
                raise ValueError("is cut short")
            self.tensors[name] = TensorEntry(shape, quantization, start + offset, size)

    @staticmethod
    def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = cursor.text(), cursor.number("I")
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise ValueError("has a tensor with an impossible number of dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        return name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")


def _size_bytes(shape: tuple[int, ...], quantization: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block:
        raise ValueError("has a row that is no whole number of quantisation blocks")
    return math.prod(shape) // block * block_bytes
