"""The model check: eight threads of random requests against a store, compared with a table.

`python -m support.model_run SEED OPERATIONS [ROUND]`, in tests/, replays a seed or runs a slice of
the long form; it prints one line a round.
"""

import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.store import Store
from kvstore.store import open as open_store
from support.checks import assert_at_rest, disk_usage
from support.model_worker import WEIGHTS, Violation, Worker
from support.model_world import LARGE, SMALL, Tenant

THREADS = 8
LEG = 4_000  # operations between two moments at which nothing is under way
LEGS = 3  # between two starts of the store
PROMPTS = 300
LEASE_S = 0.05
SWITCH_S = 0.0005  # Threads take turns ten times as often as usual.
LAST_NOTES = 12
SLICE = 100_000  # operations of a round of the long form
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """One configuration of a store."""

    name: str
    host: int
    disk: int = 0  # capacity; 0: no disk tier
    two_sizes: bool = False
    weights: tuple[float, ...] = WEIGHTS
    resized: bool = False  # between half and all of its capacities, while the threads run
    more: dict[str, Any] = field(default_factory=dict)


KINDS = (
    Kind("tiny tiers", 4 * MIB, 6 * MIB),
    Kind("no disk", 4 * MIB),
    Kind("arena", 4 * MIB, 16 * MIB, more={"persist": True}),
    Kind("two slot sizes", 5 * MIB, 12 * MIB, two_sizes=True),
    Kind("short queues", 4 * MIB, 32 * MIB, more={"load_queue": 4, "save_queue_blocks": 24}),
    Kind("resized", 10 * MIB, 24 * MIB, resized=True),
    Kind("sha256", 4 * MIB, 8 * MIB, more={"hash": "sha256", "io_threads": 2, "direct": False}),
)


@dataclass
class Totals:
    """What a round did. counters: of its last owner, or of the store's whole life on disk."""

    operations: int = 0
    hits: int = 0
    counters: dict[str, int] = field(default_factory=dict)


def command_of(kind: Kind, seed: int, operations: int) -> str:
    """What replays a round."""
    return f"cd tests && python -m support.model_run {seed} {operations} '{kind.name}'"


def run_round(directory: Path, kind: Kind, seed: int, operations: int) -> Totals:
    """Random operations on one store, with restarts. AssertionError with seed and last notes."""
    tenants = [
        Tenant("one", SMALL, PROMPTS, seed),
        Tenant("two", SMALL, PROMPTS, seed),  # equal tokens, other bytes
        *([Tenant("three", LARGE, PROMPTS // 2, seed)] if kind.two_sizes else []),
    ]
    totals, start = Totals(), 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        while totals.operations < operations:
            if start and not kind.disk:
                tenants = [Tenant(t.name, t.layout, len(t.prompts), seed) for t in tenants]
            _one_owner(directory, kind, (seed, start), tenants, totals, operations)
            start += 1
    except AssertionError as failure:
        raise Violation(f"{failure}\n{command_of(kind, seed, operations)}") from failure
    finally:
        sys.setswitchinterval(interval)
    if kind.disk:
        assert disk_usage(directory / "store") <= kind.disk
    return totals


def _one_owner(
    directory: Path,
    kind: Kind,
    seed: tuple[int, int],
    tenants: list[Tenant],
    totals: Totals,
    operations: int,
) -> None:
    """A store from its start to a clean stop, and a few legs in between."""
    descriptors = len(os.listdir("/proc/self/fd"))
    settings = {"host": kind.host, "lease_s": LEASE_S, "dirty_age_s": 0.05, **kind.more}
    if kind.disk:
        settings |= {"disk": [directory / "store"], "disk_capacity": kind.disk}
    if kind.more.get("persist"):
        settings["arena_directory"] = directory
    with open_store(**settings) as store:
        seeds = [hash((*seed, thread)) for thread in range(THREADS)]
        workers = [Worker(store, tenants, own, kind.weights) for own in seeds]
        for _ in range(LEGS):
            if totals.operations < operations:
                leg = min(LEG, operations - totals.operations)
                _leg(store, workers, -(-leg // THREADS), kind, f"seed {seed[0]}, {kind.name}")
                totals.operations = totals.operations + sum(w.operations for w in workers)
                totals.hits += sum(w.hits for w in workers)
                for worker in workers:
                    worker.operations = worker.hits = 0
        totals.counters = store.counters()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "descriptors leaked"


def _leg(store: Store, workers: list[Worker], operations: int, kind: Kind, name: str) -> None:
    """All workers run; then nothing is under way, and everything must be at rest."""
    threads = [
        threading.Thread(target=worker.run, args=(operations,), daemon=True) for worker in workers
    ]
    for thread in threads:
        thread.start()
    beside = 0
    while any(thread.is_alive() for thread in threads):
        threads[beside % len(threads)].join(0.1)
        store.check_integrity()  # beside the running threads
        beside += 1
        if kind.resized and beside % 4 == 0:
            part = 2 - beside // 4 % 2
            store.resize(host_bytes=kind.host // part, disk_bytes=kind.disk // part)
    if kind.resized:
        store.resize(host_bytes=kind.host, disk_bytes=kind.disk)
    for worker in workers:
        if worker.failure is not None:
            raise Violation(f"{name}: {worker.failure}\n{_last_notes(workers, worker)}") from (
                worker.failure
            )
    time.sleep(LEASE_S)  # of tickets that nobody gave back
    assert_at_rest(store)


def _last_notes(workers: list[Worker], failed: Worker) -> str:
    """The last operations on the prompt that failed, of all threads, in their order."""
    if not failed.notes:
        return ""
    prompt = failed.notes[-1][1]
    notes = sorted(
        (at, thread, tenant, what)
        for thread, worker in enumerate(workers)
        for at, number, tenant, what in list(worker.notes)
        if number == prompt
    )
    return "\n".join(f"  thread {t}, {who}: {what}" for _, t, who, what in notes[-LAST_NOTES:])


def main(seed: int, operations: int, only: str = "") -> None:
    """Rounds of all kinds in turn, or of one, until so many operations were made."""
    done = 0
    kinds = [kind for kind in KINDS if only in kind.name]
    share = min(SLICE, -(-operations // len(kinds)))
    while done < operations:
        for kind in kinds:
            with tempfile.TemporaryDirectory() as directory:
                totals = run_round(Path(directory), kind, seed, share)
            done += totals.operations
            print(f"seed {seed}, {kind.name}: {totals.operations}, {totals.hits} hits", flush=True)
        seed += 1
    print(f"{done} operations, 0 violations")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
