"""`kvstore verify`: reads every block on disk and checks it, beside the store's owner or without.

First the catalogues: rows that name no slot or namespace, and blocks without a parent. Then all
records, volume by volume in the order of their places, in large reads by several threads.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kvstore.bad_block import BadBlock, BadReason
from kvstore.clock import Clock
from kvstore.home import StoreFacts, require_store
from kvstore.inspect import refuse_own_process
from kvstore.pace import Pace
from kvstore.scrub_position import Position, read_position, remove_position, write_position
from kvstore.slot_check import SPAN_BYTES, slot_bytes_of, span_bytes, spans
from kvstore.store_check import StoreCheck
from kvstore.tiers.catalogue_row import Rows
from kvstore.tiers.io import FileIo
from kvstore.volume_view import VolumeView

RATE_BESIDE_OWNER_BYTES = 64 << 20  # a second, unless told
THREADS = 4
FLYING_BYTES = 64 << 20  # Of reads under way, or one record if that is larger.
SPAN_BYTES_MIN = 256 << 10
KEEP_EVERY_S = 5.0


class Progress(Protocol):
    """Told now and then what is done and what there is to do, in bytes."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None: ...


@dataclass
class Verification:
    """What a scrub found. blocks, bytes: what was read and checked, bad ones included.

    unchecked: blocks whose header is right but whose payload cannot be checked, because the
    catalogue lost their layout; it comes back when an engine opens the namespace again.
    in_use: whether the store had an owner.  resumed: the sums include an earlier run's.
    """

    blocks: int = 0
    bytes: int = 0
    bad: list[BadBlock] = field(default_factory=list)
    unchecked: int = 0
    seconds: float = 0.0
    in_use: bool = False
    resumed: bool = False

    def document(self) -> dict[str, Any]:
        """As `kvstore verify --json` prints it."""
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "bad": [block.document() for block in self.bad],
            "unchecked": self.unchecked,
            "seconds": self.seconds,
            "resumed": self.resumed,
        }


