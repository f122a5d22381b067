"""Pins: prefixes that a user wishes to keep, each for a time after its last hit, within a budget.

A pin covers one block and all before it. What it covers is not evicted, in whichever tier it lies,
and a pin asks write-back to put it on disk. The budget is a share of each tier's capacity. All that
the pins cover, shared blocks counted once, must fit the budget of the disk, or of host memory in a
store without one, or a new pin is refused. In host memory beside a disk, and in a tier that was
made smaller, blocks are kept as far as its budget goes, those of older pins first.

Blocks leave all the same when they turn out bad, are dropped on request, or when their tier
shrinks: a pin says how many of its blocks are stored, and covers them again once they are saved.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.home import PINS_FILE, Home
from kvstore.labels import shown
from kvstore.pin_outcomes import Pinned, PinRefusal, PinRefused
from kvstore.pinned_keys import whole_order
from kvstore.pins_file import (
    FILE_MAX_BYTES,
    PinRecord,
    decode,
    encode,
    encoded_bytes,
    file_bytes_max,
)
from kvstore.rows import PIN_END, Ints
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from kvstore.placement import Placement
    from kvstore.sequence import Sequence
    from kvstore.space import Space

LOG = logging.getLogger(__name__)
PINS_MAX = 1024
PINNED_BLOCKS_MAX = 1 << 18  # different blocks under all pins
PIN_BLOCKS_SUM_MAX = 1 << 20  # the pins' lengths, shared blocks counted each time
TTL_MIN_S = 1.0
TTL_MAX_S = 366 * 86_400.0
REFRESH_WRITE_S = 10.0  # hits change when a pin ends; the file hears of it at most so often
KEY_BYTES = 16


@dataclass(slots=True)
class Pin:
    """nodes: of its keys, root first. expires_s: on the monotonic clock."""

    number: int
    namespace: bytes
    slot_bytes: int
    nodes: Ints
    ttl_s: float
    expires_s: float


class Pins:
    """The pins of one store. Thread-safe; what is said to be under the lock is the placement's."""

    def __init__(self, placement: "Placement", fraction: float, home: Home | None) -> None:
        """fraction: the pins' share of each tier. home: where the file is, None for no file."""
        self._placement = placement
        self._clock = placement.clock
        self._keys = placement.index.pinned
        self._fraction = fraction
        self._home = home
        self._change = threading.Lock()  # one change at a time, its file included; taken first
        self._pins: dict[int, Pin] = {}  # by number, so the oldest first
        self._by_node: dict[int, Pin] = {}  # by the last block
        self._next_number = 1
        self._next_expiry_s = float("inf")  # none ends before
        self._order: Ints = np.zeros(0, np.int32)  # all nodes, those of older pins first
        self._order_changed = False
        self._budgets: list[int] = []
        self._write_at_s = float("inf")  # when the file should be written, on the monotonic clock
        self._write_failed = False
        self._read()

    # -- what users ask for

    def pin(
        self, prefix: "Sequence | str | bytes", ttl_s: float, namespace: "Space | None"
    ) -> Pinned | PinRefused:
        """Keep a prefix, or renew the pin that ends with the same block: see Store.pin."""
        if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
            raise ConfigError(f"ttl_s={ttl_s} must lie between {TTL_MIN_S} and {TTL_MAX_S} seconds")
        asked = _key_bytes(prefix) if isinstance(prefix, str | bytes) else prefix
        with self._change:
            with self._placement.lock:
                self.settle()
                known = set(self._pins)
                answer = self._pin(asked, ttl_s, namespace)
            if isinstance(answer, Pinned) and not self._write():
                with self._placement.lock:
                    if answer.pin_id not in known:
                        self._end([self._pins[answer.pin_id]])
                answer = PinRefused(PinRefusal.NOT_WRITTEN)
        if isinstance(answer, PinRefused):
            self._placement.counters.add("pin_refusals")
        return answer

    def unpin(self, pin_id: int) -> bool:
        """End a pin. Returns whether there was one."""
        with self._change:
            with self._placement.lock:
                self.settle()
                pin = self._pins.get(pin_id)
                if pin is None:
                    return False
                self._end([pin])
                self.settle()
            self._write()
        return True

    def pins(self) -> list[Pinned]:
        """All pins that have not ended, the oldest first."""
        with self._placement.lock:
            self.settle()
            labels = self._labels()
            return [self._shown(pin, labels) for pin in self._pins.values()]

    # -- what the store asks for, under the lock

    def hit(self, sequence: "Sequence", rows: Ints, usable: int) -> None:
        """A lookup found these rows of a sequence, of its `usable` blocks.

        A pin is hit when all it covers was found; its last block counts as found where a lookup
        stopped short of it, because one token of a prompt is always left to compute.
        """
        if not self._pins:
            return
        index = self._placement.index
        ended = rows[(index.rows.pinned[rows] & PIN_END) != 0]
        nodes = [self._keys.node(key.tobytes()) for key in index.rows.keys(ended)]
        if len(rows) == usable < sequence.blocks:
            nodes.append(self._keys.node(sequence.keys[usable].tobytes()))
        now_s = self._clock.monotonic()
        for node in nodes:
            pin = self._by_node.get(node)
            if pin is not None and self._keys.stored(pin.nodes[-1:]):
                pin.expires_s = now_s + pin.ttl_s
                self._write_soon(now_s)

    def settle(self) -> None:
        """End what is over, and tell eviction what to keep. Called before each eviction."""
        if not self._pins and not self._keys.stale:
            return
        now_s = self._clock.monotonic()
        if now_s >= self._next_expiry_s:
            self._end([pin for pin in self._pins.values() if pin.expires_s <= now_s])
            self._write_soon(now_s)
        budgets = self._budgets_now()
        if self._keys.stale or budgets != self._budgets:
            self._budgets = budgets
            if self._order_changed:
                self._order = whole_order([pin.nodes for pin in self._pins.values()])
                self._order_changed = False
            self._keys.mark(self._order, budgets)
            self._placement.index.changes += 1
            self.write_gauges()

    def drop_over(self, key: bytes) -> None:
        """The block with this key and all after it were invalidated: so are pins that cover it."""
        node = self._keys.node(key)
        if node >= 0:
            self._end([pin for pin in self._pins.values() if node in pin.nodes])
            self._write_soon(self._clock.monotonic() - REFRESH_WRITE_S)

    def drop_namespaces(self, digests: Collection[bytes]) -> None:
        """Namespaces were invalidated: their pins end."""
        self._end([pin for pin in self._pins.values() if pin.namespace in digests])
        self._write_soon(self._clock.monotonic() - REFRESH_WRITE_S)

    def write_gauges(self) -> None:
        """How much is pinned and stored goes into the counters."""
        counters = self._placement.counters
        counters.set("pinned_blocks", len(self._keys) - self._keys.missing)
        counters.set("pinned_bytes", self._keys.stored_bytes)

    def is_pinned(self, rows: Ints) -> bool:
        """Whether a pin covers any of the rows."""
        return bool(self._pins) and bool(self._placement.index.rows.pinned[rows].any())

    def check_integrity(self) -> None:
        """AssertionError if the pins cover or keep what they should not. For tests."""
        self._keys.check_integrity()
        self.settle()
        assert len(self._order) == len(self._keys), "a key is under no pin"
        for tier, budget_bytes in enumerate(self._budgets):
            assert self._keys.kept_bytes(tier) <= budget_bytes, "pins are above their budget"

    # -- the file

    def write_if_due(self) -> None:
        """Write the file if hits or ends changed it a while ago. Not under the lock."""
        if self._clock.monotonic() >= self._write_at_s:
            with self._change:
                self._write()

    def close(self) -> None:
        """Write what the file does not say yet."""
        if self._write_at_s < float("inf"):
            with self._change:
                self._write()

    def _write_soon(self, now_s: float) -> None:
        if self._home is not None:
            self._write_at_s = min(self._write_at_s, now_s + REFRESH_WRITE_S)

    def _write(self) -> bool:
        """Write the file; False if that failed, and it will be tried again later."""
        if self._home is None:
            return True
        with self._placement.lock:
            records, limit_bytes = self._records(), self._file_bytes_max()
            self._write_at_s = float("inf")
            now_s = self._clock.monotonic()
        try:
            self._home.replace(PINS_FILE, encode(records, self._next_number, limit_bytes))
        except OSError as error:
            if not self._write_failed:
                LOG.warning("the list of pins was not written: %s; it is tried again", error)
            self._write_failed = True
            with self._placement.lock:
                self._write_soon(now_s)
            return False
        self._write_failed = False
        return True

    def _records(self) -> list[PinRecord]:
        ahead_s = self._clock.time() - self._clock.monotonic()
        return [
            PinRecord(
                pin.number,
                pin.namespace,
                pin.expires_s + ahead_s,
                pin.ttl_s,
                pin.slot_bytes,
                self._keys.keys(pin.nodes),
            )
            for pin in self._pins.values()
        ]

    def _read(self) -> None:
        """Take up what a former owner left. Its blocks are found when the index is filled."""
        if self._home is None:
            return
        try:
            data = self._home.read(PINS_FILE, FILE_MAX_BYTES)
            if data is None:
                return
            records, self._next_number = decode(data)
        except (ValueError, StoreError) as error:
            LOG.warning("the list of pins is lost: %s; pin again what is to be kept", error)
            return
        now_s, ahead_s = self._clock.monotonic(), self._clock.time() - self._clock.monotonic()
        for record in records[:PINS_MAX]:
            # A clock that was set back makes no pin longer than it may be.
            expires_s = min(record.expires_s - ahead_s, now_s + record.ttl_s)
            if expires_s > now_s:
                self._add(record, expires_s)

    # -- changes, under the lock

    def _pin(
        self, prefix: "Sequence | bytes", ttl_s: float, namespace: "Space | None"
    ) -> Pinned | PinRefused:
        if not self._placement.started.is_set():
            return PinRefused(PinRefusal.STARTING)
        found = self._chain(prefix, namespace)
        if found is None:
            return PinRefused(PinRefusal.NOT_STORED)
        keys, space = found
        expires_s = self._clock.monotonic() + ttl_s
        pin = self._by_node.get(self._keys.node(keys[-1].tobytes()))
        if pin is None:
            slot_bytes = int(self._placement.index.rows.space_slot_bytes[space])
            refusal = self._refusal(keys, slot_bytes)
            if refusal is not None:
                return PinRefused(refusal)
            digest = self._placement.space_digests.get(space, bytes(32))
            record = PinRecord(self._next_number, digest, 0.0, ttl_s, slot_bytes, keys)
            self._next_number += 1
            pin = self._add(record, expires_s)
        pin.ttl_s, pin.expires_s = ttl_s, expires_s
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        self._to_disk(pin)
        self.settle()
        return self._shown(pin, self._labels())

    def _chain(
        self, prefix: "Sequence | bytes", namespace: "Space | None"
    ) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The keys of a prefix, root first, and its space; None if nothing of it is stored."""
        index = self._placement.index
        if not isinstance(prefix, bytes):
            space, keys = prefix.space.number, prefix.keys.copy()
            tokens = prefix.block_tokens(0, len(keys))
            found = index.find(space, keys, tokens, media=prefix.media or None).rows
            return (keys, space) if len(found) else None
        row = int(index.table.probe(np.frombuffer(prefix, np.uint8).reshape(1, -1))[0])
        if row < 0 or (namespace is not None and index.rows.space[row] != namespace.number):
            return None
        chain = [row]
        while index.rows.parent[chain[-1]] >= 0:
            chain.append(int(index.rows.parent[chain[-1]]))
        return index.rows.keys(np.array(chain[::-1], np.int32)), int(index.rows.space[row])

    def _refusal(self, keys: npt.NDArray[np.uint8], slot_bytes: int) -> PinRefusal | None:
        """Why a chain cannot be pinned beside what is pinned already."""
        count, new = len(self._pins) + 1, self._keys.unknown(keys)
        different = len(self._keys) + new
        lengths = sum(len(pin.nodes) for pin in self._pins.values()) + len(keys)
        if (
            count > PINS_MAX
            or different > PINNED_BLOCKS_MAX
            or lengths > PIN_BLOCKS_SUM_MAX
            or encoded_bytes(count, different) > self._file_bytes_max()
        ):
            return PinRefusal.TOO_MANY
        if self._keys.bytes + new * slot_bytes > self._budgets_now()[-1]:
            return PinRefusal.OVER_BUDGET
        return None

    def _add(self, record: PinRecord, expires_s: float) -> Pin:
        before = len(self._keys)
        nodes = self._keys.add(record.keys, record.slot_bytes, self._placement.index.table.probe)
        new = len(self._keys) - before  # They are the last ones of the chain.
        numbers = record.number, record.namespace, record.slot_bytes
        pin = Pin(*numbers, nodes, record.ttl_s, expires_s)
        self._pins[pin.number] = self._by_node[int(nodes[-1])] = pin
        self._next_expiry_s = min(self._next_expiry_s, expires_s)
        self._order = np.concatenate([self._order, nodes[len(nodes) - new :]])
        return pin

    def _end(self, pins: list[Pin]) -> None:
        for pin in pins:
            del self._pins[pin.number], self._by_node[int(pin.nodes[-1])]
            self._keys.remove(pin.nodes)
        self._order_changed = True
        self._next_expiry_s = min((p.expires_s for p in self._pins.values()), default=float("inf"))

    def _to_disk(self, pin: Pin) -> None:
        """Have write-back put what host memory alone holds on disk before anything else."""
        placement = self._placement
        if placement.disk is not None:
            rows = self._keys.rows(pin.nodes)
            placement.mark_dirty_first(rows[placement.index.slots(TierName.DISK, rows) < 0])
            placement.dirty_changed.notify_all()

    # -- what is known of them

    def _budgets_now(self) -> list[int]:
        """What pins may keep in each tier, in bytes. The last one decides what may be pinned."""
        host, disk = self._placement.host, self._placement.disk
        tiers = [host.capacity_bytes] + ([disk.capacity_bytes] if disk is not None else [])
        return [int(self._fraction * capacity_bytes) for capacity_bytes in tiers]

    def _file_bytes_max(self) -> int:
        disk = self._placement.disk
        return file_bytes_max(disk.capacity_bytes if disk is not None else 1 << 62)

    def _labels(self) -> dict[bytes, str]:
        placement = self._placement
        known = {space.digest: space.label for space in placement.spaces.values()}
        if placement.disk is not None:
            known |= {space.digest: space.label for space in placement.disk.namespaces().values()}
        return {digest: shown(label) for digest, label in known.items()}

    def _shown(self, pin: Pin, labels: dict[bytes, str]) -> Pinned:
        return Pinned(
            pin_id=pin.number,
            blocks=len(pin.nodes),
            bytes=len(pin.nodes) * pin.slot_bytes,
            expires_at=pin.expires_s - self._clock.monotonic() + self._clock.time(),
            stored_blocks=self._keys.stored(pin.nodes),
            ttl_s=pin.ttl_s,
            key=self._keys.keys(pin.nodes[-1:]).tobytes().hex(),
            label=labels.get(pin.namespace, ""),
        )


def _key_bytes(key: str | bytes) -> bytes:
    """A key as bytes, of hex or bytes. Raises ConfigError for anything else."""
    try:
        data = bytes.fromhex(key) if isinstance(key, str) else key
    except ValueError:
        data = b""
    if len(data) != KEY_BYTES:
        raise ConfigError(f"{key!r} is no key; give 32 hex digits, as `kvstore ls` prints them")
    return data
