"""Export: blocks of a store into an archive, beside its owner or without one. Changes nothing.

Namespace by namespace, parents before children, the shallow first: what is cut off an archive is
the ends of long prompts. Every block is checked as it is read, and one that is bad, or left the
store meanwhile, is left out with all below it. Salts are nowhere in a store's directory: what
leaves of a namespace is its digest, its label and its layout.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.archive import ArchiveWriter, Write
from kvstore.clock import Clock
from kvstore.home import require_store
from kvstore.inspect import layout_of, refuse_own_process
from kvstore.labels import model_part, parts_of, tenant_part
from kvstore.scrub import Progress
from kvstore.slot_check import Reading, read_span, span_bytes, spans
from kvstore.store_check import StoreCheck
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import KEY_BYTES, NAMESPACE_BYTES, RecordFormat

THREADS = 4
BATCH_BYTES = 16 << 20  # Of records in memory; one batch is written while the next is read.
DIGITS_MIN = 8


@dataclass(frozen=True)
class Selection:
    """Which blocks to export: all, or those that meet everything given. Raises ConfigError.

    namespace: its digest in hex, or the first 8 digits or more.  model, tenant: as a label has
    them; a namespace whose label was lost meets neither.  prefix: the key of a block in hex, as
    `kvstore ls` prints it: that block, those before it, and all that were computed from it.
    """

    namespace: str | None = None
    model: str | None = None
    tenant: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        for text, least, most, what in (
            (self.namespace, DIGITS_MIN, 2 * NAMESPACE_BYTES, "a namespace"),
            (self.prefix, 2 * KEY_BYTES, 2 * KEY_BYTES, "a prefix"),
        ):
            if text is None:
                continue
            digits = set(text.lower()) <= set("0123456789abcdef")
            if not digits or not least <= len(text) <= most:
                raise ConfigError(f"{what} is {least} to {most} hex digits; got {text!r:.80}")

    def meets(self, namespace: Namespace) -> bool:
        """Whether blocks of this namespace are asked for."""
        wanted = self.namespace.lower() if self.namespace is not None else ""
        if not namespace.digest.hex().startswith(wanted):
            return False
        if self.model is None and self.tenant is None:
            return True
        parts = parts_of(namespace.label)
        if parts is None:
            return False
        model = self.model is None or parts[0] == model_part(self.model)
        return model and (self.tenant is None or parts[1] == tenant_part(self.tenant))


@dataclass
class Exported:
    """What went into an archive, and what was left out.

    bytes: of the archive.  bad: blocks whose bytes are not those that were saved.  gone: blocks
    that left the store meanwhile.  below: blocks that were left out because one before them was.
    unchecked: blocks whose layout was lost with the catalogue; it comes back with their engine.
    """

    namespaces: int = 0
    blocks: int = 0
    bytes: int = 0
    bad: int = 0
    gone: int = 0
    below: int = 0
    unchecked: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """As `kvstore export --json` prints it."""
        return asdict(self)


def export_store(
    directory: Path,
    write: Write,
    selection: Selection | None = None,
    progress: Progress | None = None,
    io: FileIo | None = None,
    *,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Exported:
    """Write blocks of the store in `directory` as one archive, by calls of `write`.

    Raises ConfigError or StoreError for what is not a store or has no readable catalogue, and for a
    prefix that is not there; OSError as `write` does.
    """
    io, clock = io or FileIo(), clock or Clock()
    facts = require_store(directory, io)
    refuse_own_process(directory, io)
    began_s = clock.monotonic()
    check = StoreCheck(directory, facts, io, pause)
    with ExitStack() as stack:
        check.begin(stack)
        if check.bad:
            raise ConfigError(
                f"{check.bad[0].place} has no readable catalogue; run verify --repair"
            )
        export = _Export(check, io, ArchiveWriter(write, facts.hash, int(clock.time())), progress)
        done = export.run(selection or Selection())
    done.seconds = clock.monotonic() - began_s
    return done


@dataclass(frozen=True)
class _Chains:
    """Blocks of one namespace that are to be exported, parents first.

    rows: of one block_tokens.  volumes: where each lies.  parents: place of each one's parent among
    them, -1 for a first block, -2 where it is not among them.
    """

    namespace: Namespace
    layout: Layout | None
    rows: Rows
    volumes: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]


class _Export:
    def __init__(
        self, check: StoreCheck, io: FileIo, writer: ArchiveWriter, progress: Progress | None
    ) -> None:
        self._check = check
        self._io = io
        self._writer = writer
        self._progress = progress
        self._total_bytes = 0
        self._done = Exported()

    def run(self, selection: Selection) -> Exported:
        """Write all that is selected, and the end mark."""
        chosen = list(self._collect(selection))
        if selection.prefix is not None and not chosen:
            raise ConfigError(f"no block on disk has the key {selection.prefix}; see kvstore ls")
        for chains in chosen:
            if chains.layout is not None:
                size = RecordFormat.of(chains.layout)
                self._total_bytes += len(chains.rows) * (size.header_bytes + size.payload_bytes)
        for chains in chosen:
            if chains.layout is None:
                self._done.unchecked += len(chains.rows)
            else:
                self._write(chains, chains.layout)
        self._writer.end()
        self._done.bytes = self._writer.bytes
        return self._done

    # --- choosing

    def _collect(self, selection: Selection) -> Iterator[_Chains]:
        """The chosen blocks, by namespace and block_tokens."""
        found: dict[tuple[bytes, int], list[tuple[int, Rows]]] = {}
        names: dict[bytes, Namespace] = {}
        for volume, view in self._check.views.items():
            spaces = view.catalogue.namespaces()
            names.update({space.digest: space for space in spaces.values()})
            for batch, _ in view.batches():
                for block_tokens, rows in batch.items():
                    rows_here = rows[view.has_slots(rows) & view.has_spaces(rows)]
                    for number in np.unique(rows_here["namespace"]).tolist():
                        space = spaces.get(number)
                        if space is not None and selection.meets(space):
                            these = rows_here[rows_here["namespace"] == number]
                            key = (space.digest, block_tokens)
                            found.setdefault(key, []).append((volume, these))
        for digest, block_tokens in sorted(found):
            parts = found[digest, block_tokens]
            rows = np.concatenate([rows for _, rows in parts])
            volumes = np.repeat([v for v, _ in parts], [len(rows) for _, rows in parts])
            chains = _in_order(names[digest], rows, volumes)
            if selection.prefix is not None:
                chains = _around(chains, bytes.fromhex(selection.prefix))
            if len(chains.rows):
                yield chains

    # --- reading and writing

    def _write(self, chains: _Chains, layout: Layout) -> None:
        """Write one namespace and its blocks."""
        record = RecordFormat.of(layout)
        number = self._writer.namespace(chains.namespace)
        self._done.namespaces += 1
        written = np.zeros(len(chains.rows) + 2, np.bool_)  # The last two: no parent, and a root.
        written[-1] = True
        step = max(1, BATCH_BYTES // record.slot_bytes)
        batches: deque[tuple[int, list[tuple[npt.NDArray[np.int64], Future[Reading]]]]] = deque()
        with ThreadPoolExecutor(THREADS, "kvstore-export") as pool:
            for first in [*range(0, len(chains.rows), step), -1]:
                if first >= 0:
                    batches.append((first, self._read(pool, chains, first, first + step)))
                while batches and (first < 0 or len(batches) > 1):
                    at, reads = batches.popleft()
                    self._write_batch(number, record, chains, at, reads, written)

    def _read(
        self, pool: ThreadPoolExecutor, chains: _Chains, first: int, last: int
    ) -> list[tuple[npt.NDArray[np.int64], Future[Reading]]]:
        """Begin to read blocks first..last-1: which of them each read brings, and the read."""
        places = np.arange(first, min(last, len(chains.rows)))
        reads = []
        for volume in np.unique(chains.volumes[places]).tolist():
            own = places[chains.volumes[places] == volume]
            rows = chains.rows[own]
            order = np.lexsort((rows["index"], rows["segment"]))
            at = 0
            for span in spans({0: rows[order]}):
                reads.append(
                    (own[order][at : at + len(span)], pool.submit(self._span, volume, span))
                )
                at += len(span)
        return reads

    def _span(self, volume: int, rows: Rows) -> Reading:
        view = self._check.views[volume]
        buffer = aligned_buffer(span_bytes(rows))
        return read_span(self._io, view.path, rows, buffer, view.spaces, direct=view.direct)

    def _write_batch(
        self,
        number: int,
        record: RecordFormat,
        chains: _Chains,
        first: int,
        reads: list[tuple[npt.NDArray[np.int64], "Future[Reading]"]],
        written: npt.NDArray[np.bool_],
    ) -> None:
        found: dict[int, tuple[Reading, int]] = {}
        for places, read in reads:
            reading = read.result()
            found.update({place: (reading, at) for at, place in enumerate(places.tolist())})
        size = record.header_bytes + record.payload_bytes
        for place in sorted(found):
            reading, at = found[place]
            if not written[chains.parents[place]]:
                self._done.below += 1
                continue
            if reading.faults[at] is not None:
                again = self._again(chains, place)
                if again is None:
                    continue
                reading, at = again, 0
            start = int(reading.offsets[at])
            self._writer.block(number, reading.view[start : start + size].data)
            written[place] = True
            self._done.blocks += 1
        if self._progress is not None:
            self._progress(self._writer.bytes, max(self._total_bytes, self._writer.bytes))

    def _again(self, chains: _Chains, place: int) -> Reading | None:
        """Read a block again that seems bad.

        Returns: what came | None, and it is counted: it is bad, or it left.
        """
        row = chains.rows[place : place + 1]
        view = self._check.views[int(chains.volumes[place])]
        now = view.row(int(row["segment"][0]), int(row["index"][0]))
        if now is None or now["generation"][0] != row["generation"][0]:
            self._done.gone += 1
            return None
        reading = self._span(int(chains.volumes[place]), row)
        if reading.faults[0] is None:
            return reading
        self._done.bad += 1
        return None


def _in_order(namespace: Namespace, rows: Rows, volumes: npt.NDArray[np.int64]) -> _Chains:
    """Rows of a namespace by depth, and within one by place."""
    order = np.lexsort((rows["index"], rows["segment"], rows["depth"]))
    rows = rows[order]
    return _Chains(namespace, layout_of(namespace.layout), rows, volumes[order], _parents_of(rows))


def _parents_of(rows: Rows) -> npt.NDArray[np.int64]:
    """Place of each row's parent: int64 [n], -1 for a first block, -2 for one that is not there."""
    keys, wanted = np.ascontiguousarray(rows["key"]), np.ascontiguousarray(rows["parent"])
    order = np.argsort(keys, kind="stable")
    at = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    there = (keys[at] == wanted) & (rows["depth"][at].astype(np.int64) + 1 == rows["depth"])
    return np.where(rows["depth"] == 0, -1, np.where(there, at, -2))


def _around(chains: _Chains, key: bytes) -> _Chains:
    """Of the chains: the block with a key, those before it, and those below it."""
    found = np.flatnonzero(chains.rows["key"] == np.frombuffer(key, "V16")[0])
    kept = np.zeros(len(chains.rows), np.bool_)
    if len(found):
        kept[found[0]] = True
        for place in range(int(found[0]) + 1, len(kept)):  # Parents come first.
            kept[place] = chains.parents[place] >= 0 and kept[chains.parents[place]]
        up = int(chains.parents[found[0]])
        while up >= 0:
            kept[up] = True
            up = int(chains.parents[up])
    return _in_order(chains.namespace, chains.rows[kept], chains.volumes[kept])
