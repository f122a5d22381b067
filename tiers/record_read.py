"""Read a record and check it: one call into the compiled helper, or the same steps in Python.

The call holds no lock of the interpreter from the read to the last checksum, so threads that read
do not wait for each other.
"""

import ctypes
import errno

import numpy as np

from kvstore.hashing.checksum import verify_runs
from kvstore.native import build
from kvstore.tiers.disk_outcomes import BadRun, IoFault
from kvstore.tiers.failpoints import planted
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import (
    CHECKSUM_AT,
    FIXED_BYTES,
    HEADER,
    MAGIC,
    VERSION,
    HeaderFault,
    RecordFormat,
)

READS_MAX = 2  # A failed read is tried once more.
SHORT, BAD_HEADER, BAD_RUN = 1, 2, 16  # As in kvstore/native/io.cpp.
SAME_IN_ALL = ("magic", "version", "header_bytes", "payload_bytes", "block_tokens", "runs")


class _Shape(ctypes.Structure):
    """struct RecordShape of kvstore/native/io.cpp."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("header_bytes", ctypes.c_int64),
        ("header_checksum_at", ctypes.c_int64),
        ("checksums_at", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("run_offsets", ctypes.c_void_p),
        ("run_lengths", ctypes.c_void_p),
        ("fixed", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("fixed_bytes", ctypes.c_int64),
    )


class RecordCheck:
    """What the records of one layout must be. Make one for a layout and keep it; immutable."""

    def __init__(self, layout: Layout) -> None:
        self.record = RecordFormat.of(layout)
        self.run_offsets = np.ascontiguousarray(layout.run_offsets)
        self.run_lengths = np.ascontiguousarray(layout.run_lengths)
        wanted = np.zeros(1, HEADER)
        wanted["magic"], wanted["version"] = MAGIC, VERSION
        wanted["header_bytes"] = self.record.header_bytes
        wanted["payload_bytes"] = self.record.payload_bytes
        wanted["block_tokens"], wanted["runs"] = self.record.block_tokens, self.record.runs
        self._fixed = wanted.view(np.uint8)
        self._mask = np.zeros(FIXED_BYTES, np.uint8)
        for name in SAME_IN_ALL:
            dtype, at = HEADER.fields[name][:2]  # type: ignore[index]
            self._mask[at : at + dtype.itemsize] = 0xFF
        self._shape = _Shape(
            self.record.slot_bytes,
            self.record.header_bytes,
            CHECKSUM_AT,
            self.record.checksums_at,
            self.record.runs,
            self.run_offsets.ctypes.data,
            self.run_lengths.ctypes.data,
            self._fixed.ctypes.data,
            self._mask.ctypes.data,
            FIXED_BYTES,
        )
        self.shape = ctypes.byref(self._shape)


def read_record(
    io: FileIo, fd: int, offset: int, buffer: memoryview, check: RecordCheck
) -> IoFault | HeaderFault | BadRun | None:
    """Read slot_bytes at `offset` into `buffer`, page-aligned, and check header and all runs.

    What the header says of identity (key, tokens) is for the caller to compare. The buffer holds
    whatever was read, also after a fault. Raises ValueError for a buffer of another size.

    Returns: None | IoFault | HeaderFault (MAGIC, VERSION, CHECKSUM, LENGTH) | BadRun.
    """
    if len(buffer) != check.record.slot_bytes:
        raise ValueError(f"a record of this layout has {check.record.slot_bytes} bytes")
    library = build.load() if io.plain and not planted("skip_checksum") else None
    fault: IoFault | HeaderFault | BadRun | None = None
    for _ in range(READS_MAX):
        if library is None:
            fault = _read_checked(io, fd, offset, buffer, check)
        else:
            call = library.kv_read_record
            call.restype = ctypes.c_int64
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            found = call(fd, ctypes.c_int64(offset), ctypes.c_void_p(address), check.shape)
            fault = _fault(found, buffer, check)
        if not isinstance(fault, IoFault) or fault.errno == 0:
            break
    return fault


def _fault(
    found: int, buffer: memoryview, check: RecordCheck
) -> IoFault | HeaderFault | BadRun | None:
    if found == 0:
        return None
    if found < 0:
        return IoFault(-found, errno.errorcode.get(-found, "?"))
    if found == SHORT:
        return IoFault(0, "the file is too short")
    if found == BAD_HEADER:
        header = np.frombuffer(buffer, np.uint8)[: check.record.header_bytes]
        return check.record.check_header(header) or HeaderFault.CHECKSUM
    return BadRun(found - BAD_RUN)


def _read_checked(
    io: FileIo, fd: int, offset: int, buffer: memoryview, check: RecordCheck
) -> IoFault | HeaderFault | BadRun | None:
    record = check.record
    try:
        if io.pread(fd, buffer, offset) != len(buffer):
            return IoFault(0, "the file is too short")
    except OSError as error:
        return IoFault(error.errno or errno.EIO, error.strerror or str(error))
    view = np.frombuffer(buffer, np.uint8)
    header = view[: record.header_bytes]
    fault = record.check_header(header)
    if fault is not None:
        return fault
    if planted("skip_checksum"):
        return None
    payload = view[record.header_bytes : record.header_bytes + record.payload_bytes]
    sums = np.ascontiguousarray(record.checksums(header[None])[0])
    bad = verify_runs(payload, check.run_offsets, check.run_lengths, sums)
    return BadRun(bad) if bad >= 0 else None
