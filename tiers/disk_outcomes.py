"""What may come of a call on the disk tier: a closed set for each."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.zeros(0, np.int64)


class WriteFault(StrEnum):
    """Why a group was not written; the first that applies."""

    NO_SPACE = "no_space"  # the filesystem is full
    IO_ERROR = "io_error"  # the device did not take the bytes
    SYNC_FAILED = "sync_failed"  # what was written may be lost; its segments are abandoned
    CATALOGUE_FULL = "catalogue_full"  # the catalogue has no page left
    CATALOGUE_DEVICE = "catalogue_device"  # its device failed; a new one is made soon


class DiskState(StrEnum):
    """What the tier does now; of several volumes, what the worst of them does."""

    ON = "on"
    READ_ONLY = "read_only"  # writes fail; what is there is served
    OFF = "off"  # reads fail: nothing of it is served, and nothing of it is dropped


@dataclass(frozen=True, slots=True)
class Written:
    """A group is on disk, and its removals are done. Sizes in bytes, padding included."""

    blocks: int
    bytes: int


@dataclass(frozen=True)
class WriteFailed:
    """Nothing of the group is on disk; its slots were given back.

    abandoned: int64 slots of blocks that were on disk before and are no longer safe, because their
    segment was abandoned. Drop them from the index, and `remove` each when nobody reads it.
    """

    reason: WriteFault
    abandoned: Slots = field(default_factory=lambda: NO_SLOTS)


@dataclass(frozen=True, slots=True)
class IoFault:
    """A read that did not deliver. errno is 0 where the file ended too early.

    device: the device is to blame, or was not asked because it is off: nothing is known of the
    block, so nothing is to be dropped.
    """

    errno: int
    text: str
    device: bool = False


@dataclass(frozen=True, slots=True)
class BadRun:
    """A run of a payload failed its checksum: its index in payload order."""

    run: int
