"""Counters of a store: a mapped file of 64-bit numbers.

They survive a kill and can be read beside the owner.

File format (little-endian): magic "KVCOUNT1", uint32 version, uint32 number of counters, 48 bytes
of zeros, then one uint64 for each name in NAMES, up to 4096 bytes. Names are only ever appended.
Gauges (`*_bytes`, `*_blocks` of a tier or of pins) are the owner's last word; they mean nothing
after it died.
"""

import mmap
import struct
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.tiers.base import MissReason, SaveDrop
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo

MAGIC = b"KVCOUNT1"
VERSION = 1
FILE_BYTES = 4096
VALUE_MAX = 1 << 62  # No counter gets there; a damaged one starts anew.
BOOT_MAX = 1 << 31
EPOCH_S = 1_577_836_800  # 2020-01-01: seconds since then fit 30 bits until 2054
HEADER = struct.Struct("<8sII48x")

TIERS = ("device", "host", "disk")
# Those that version 1 of the file began with; what came later stands at the end of NAMES.
FIRST_SAVE_DROPS = tuple(SaveDrop)[: tuple(SaveDrop).index(SaveDrop.CLOSED) + 1]
NAMES: tuple[str, ...] = (
    "boot",
    "lookups",
    "tokens_asked",
    *(f"tokens_hit.{tier}" for tier in TIERS),
    *(f"misses.{reason}" for reason in MissReason),
    "saved_blocks",
    "saved_bytes",
    *(f"save_drops.{reason}" for reason in FIRST_SAVE_DROPS),
    "loads",
    *(f"loaded_bytes.{tier}" for tier in TIERS),
    *(f"load_ns.{tier}" for tier in TIERS),
    "joined_reads",
    "written_blocks",
    "written_bytes",
    "write_failures",
    *(f"evicted_blocks.{tier}" for tier in TIERS),
    *(f"bad_blocks.{tier}" for tier in TIERS),
    *(f"{tier}_capacity_bytes" for tier in TIERS),
    *(f"{tier}_used_bytes" for tier in TIERS),
    *(f"{tier}_blocks" for tier in TIERS),
    "evicted_blocks.unwritten",  # of host memory, that never got to disk
    "disk_writes_bytes",
    *(f"disk_writes_{name}" for name in ("day", "today_bytes", "limit_bytes", "spent_bytes")),
    *(f"disk_writes_{name}_ms" for name in ("wall", "monotonic")),
    "save_drops.invalidated",
    "invalidations",
    "invalidated_blocks",
    "pinned_blocks",
    "pinned_bytes",
    "pin_refusals",
    "disk_state",  # what it is now: its place in DiskState
    *(f"disk_times.{state}" for state in ("read_only", "off")),  # how often it became that
    "read_faults.disk",  # blocks that the device did not deliver
    "page_locked_bytes",  # of host memory, for a device, now
    "page_locked_ns",  # this owner's time for the sum of bytes that it locked
    "page_locked_sum_bytes",
    "page_lock_failures",
)
_AT = {name: at for at, name in enumerate(NAMES)}
if HEADER.size + 8 * len(NAMES) > FILE_BYTES:
    raise AssertionError("the counters outgrew their page")


class Counters:
    """The counters of one store. Thread-safe; `add` never fails and never waits for a disk."""

    def __init__(self, mapping: mmap.mmap | bytearray) -> None:
        self._mapping = mapping
        self._lock = threading.Lock()
        self._values: npt.NDArray[np.uint64] = np.frombuffer(
            mapping, np.uint64, len(NAMES), HEADER.size
        )

    @classmethod
    def in_memory(cls) -> "Counters":
        """Counters of a store without a directory; they end with it."""
        return cls(bytearray(FILE_BYTES))

    @classmethod
    def open(cls, path: Path, io: FileIo) -> "Counters":
        """The counters in `path`, created where there are none, for the store's one owner.

        A file of zeros is a new one: power may go before its first page is on the device. Raises
        StoreError for a file that is something else.
        """
        fd = io.open(path, create=True, write=True)
        try:
            page = bytearray(FILE_BYTES)
            if io.size(fd) <= FILE_BYTES and not any(page[: io.pread(fd, page, 0)]):
                HEADER.pack_into(page, 0, MAGIC, VERSION, len(NAMES))
                io.pwrite(fd, page, 0)
            mapping = io.map(fd, FILE_BYTES) if io.size(fd) == FILE_BYTES else None
        finally:
            io.close(fd)
        if mapping is None or not _ours(mapping):
            raise StoreError(f"{path} is not a counters file of this version; move it away")
        HEADER.pack_into(mapping, 0, MAGIC, VERSION, len(NAMES))
        counters = cls(mapping)
        counters._values[counters._values >= VALUE_MAX] = 0
        return counters

    @classmethod
    def read(cls, path: Path, io: FileIo) -> dict[str, int]:
        """All counters by name, without owning the store."""
        fd = io.open(path)
        try:
            page = bytearray(FILE_BYTES)
            whole = io.size(fd) == FILE_BYTES and io.pread(fd, page, 0) == FILE_BYTES
        finally:
            io.close(fd)
        if not whole or not _ours(page):
            raise StoreError(f"{path} is not a counters file of this version")
        return cls(page).all()

    def add(self, name: str, amount: int = 1) -> None:
        """Count. Raises KeyError for a name that is not in NAMES."""
        at = _AT[name]
        with self._lock:
            self._values[at] += np.uint64(amount)

    def set(self, name: str, value: int) -> None:
        """Set a gauge."""
        self._values[_AT[name]] = value

    def get(self, name: str) -> int:
        """One counter."""
        return int(self._values[_AT[name]])

    def all(self) -> dict[str, int]:
        """All counters by name."""
        return {name: int(value) for name, value in zip(NAMES, self._values, strict=True)}

    def next_boot(self, now_s: float) -> int:
        """A number larger than every earlier owner's, even where this file was lost: 30 bits.

        now_s: seconds since 1970."""
        known = self.get("boot")
        boot = max(known + 1 if known < BOOT_MAX else 0, int(now_s) - EPOCH_S)
        self.set("boot", boot)
        return boot

    def close(self) -> None:
        """Unmap. Counters stay in the file."""
        del self._values
        if isinstance(self._mapping, mmap.mmap):
            with suppress(OSError):  # A device that failed: the counts since then are lost.
                self._mapping.flush()
            self._mapping.close()


def summary(counters: dict[str, int]) -> dict[str, object]:
    """The counters in the shape of `kvstore stats --json`."""
    return {
        "tokens_asked": counters["tokens_asked"],
        "tokens_hit": {tier: counters[f"tokens_hit.{tier}"] for tier in TIERS},
        "misses": {str(reason): counters[f"misses.{reason}"] for reason in MissReason},
        "tiers": {
            tier: {
                "capacity_bytes": counters[f"{tier}_capacity_bytes"],
                "used_bytes": counters[f"{tier}_used_bytes"],
                "blocks": counters[f"{tier}_blocks"],
            }
            for tier in TIERS[1:]
        },
        "page_locked": {
            "bytes": counters["page_locked_bytes"],
            "seconds_per_gib": counters["page_locked_ns"]
            * (1 << 30)
            / (1e9 * max(1, counters["page_locked_sum_bytes"])),
            "failures": counters["page_lock_failures"],
        },
    }


def _ours(page: mmap.mmap | bytearray) -> bool:
    magic, version, count = HEADER.unpack_from(page, 0)
    return bool(magic == MAGIC and version == VERSION and count <= len(NAMES))