def verify_store(
    directory: Path,
    progress: Progress | None = None,
    io: FileIo | None = None,
    *,
    rate_bytes: int | None = None,
    resume: bool = False,
    clock: Clock | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Verification:
    """Read every block on disk and check header, identity and every run. Changes no block.

    rate_bytes: the most to read in a second; 0 for no limit. Unless told there is none, but
      RATE_BESIDE_OWNER_BYTES beside an owner.
    resume: go on where the last run was stopped, if it left its position.
    A block that its owner removes meanwhile is left out. Raises ConfigError or StoreError for what
    is not a store; a catalogue that cannot be read is a bad entry, with an empty key. An interrupt
    goes through, and the position is kept.
    """
    io = io or FileIo()
    facts = require_store(directory, io)
    refuse_own_process(directory, io)
    scrub = Scrub(directory, facts, io, clock or Clock(), pause)
    return scrub.run(progress, rate_bytes, resume)


class Scrub:
    """One pass over a store."""

    def __init__(
        self,
        directory: Path,
        facts: StoreFacts,
        io: FileIo,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._io = io
        self._clock = clock
        self._pause = pause
        self._check = StoreCheck(directory, facts, io, pause)
        self._position = Position()
        self._began_s = self._kept_s = clock.monotonic()
        self._earlier_s = 0.0

    def run(self, progress: Progress | None, rate_bytes: int | None, resume: bool) -> Verification:
        """All of it."""
        check, store_id = self._check, self._facts.store_id
        if rate_bytes is None:
            rate_bytes = RATE_BESIDE_OWNER_BYTES if check.in_use else 0
        earlier = read_position(self._directory, store_id, self._io) if resume else None
        with ExitStack() as stack:
            check.begin(stack)
            orphans = check.survey()
            if earlier is not None:
                self._position, self._earlier_s = earlier, earlier.seconds
                check.check_again((segment, index) for segment, index, _ in earlier.bad)
            try:
                for number, view in check.views.items():
                    if number >= self._position.volume:
                        self._read_volume(number, view, rate_bytes, progress)
            except BaseException:
                self._keep_position()
                raise
            check.note_orphans(orphans)
        remove_position(self._directory, self._io)
        at = self._position
        seconds = self._earlier_s + self._clock.monotonic() - self._began_s
        return Verification(
            at.blocks,
            at.read_bytes,
            check.bad,
            at.unchecked,
            seconds,
            check.in_use,
            earlier is not None,
        )

    def _read_volume(
        self, number: int, view: VolumeView, rate_bytes: int, progress: Progress | None
    ) -> None:
        """Read a volume from the position on. Its spans are settled in their order."""
        threads = 1 if self._check.in_use else THREADS
        most_bytes = min(SPAN_BYTES, max(SPAN_BYTES_MIN, rate_bytes // 4 or SPAN_BYTES))
        pace = Pace(rate_bytes, self._clock, self._pause)
        at = self._position
        after = (at.segment, at.index) if at.volume == number else (0, 0)
        flying: deque[tuple[Rows, Future[tuple[list[BadReason | None], int]]]] = deque()
        flying_bytes = 0
        with ThreadPoolExecutor(threads, "kvstore-scrub") as pool:
            for rows in self._spans(view, after, most_bytes):
                size = span_bytes(rows)
                while flying and (len(flying) >= 2 * threads or flying_bytes + size > FLYING_BYTES):
                    flying_bytes -= span_bytes(flying[0][0])
                    self._settle(number, view, *flying.popleft(), progress)
                pace.wait(size)
                flying.append((rows, pool.submit(self._check.read, view, rows)))
                flying_bytes += size
            while flying:
                self._settle(number, view, *flying.popleft(), progress)

    def _spans(self, view: VolumeView, after: tuple[int, int], most_bytes: int) -> Iterator[Rows]:
        """The spans of a volume whose rows name a slot and a namespace, from a place on."""
        for batch, _ in view.batches():
            wanted: dict[int, Rows] = {}
            for block_tokens, rows in batch.items():
                known = view.has_slots(rows) & view.has_spaces(rows)
                if self._check.in_use and not known.all():
                    view.refresh()  # The owner may have made a segment or a namespace since.
                    known = view.has_slots(rows) & view.has_spaces(rows)
                segment, index = after
                later = rows["segment"] > segment
                later |= (rows["segment"] == segment) & (rows["index"] >= index)
                wanted[block_tokens] = rows[known & later]
            yield from spans(wanted, most_bytes)

    def _settle(
        self,
        number: int,
        view: VolumeView,
        rows: Rows,
        read: "Future[tuple[list[BadReason | None], int]]",
        progress: Progress | None,
    ) -> None:
        """Add a span that was read to the sums; what seems bad is looked at again first."""
        faults, unchecked = read.result()
        gone = 0
        for row, fault in zip(rows, faults, strict=True):
            if fault is not None and not self._check.confirm(view, row):
                gone += 1
        at, last = self._position, rows[-1]
        at.blocks += len(rows) - gone
        at.read_bytes += (len(rows) - gone) * slot_bytes_of(rows)
        at.unchecked += unchecked
        at.volume, at.segment, at.index = number, int(last["segment"]), int(last["index"]) + 1
        if progress is not None:
            progress(at.read_bytes, max(self._check.total_bytes, at.read_bytes))
        if self._clock.monotonic() - self._kept_s >= KEEP_EVERY_S:
            self._keep_position()

    def _keep_position(self) -> None:
        now = self._clock.monotonic()
        bad = self._check.bad_when_read()
        kept = replace(
            self._position,
            seconds=self._earlier_s + now - self._began_s,
            bad=[(block.segment, block.index, block.reason) for block in bad],
        )
        write_position(self._directory, kept, self._facts.store_id, self._io)
        self._kept_s = now
