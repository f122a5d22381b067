"""Group commit to one volume's catalogue: what waits for it, and what rides along.

A caller's rows are committed when `commit` returns. Callers that wait while another's commit is
under way share the next one. Removals, new segments and namespaces ride on whatever comes first.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.tiers.catalogue import ROWS_PER_TXN, Change, CommitFault
from kvstore.tiers.catalogue_row import KEY, Rows
from kvstore.tiers.catalogue_tables import Namespace, SegmentState
from kvstore.tiers.catalogues import OwnedCatalogue


@dataclass(slots=True)
class _Job:
    rows: Rows | None
    done: bool = False
    fault: CommitFault | None = None


class Journal:
    """Commits to one catalogue. Thread-safe; never raises.

    per: slots_per_segment_max. released: called, by a committing thread, with the slots whose
    removal is durable.
    """

    def __init__(self, per: int, released: Callable[[list[int]], None]) -> None:
        self.namespaces: dict[int, Namespace] = {}  # in the catalogue, or on their way
        self._catalogue: OwnedCatalogue | None = None
        self._per = per
        self._released = released
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._jobs: list[_Job] = []
        self._removed: dict[int, None] = {}
        self._segments: dict[int, tuple[int, SegmentState]] = {}
        self._new_namespaces: dict[int, Namespace] = {}

    def open(self, catalogue: OwnedCatalogue) -> None:
        """Commit to this catalogue from now on."""
        with self._commit_lock:
            self._catalogue = catalogue
            self.namespaces = catalogue.namespaces()

    def detach(self) -> None:
        """Until `open` every commit gives DEVICE. Waits for the commit under way."""
        with self._commit_lock:
            self._catalogue = None

    def remove(self, slots: list[int]) -> None:
        """Let the removal of these slots' rows ride on the next commit."""
        with self._lock:
            self._removed.update(dict.fromkeys(slots))

    def removing(self) -> set[int]:
        """The slots whose removal is not committed yet."""
        with self._lock:
            return set(self._removed)

    def set_segment(self, segment: int, slot_bytes: int, state: SegmentState) -> None:
        """Let a row of the segments table ride on the next commit."""
        with self._lock:
            self._segments[segment] = (slot_bytes, state)

    def set_namespace(self, number: int, namespace: Namespace) -> None:
        """Let a namespace ride on the next commit, unless it is there already."""
        with self._lock:
            if self.namespaces.get(number) != namespace:
                self.namespaces[number] = namespace
                self._new_namespaces[number] = namespace

    def commit(self, rows: Rows | None) -> CommitFault | None:
        """Commit rows, with all that is pending. `rows` are sealed in place.

        Returns: None | MAP_FULL | DEVICE.
        """
        job = _Job(rows)
        with self._lock:
            self._jobs.append(job)
        while not job.done:
            with self._commit_lock:
                if not job.done:
                    self._commit_waiting()
        return job.fault

    def _commit_waiting(self) -> None:
        jobs, removed, change = self._take()
        fault = None
        if not change.empty():
            catalogue = self._catalogue
            fault = CommitFault.DEVICE if catalogue is None else catalogue.commit(change)
        if fault is None:
            self._settle(removed, change)
        for job in jobs:
            job.fault, job.done = fault, True

    def _take(self) -> tuple[list[_Job], list[int], Change]:
        with self._lock:
            jobs: list[_Job] = []
            count = 0
            for job in self._jobs:
                count += 0 if job.rows is None else len(job.rows)
                if jobs and count > ROWS_PER_TXN:
                    break
                jobs.append(job)
            del self._jobs[: len(jobs)]
            removed = list(self._removed)
            change = Change(
                [job.rows for job in jobs if job.rows is not None],
                [KEY.pack(*divmod(slot, self._per)) for slot in removed],
                dict(self._segments),
                dict(self._new_namespaces),
            )
        return jobs, removed, change

    def _settle(self, removed: list[int], change: Change) -> None:
        with self._lock:
            for slot in removed:
                self._removed.pop(slot, None)
            for segment, state in change.segments.items():
                if self._segments.get(segment) == state:
                    del self._segments[segment]
            for number, namespace in change.namespaces.items():
                if self._new_namespaces.get(number) == namespace:
                    del self._new_namespaces[number]
        if removed:
            self._released(removed)
