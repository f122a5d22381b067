"""Blocks whose parent is not stored: nothing can find them, and the next start drops them.

After a kill a few are normal: a block's removal and its child's need not be in one commit where
they lie on two volumes.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstore.hashing.namespace import root_key
from kvstore.slot_check import KnownSpace
from kvstore.tiers.catalogue_row import Rows

ID = np.dtype([("key", "V16"), ("namespace", "<u4"), ("depth", "<u4")])
ID_BYTES = ID.itemsize
PLACE = np.dtype([("volume", "<u4"), ("segment", "<u4"), ("index", "<u4")])


class Families:
    """Collects the rows of all volumes, then says which have no parent among them.

    A row's parent carries its key, in its namespace, one block earlier in the chain. The parent of
    a first block is its namespace's root. Takes 60 bytes a block while it is counting.
    """

    def __init__(self) -> None:
        self._own: list[npt.NDArray[np.void]] = []
        self._wanted: list[npt.NDArray[np.void]] = []
        self._places: list[npt.NDArray[np.void]] = []

    def add(self, volume: int, rows: Rows, spaces: Mapping[int, KnownSpace]) -> None:
        """Rows of a volume, each once. Those of a namespace that is not known are passed over."""
        known = np.isin(rows["namespace"], np.fromiter(spaces, np.int64, len(spaces)))
        rows = rows[known]
        own = np.zeros(len(rows), ID)
        own["key"], own["namespace"], own["depth"] = rows["key"], rows["namespace"], rows["depth"]
        first = rows["depth"] == 0
        roots = {number: root_key(space.digest) for number, space in spaces.items()}
        rooted = first.copy()
        for number in np.unique(rows["namespace"]).tolist():
            root = np.frombuffer(roots[number], "V16")[0]
            rooted &= (rows["namespace"] != number) | (rows["parent"] == root)
        wanted = own.copy()
        wanted["key"] = rows["parent"]
        wanted["depth"] = np.where(first, np.uint32(0xFFFFFFFF), rows["depth"] - np.uint32(1))
        places = np.zeros(len(rows), PLACE)
        places["volume"] = volume
        places["segment"], places["index"] = rows["segment"], rows["index"]
        self._own.append(own)
        self._wanted.append(wanted[~rooted])
        self._places.append(places[~rooted])

    def orphans(self) -> list[tuple[int, int, int]]:
        """(volume, segment, index) of every row whose parent is not there."""
        if not self._own:
            return []
        own, wanted = np.concatenate(self._own), np.concatenate(self._wanted)
        there = _among(wanted, own)
        return [tuple(place) for place in np.concatenate(self._places)[~there].tolist()]


def _among(wanted: npt.NDArray[np.void], own: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which of `wanted` are among `own`: bool [n]. By half of the key first, which is fast."""
    halves, asked = _halves(own), _halves(wanted)
    order = np.argsort(halves)
    at = np.searchsorted(halves[order], asked)
    at = order[np.minimum(at, len(order) - 1)] if len(order) else at
    there: npt.NDArray[np.bool_] = np.zeros(len(wanted), np.bool_)
    if len(order):
        there = _bytes(own)[at] == _bytes(wanted)
    left = np.flatnonzero(~there)  # Missing, or behind another with the same half.
    exact = np.sort(_bytes(own))
    if len(left) and len(exact):
        found = _bytes(wanted)[left]
        there[left] = exact[np.minimum(np.searchsorted(exact, found), len(exact) - 1)] == found
    return there


def _halves(ids: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return (
        np.ascontiguousarray(ids)
        .view(np.uint8)
        .reshape(-1, ID_BYTES)[:, :8]
        .copy()
        .view("<u8")[:, 0]
    )


def _bytes(ids: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(ids).view(f"V{ID_BYTES}")
