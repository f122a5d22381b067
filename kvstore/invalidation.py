"""Invalidation: blocks that must not be served again leave every tier at once, and stay away.

    1. in memory   the index, host memory and the disk's list of removals; the namespaces' epochs
                   go up, so that saves, loads and engines under way notice
    2. durable     the floors of kvstore/floors.py: from here on a kill changes nothing
    3. settled     what was being written back has ended, all removals are committed, and the floors
                   need not count at the next start any more

A namespace whose model and tenant are not known (the catalogue was rebuilt, an arena was taken
over) matches every model and tenant: a cache may lose, but it must not lie.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.floors import BOOT_SHIFT, EVERY, Floor, Floors
from kvstore.home import INVALIDATED_FILE, Home
from kvstore.labels import model_part, parts_of, tenant_part
from kvstore.leaving import Gone, drop_below, drop_namespace, still_held
from kvstore.placement import Placement
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.record import KEY_BYTES, NAMESPACE_BYTES

DIGITS_MIN = 8
SETTLE_S = 5.0  # How long a call waits for copies under way; later the floors see to the rest.
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Scope:
    """What to invalidate: one of `namespace`, `prefix`, `everything`, or a model, a tenant or both.

    namespace: its digest in hex, or the first 8 digits or more of it.
    prefix: the key of a block in hex, as `kvstore ls` prints it: that block and all that were
    computed from it. Raises ConfigError.
    """

    namespace: str | None = None
    model: str | None = None
    tenant: str | None = None
    prefix: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        labelled = self.model is not None or self.tenant is not None
        given = (self.namespace is not None, self.prefix is not None, self.everything, labelled)
        if sum(given) != 1:
            raise ConfigError(
                "an invalidation has one scope: a namespace, a prefix, everything, or a model, a "
                "tenant or both"
            )
        if self.namespace is not None:
            _refuse_no_hex(self.namespace, "a namespace", DIGITS_MIN, 2 * NAMESPACE_BYTES)
        if self.prefix is not None:
            _refuse_no_hex(self.prefix, "a block's key", 2 * KEY_BYTES, 2 * KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Invalidated:
    """What an invalidation did.

    blocks: each once.  bytes: of their slots, in host memory and on disk.  namespaces: how many it
    met.  durable: False where the disk did not take it: what was dropped is not served by this
    owner, but may be by the next.
    """

    blocks: int
    bytes: int
    namespaces: int
    durable: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """A namespace. number: in the index; None where it has none, because nothing of it is there."""

    digest: bytes
    label: str
    number: int | None


@dataclass(frozen=True, slots=True)
class _Target:
    """What a scope meets. spaces: whose epochs go up.  digests: whose floors rise.

    met: namespaces that hold what was asked for.  row: of a prefix's block.  whole: the spaces go.
    """

    spaces: list[_Known]
    digests: list[bytes]
    met: int
    row: int | None = None
    whole: bool = False


class Invalidator:
    """Carries out invalidations, one at a time.

    numbers: of the namespaces in the index, by digest, as they are found and opened. home: None for
    a store that no process outlives. settle_s: how long to wait for copies under way; 0 where no
    other thread could end them.
    """

    def __init__(
        self,
        placement: Placement,
        numbers: Mapping[bytes, int],
        home: Home | None,
        floors: Floors,
        *,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._placement = placement
        self._numbers = numbers
        self._home = home
        self._floors = floors
        self._settle_s = settle_s
        self._lock = threading.Lock()
        self._held: list[tuple[int, int]] = []  # dropped, and read by a copy under way

    def invalidate(self, scope: Scope) -> Invalidated:
        """Carry out one; the tiers have started. Returns: Invalidated.

        Raises ConfigError for digits that begin several namespaces' digests.
        """
        with self._lock:
            with self._placement.lock:
                target = self._target(scope)
                gone = self._drop(scope, target)
                self._held += gone.held
                floor = self._floor(scope)
            reach("invalidate.dropped")
            self._floors.raise_to(target.digests, floor)
            durable = not target.digests or self._replace()
            reach("invalidate.noted")
            self._note_settled()
            reach("invalidate.settled")
        return Invalidated(gone.blocks, gone.bytes, target.met, durable)

    def settle(self) -> None:
        """What an earlier call could not wait for has ended, as at a stop: note that."""
        with self._lock:
            if self._floors.pending():
                self._note_settled()

    # --- in memory, under the placement's lock

    def _target(self, scope: Scope) -> _Target:
        known = self._known()
        if scope.prefix is not None:
            row = self._row(scope.prefix)
            if row is None:
                # No tier of the store has it, but a freed slot may, or a save under way, or an
                # engine: whichever namespace it is of.
                return _Target(known, [EVERY], met=0)
            number = int(self._placement.index.rows.space[row])
            own = [space for space in known if space.number == number]
            return _Target(own, [space.digest for space in own], met=1, row=row)
        chosen = _chosen(scope, known)
        digests = [EVERY] if scope.everything else [space.digest for space in chosen]
        if scope.namespace is not None and len(scope.namespace) == 2 * NAMESPACE_BYTES:
            digests = [bytes.fromhex(scope.namespace)]
        return _Target(chosen, digests, met=len(chosen), whole=True)

    def _known(self) -> list[_Known]:
        placement = self._placement
        labels: dict[bytes, str] = {}
        if placement.disk is not None:
            labels.update((n.digest, n.label) for n in placement.disk.namespaces().values())
        for facts in placement.spaces.values():
            if facts.label or facts.digest not in labels:
                labels[facts.digest] = facts.label
        numbers = dict(self._numbers)
        for digest in numbers:
            labels.setdefault(digest, "")
        return [_Known(digest, label, numbers.get(digest)) for digest, label in labels.items()]

    def _row(self, prefix: str) -> int | None:
        key = np.frombuffer(bytes.fromhex(prefix), np.uint8).reshape(1, KEY_BYTES)
        row = int(self._placement.index.table.probe(key)[0])
        return row if row >= 0 else None

    def _drop(self, scope: Scope, target: _Target) -> Gone:
        placement, gone = self._placement, Gone()
        numbers = [space.number for space in target.spaces if space.number is not None]
        for number in numbers:
            placement.epochs[number] += 1
        if scope.prefix is not None:
            placement.pins.drop_over(bytes.fromhex(scope.prefix))
        else:
            placement.pins.drop_namespaces({space.digest for space in target.spaces})
        if target.row is not None:
            gone.add(drop_below(placement, target.row))
        for number in numbers if target.whole else ():
            gone.add(drop_namespace(placement, number))
        placement.counters.add("invalidations")
        placement.counters.add("invalidated_blocks", gone.blocks)
        return gone

    def _floor(self, scope: Scope) -> Floor:
        """Of all records until now. A prefix is a part of its namespace: it counts less often."""
        now = int(self._placement.new_generations(1)[0])
        if scope.prefix is None:
            return Floor(void=now)
        # An arena that this owner has not got may hold anything below; in its own, only what is on
        # disk too is as old as a former owner.
        own = self._placement.host.arena.persist
        arena = now >> BOOT_SHIFT << BOOT_SHIFT if own else now
        return Floor(rebuild=now, start=now, arena=arena)

    # --- durable

    def _replace(self) -> bool:
        if self._home is None:
            return True
        try:
            self._home.replace(INVALIDATED_FILE, self._floors.pack())
        except OSError:
            return False
        return True

    def _note_settled(self) -> None:
        """Wait for copies under way that hold what was dropped; commit all removals; note it."""
        placement = self._placement
        deadline = time.monotonic() + self._settle_s
        while True:
            with placement.lock:
                self._held = still_held(placement, self._held)
            if not self._held or time.monotonic() >= deadline:
                break
            time.sleep(PAUSE_S)
        committed = placement.disk is None or placement.disk.flush_removals() is None
        if committed and not self._held and self._floors.pending():
            self._floors.settle(arena_too=placement.host.arena.persist)
            self._replace()


def _chosen(scope: Scope, known: list[_Known]) -> list[_Known]:
    """The namespaces of a scope that is not a prefix."""
    if scope.everything:
        return known
    if scope.namespace is not None:
        digits = scope.namespace.lower()
        found = [space for space in known if space.digest.hex().startswith(digits)]
        if len(found) > 1:
            listed = ", ".join(space.digest.hex() for space in found[:4])
            raise ConfigError(f"{scope.namespace} begins several namespaces: {listed}; give more")
        return found
    wanted = (
        None if scope.model is None else model_part(scope.model),
        None if scope.tenant is None else tenant_part(scope.tenant),
    )
    return [space for space in known if _matches(parts_of(space.label), wanted)]


def _matches(parts: tuple[str, str] | None, wanted: tuple[str | None, str | None]) -> bool:
    if parts is None:
        return True
    return all(want in (None, part) for part, want in zip(parts, wanted, strict=True))


def _refuse_no_hex(text: str, what: str, digits_min: int, digits_max: int) -> None:
    digits = set(text.lower()) <= set("0123456789abcdef")
    if not digits or not digits_min <= len(text) <= digits_max:
        size = str(digits_max) if digits_min == digits_max else f"{digits_min} to {digits_max}"
        raise ConfigError(f"{text!r:.100} is not {what}: give {size} hex digits")
