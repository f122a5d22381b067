"""From a key to its row: a bucket table of fingerprints, one cache line a bucket.

2^k buckets of 8 entries uint64: the upper half of the key's first 8 bytes in the upper 32 bits (the
fingerprint), row + 1 in the lower; an empty entry is 0. The lower half of those 8 bytes chooses
the bucket. A fingerprint is only a hint: the row's key is compared. The few rows whose bucket is
full lie in a sorted overflow list: with a mean load of at most LOAD_MAX about 1 in 500.

The hot paths are native (native/find.cpp); the NumPy forms here give the same results.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.native import build
from kvstore.native.address import address_of
from kvstore.rows import Ints, Rows
from kvstore.tiers.record import KEY_BYTES

Keys = npt.NDArray[np.uint8]  # [n, 16]
Words = npt.NDArray[np.uint64]

LANES = 8
LOAD_MAX = 3  # mean entries of a bucket; beyond it the table doubles
BUCKETS_MIN = 64
PROBE_CHUNK = 8192  # keys the NumPy forms take at a time
FINGERPRINT: Final = np.uint64(0xFFFFFFFF00000000)
ROW: Final = np.uint64(0xFFFFFFFF)

ALL_FOUND, ABSENT, COLLISION = 0, 1, 2  # how a walk ended; native/find.cpp has the same


@dataclass(frozen=True, slots=True)
class Walk:
    """The longest confirmed prefix of a chain.

    rows: int32 [m], root first. in_upper, in_lower: how many of them have a slot in that tier.
    end: ALL_FOUND, or why block m was not confirmed: ABSENT or COLLISION.
    """

    rows: Ints
    in_upper: int
    in_lower: int
    end: int


class View(ctypes.Structure):
    """The table as native/find.cpp sees it. Addresses are renewed whenever an array moves."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("mask", ctypes.c_uint64),
        ("heads", ctypes.c_void_p),
        ("overflow_keys", ctypes.c_void_p),
        ("overflow_rows", ctypes.c_void_p),
        ("overflow_count", ctypes.c_int64),
    )


