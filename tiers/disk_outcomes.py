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
    CATALOGUE_DEVICE = "catalogue_device"  # the catalogue's device failed; its volume is read-only


@dataclass(frozen=True, slots=True)
class Written:
    """A group is on disk, and its removals are done. Sizes in bytes, padding included."""

    blocks: int
    bytes: int


@dataclass(frozen=True)
class WriteFailed:
    """Nothing of the group is on disk; its slots were given back.

    abandoned: int64 slots of blocks that were on disk before and are no longer served, because
    their segment was abandoned. Drop them from the index; the tier has removed their rows.
    """

    reason: WriteFault
    abandoned: Slots = field(default_factory=lambda: NO_SLOTS)


@dataclass(frozen=True, slots=True)
class IoFault:
    """A read that did not deliver. errno is 0 where the file ended too early."""

    errno: int
    text: str


@dataclass(frozen=True, slots=True)
class BadRun:
    """A run of a payload failed its checksum: its index in payload order."""

    run: int
