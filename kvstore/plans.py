"""What placement, saves and write-back hand to each other: values that the one lock guards."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.rows import Ints, Longs
from kvstore.tiers.base import SaveDrop
from kvstore.tiers.record import RecordFormat


@dataclass(frozen=True)
class SpaceFacts:
    """What write-back must know of a namespace. layout: canonical bytes, or b"" where unknown."""

    digest: bytes
    record: RecordFormat
    layout: bytes
    label: str


@dataclass
class Dirty:
    """Rows that host memory alone holds, root first, since a moment on the monotonic clock."""

    rows: Ints
    generations: npt.NDArray[np.uint32]
    since_s: float


@dataclass
class SavePlan:
    """Blocks first..last-1 of a chain are to be copied into `slots`.

    anchor: the row before them, held until it is published; -1 for none.
    generations: uint64, of the records.  present: blocks before `first` that are there already.
    drop: why blocks from `last` on are not saved, or None.
    known: rows of the first of these blocks, which another tier has.  changes: the index's count
    when that was found out.
    """

    first: int
    last: int
    anchor: int
    slots: Longs
    generations: npt.NDArray[np.uint64]
    present: int
    drop: SaveDrop | None
    known: Ints
    changes: int


@dataclass
class Group:
    """Rows, root first, that are being written. All are held, and so are their parents on disk."""

    number: int
    space: SpaceFacts
    rows: Ints
    host: Longs  # their slots in host memory: kept by the holds, also if a row is dropped meanwhile
    parents: Ints
    age: int  # of its oldest block: only older blocks give way to it
    planned_bytes: int  # of the daily budget
    rest: Dirty  # needed as well, and beyond a group
    starved: bool = True  # no slot, and no block on disk whose slot it could ever take