class BlockTable:
    """The rows that can be found, by their unique keys. It reads the keys in `rows`."""

    def __init__(self, rows: Rows, rows_expected: int) -> None:
        self._rows = rows
        self._used = 0
        self._table = np.zeros((_buckets_for(rows_expected), LANES), np.uint64)
        self._overflow_keys: Words = np.zeros(0, np.uint64)
        self._overflow_rows: Ints = np.zeros(0, np.int32)
        self._view = View()
        self._heads_seen: object = None
        self._result = np.zeros(4, np.int64)

    def __len__(self) -> int:
        return self._used

    @property
    def overflow(self) -> int:
        """How many rows found their bucket full."""
        return len(self._overflow_rows)

    @property
    def buckets(self) -> int:
        return len(self._table)

    def entries(self) -> Ints:
        """All rows in the table, in no order."""
        packed = self._table[self._table != 0]
        rows = ((packed & ROW).astype(np.int64) - 1).astype(np.int32)
        return np.concatenate([rows, self._overflow_rows])

    # -- changing ------------------------------------------------------------------------------

    def insert(self, rows: Ints) -> None:
        """Add rows whose keys are not in the table and differ from each other."""
        self._used += len(rows)
        if self._used > LOAD_MAX * self.buckets:
            rows = np.concatenate([self.entries(), rows])
            self._table = np.zeros((_buckets_for(self._used), LANES), np.uint64)
            self._overflow_keys, self._overflow_rows = np.zeros(0, np.uint64), np.zeros(0, np.int32)
            self._heads_seen = None
        left = self._insert(np.ascontiguousarray(rows, np.int32))
        if len(left):
            self._set_overflow(np.concatenate([self._overflow_rows, left]))

    def _insert(self, rows: Ints) -> Ints:
        library = _library()
        if library is None:
            return self._insert_numpy(rows)
        left = np.empty(len(rows), np.int32)
        count: int = library.kv_table_insert(
            address_of(self._table),
            self.buckets - 1,
            address_of(self._rows.heads),
            address_of(rows),
            len(rows),
            address_of(left),
        )
        return left[:count]

    def _insert_numpy(self, rows: Ints) -> Ints:
        low = self._rows.key0[rows]
        bucket = self._bucket(low)
        order = np.argsort(bucket, kind="stable")
        rows, low, bucket = rows[order], low[order], bucket[order]
        first = np.ones(len(rows), bool)
        first[1:] = bucket[1:] != bucket[:-1]
        starts = np.flatnonzero(first)
        rank = np.arange(len(rows)) - np.repeat(starts, np.diff(np.append(starts, len(rows))))
        empty = self._table[bucket] == 0
        lane_wanted = empty & (np.cumsum(empty, axis=1) == (rank + 1)[:, None])
        fits = lane_wanted.any(axis=1)
        lane = lane_wanted.argmax(axis=1)
        entries = (low & FINGERPRINT) | (rows.astype(np.uint64) + np.uint64(1))
        self._table[bucket[fits], lane[fits]] = entries[fits]
        left: Ints = rows[~fits]
        return left

    def remove(self, rows: Ints) -> None:
        """Take rows out; each must be in the table."""
        low = self._rows.key0[rows]
        bucket = self._bucket(low)
        entries = (low & FINGERPRINT) | (rows.astype(np.uint64) + np.uint64(1))
        here = self._table[bucket] == entries[:, None]
        found = here.any(axis=1)
        self._table[bucket[found], here.argmax(axis=1)[found]] = 0
        self._used -= len(rows)
        if not found.all():
            gone = np.isin(self._overflow_rows, rows[~found])
            assert gone.sum() == (~found).sum(), "a row to remove is not in the table"
            self._set_overflow(self._overflow_rows[~gone])

    def _set_overflow(self, rows: Ints) -> None:
        keys = self._rows.key0[rows]
        order = np.argsort(keys, kind="stable")
        self._overflow_keys, self._overflow_rows = keys[order], rows[order]
        self._heads_seen = None

    def _bucket(self, low: Words) -> npt.NDArray[np.int64]:
        bucket: npt.NDArray[np.int64] = (low & np.uint64(self.buckets - 1)).astype(np.int64)
        return bucket

    # -- finding -------------------------------------------------------------------------------

    def probe(self, keys: Keys) -> Ints:
        """The row that carries each key, or -1: int32 [n]. Parents and tokens are not looked at."""
        keys = np.ascontiguousarray(keys)
        rows = np.empty(len(keys), np.int32)
        library = _library()
        if library is not None:
            library.kv_probe(self._view_now(), address_of(keys), len(keys), address_of(rows))
            return rows
        for at in range(0, len(keys), PROBE_CHUNK):
            rows[at : at + PROBE_CHUNK] = self._probe_numpy(keys[at : at + PROBE_CHUNK])
        return rows

    def count_fresh(self, keys: Keys) -> int:
        """How many leading keys no row carries, and differ from each other."""
        if not len(keys):
            return 0
        taken = self.probe(keys) >= 0
        fresh = int(taken.argmax()) if taken.any() else len(keys)
        if fresh > 1:
            data, seen = keys[:fresh].tobytes(), dict[bytes, None]()
            for at in range(0, len(data), KEY_BYTES):
                if data[at : at + KEY_BYTES] in seen:
                    return len(seen)
                seen[data[at : at + KEY_BYTES]] = None
        return fresh

    def walk(self, keys: Keys, tokens: Ints, space: int, parent: int) -> Walk:
        """Follow a chain below `parent` (-1: from the root) as far as it is confirmed.

        keys uint8 [n, 16], tokens int32 [n, block_tokens], both C-contiguous. A block is confirmed
        when a row carries its key, is the child of the row before, lies in the space, and has
        the same tokens.
        """
        if not len(keys):
            return Walk(np.zeros(0, np.int32), 0, 0, ALL_FOUND)
        pool, library = self._rows.pools[tokens.shape[1]], _library()
        if library is None:
            return self._walk_numpy(keys, tokens, space, parent)
        rows = np.empty(len(keys), np.int32)
        library.kv_find(
            self._view_now(),
            address_of(self._rows.space),
            address_of(pool.tokens),
            tokens.shape[1],
            address_of(keys),
            address_of(tokens),
            len(keys),
            space,
            parent,
            address_of(rows),
            address_of(self._result),
        )
        found, upper, lower, end = self._result.tolist()
        return Walk(rows[:found], upper, lower, end)

    def _view_now(self) -> object:
        rows = self._rows
        if self._heads_seen is not rows.heads:
            self._heads_seen = rows.heads
            self._view = View(
                address_of(self._table),
                self.buckets - 1,
                address_of(rows.heads),
                address_of(self._overflow_keys),
                address_of(self._overflow_rows),
                len(self._overflow_rows),
            )
        return ctypes.byref(self._view)

    def _probe_numpy(self, keys: Keys) -> Ints:
        words = keys.view(np.uint64)
        low, high = words[:, 0], words[:, 1]
        entries = self._table.take(self._bucket(low), axis=0)
        alike = (((entries ^ low[:, None]) & FINGERPRINT) == 0) & (entries != 0)
        found = np.full(len(keys), -1, np.int32)
        # Nearly always one lane is alike; a clash of fingerprints takes another round.
        while (which := np.flatnonzero(alike.any(axis=1))).size:
            lane = alike[which].argmax(axis=1)
            alike[which, lane] = False
            rows = (entries[which, lane] & ROW).astype(np.int64) - 1
            same = (self._rows.key0[rows] == low[which]) & (self._rows.key1[rows] == high[which])
            found[which[same]] = rows[same]
            alike[which[same]] = False
        for i in np.flatnonzero(found < 0).tolist() if self.overflow else ():
            at = int(np.searchsorted(self._overflow_keys, low[i]))
            while at < self.overflow and self._overflow_keys[at] == low[i]:
                if self._rows.key1[self._overflow_rows[at]] == high[i]:
                    found[i] = self._overflow_rows[at]
                at += 1
        return found

    def _walk_numpy(self, keys: Keys, tokens: Ints, space: int, parent: int) -> Walk:
        rows, pool = self._rows, self._rows.pools[tokens.shape[1]].tokens
        chunks: list[Ints] = []
        end, at, size = ALL_FOUND, 0, 64
        while at < len(keys) and end == ALL_FOUND:
            part = self._probe_numpy(keys[at : at + size])
            known = len(part) if (part >= 0).all() else int((part < 0).argmax())
            end = ABSENT if known < len(part) else ALL_FOUND
            part = part[:known]
            before = np.concatenate([np.array([parent], np.int32), part[:-1]])[:known]
            good = (rows.parent[part] == before) & (rows.space[part] == space)
            # Only rows of this space are known to have their tokens in this pool.
            good[good] = (pool[rows.token_row[part[good]]] == tokens[at : at + known][good]).all(1)
            if not good.all():
                part, end = part[: int((~good).argmax())], COLLISION
            chunks.append(part)
            if len(part):
                parent = int(part[-1])
            at, size = at + size, min(size * 8, PROBE_CHUNK)
        found = np.concatenate(chunks)
        in_tier = [int((slots[found] >= 0).sum()) for slots in rows.slots]
        return Walk(found, in_tier[0], in_tier[1], end)


def _buckets_for(rows: int) -> int:
    buckets = BUCKETS_MIN
    while buckets * LOAD_MAX < rows:
        buckets *= 2
    return buckets


def _library() -> ctypes.CDLL | None:
    library = build.load()
    if library is not None and not library.kv_find.argtypes:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        word = ctypes.c_int32
        library.kv_find.restype = library.kv_probe.restype = None
        library.kv_table_insert.restype = number
        library.kv_table_insert.argtypes = (
            pointer,
            ctypes.c_uint64,
            pointer,
            pointer,
            number,
            pointer,
        )
        library.kv_probe.argtypes = (pointer, pointer, number, pointer)
        library.kv_find.argtypes = (
            *(pointer, pointer, pointer, number, pointer, pointer, number),
            *(word, word, pointer, pointer),
        )
    return library


def check_keys(keys: Keys) -> Keys:
    """The keys as they must lie in memory, or ValueError."""
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ValueError(f"keys must be uint8 [n, {KEY_BYTES}]")
    return np.ascontiguousarray(keys)
