"""A device that knows what happened before what: it wraps another and finds what is not ordered.

Every stream and the host have a clock; an event carries the clocks of its stream, and whoever waits
for it takes them over. Two pieces of work that touch the same bytes, one of them writing, must be
in that order. So a wait that is missing is found whatever the timing was. The host's own accesses
are told by `host`; freed memory may not be touched again.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.cuda.cpu_device import CpuDevice, CpuEvent, CpuStream
from kvstore.cuda.device import Buffer, Event, Span, Spans, Stream, UInt64s, no_spans
from kvstore.cuda.kernel_table import KERNELS

PAGE = 1 << 12  # Accesses are noted by the pages of memory they touch, so that few are compared.
Clock = dict[str, int]


class RaceError(AssertionError):
    """Two pieces of work touch the same bytes and nothing orders them."""


@dataclass(frozen=True)
class Access:
    """One piece of work's span."""

    start: int
    end: int
    writes: bool
    who: str
    when: int
    what: str


class CheckedEvent:
    def __init__(self, checker: "RaceChecker", event: CpuEvent, clock: Clock) -> None:
        self.event, self.clock, self._checker = event, clock, checker

    @property
    def done(self) -> bool:
        done = self.event.done
        if done:
            self._checker.host_learns(self.clock)
        return done

    def wait(self) -> None:
        self.event.wait()
        self._checker.host_learns(self.clock)


class CheckedStream:
    handle = 0

    def __init__(self, checker: "RaceChecker", stream: CpuStream) -> None:
        self.inner, self.clock, self._checker = stream, Clock(), checker
        self.name = stream.purpose

    def record(self) -> CheckedEvent:
        with self._checker.lock:
            self._checker.tick(self)
            return CheckedEvent(self._checker, self.inner.record(), dict(self.clock))

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        with self._checker.lock:
            _join(self.clock, event.clock)
            self.inner.wait(event.event)


class RaceChecker:
    """Implements kvstore.cuda.device.Device over a CpuDevice. `races`: what was found."""

    name = "checked"

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.inner = device or CpuDevice()
        self.lock = threading.RLock()
        self.races: list[str] = []
        self._streams: dict[str, CheckedStream] = {}
        self._host: Clock = {}
        self._accesses: dict[int, list[Access]] = {}
        self._freed: list[tuple[int, int]] = []

    # --- Device

    def stream(self, purpose: str) -> CheckedStream:
        with self.lock:
            if purpose not in self._streams:
                self._streams[purpose] = CheckedStream(self, self.inner.stream(purpose))
            return self._streams[purpose]

    def allocate(self, size_bytes: int) -> Buffer:
        return self._known(self.inner.allocate(size_bytes))

    def allocate_pinned(self, size_bytes: int) -> Buffer:
        return self._known(self.inner.allocate_pinned(size_bytes))

    def register(self, address: int, size_bytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def copy(self, stream: Stream, targets: UInt64s, sources: UInt64s, sizes: UInt64s) -> None:
        assert isinstance(stream, CheckedStream)
        spans = [
            Span(int(address), int(size), writes)
            for column, writes in ((sources, False), (targets, True))
            for address, size in zip(column.tolist(), sizes.tolist(), strict=True)
        ]
        with self.lock:
            self._note(stream, spans, "a copy")
            self.inner.copy(stream.inner, targets, sources, sizes)

    def launch(
        self,
        stream: Stream,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Any],
        spans: Spans = no_spans,
        *,
        shared_bytes: int = 0,
    ) -> None:
        assert isinstance(stream, CheckedStream)
        touched = list(spans())
        for parameter, value in zip(KERNELS[kernel].parameters, arguments, strict=True):
            if hasattr(value, "size_bytes"):
                touched.append(Span(value.address, value.size_bytes, parameter.writes))
        with self.lock:
            self._note(stream, touched, kernel)
            self.inner.launch(
                stream.inner, kernel, grid, threads, arguments, shared_bytes=shared_bytes
            )

    def close(self) -> None:
        self.inner.close()

    # --- what tests tell and ask

    def host(self, address: int, size_bytes: int, *, writes: bool, what: str) -> None:
        """The host touches memory now, on whatever thread."""
        with self.lock:
            self._host["host"] = self._host.get("host", 0) + 1
            self._check(Span(address, size_bytes, writes), self._host, "host", what)

    def host_learns(self, clock: Clock) -> None:
        with self.lock:
            _join(self._host, clock)

    def assert_ordered(self) -> None:
        """AssertionError with the first race, if there was any."""
        assert not self.races, f"{len(self.races)} races; the first: {self.races[0]}"

    # --- inside

    def tick(self, stream: CheckedStream) -> None:
        """One more piece of work: the host's program comes before it."""
        self._host["host"] = self._host.get("host", 0) + 1
        _join(stream.clock, self._host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1

    def _known(self, buffer: Any) -> Buffer:
        """Forget what was done at these addresses when somebody else had them."""
        with self.lock:
            for page in range(buffer.address // PAGE, (buffer.address + buffer.size_bytes) // PAGE):
                self._accesses.pop(page, None)
        made: Buffer = buffer
        return made

    def _note(self, stream: CheckedStream, spans: Sequence[Span], what: str) -> None:
        self.tick(stream)
        for span in spans:
            self._check(span, stream.clock, stream.name, what)

    def _check(self, span: Span, clock: Clock, who: str, what: str) -> None:
        new = Access(
            span.address,
            span.address + span.size_bytes,
            span.writes,
            who,
            clock.get(who, 0),
            what,
        )
        for page in range(new.start // PAGE, (new.end - 1) // PAGE + 1):
            kept = []
            for old in self._accesses.get(page, []):
                ordered = clock.get(old.who, 0) >= old.when
                if _clash(old, new) and not ordered:
                    does, did = (("reads", "writes")[a.writes] for a in (new, old))
                    self.races.append(
                        f"{what} of {who} {does} what {old.what} of {old.who} {did}, in no order"
                    )
                covered = new.start <= old.start and old.end <= new.end
                if not (ordered and covered and (new.writes or not old.writes)):
                    kept.append(old)
            self._accesses[page] = [*kept, new]


def _clash(old: Access, new: Access) -> bool:
    return old.start < new.end and new.start < old.end and (old.writes or new.writes)


def _join(clock: Clock, other: Clock) -> None:
    for who, when in other.items():
        clock[who] = max(when, clock.get(who, 0))
