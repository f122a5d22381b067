"""A process that serves while its weights are replaced, and is killed at a chosen instant of it.

One process forks a child for each line on its standard input, "STORE ROUND PERSIST SCOPE DEATH".
The child saves and loads prompts of tenants a and b from two threads; then tenant a's weights are
version ROUND, and what was stored for it is invalidated. It prints "returned" when that call has
returned; "ended" follows when it was killed. DEATH: a failpoint, "call" (at some time from the call
on), "returned" (at once when it has returned), "later", or "landing": see land_and_die.
"""

import itertools
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.invalidation import Scope
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.failpoints import FAILPOINTS, armed
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from support.engine import Engine, Page, payload_of
from support.moves import emptied_host

LAYOUT = Layout.opaque(
    layers=3, run_bytes=(5_001, 777), dtype="fp8", format="engine-1", block_tokens=4
)
HOST_BYTES, DISK_BYTES = 4 << 20, 24 << 20
PAGES, PROMPTS = 32, 14
DEATHS = (
    "invalidate.dropped",
    "invalidate.noted",
    "invalidate.settled",
    "call",
    "returned",
    "later",
)
SCOPES = ("tenant", "namespace", "prefix")


class Versioned(Engine):
    """An engine whose keys and values depend on the version of its weights."""

    version = 0

    def payload(self, key: bytes) -> Page:
        return payload_of(self.layout, key) ^ np.uint8(self.version)


def prompt_of(number: int) -> npt.NDArray[np.int32]:
    """The tokens of one prompt; all begin with the same two blocks."""
    random = np.random.default_rng(number)
    own = random.integers(0, 1000, 4 * 18 + 1, dtype=np.int32)
    return np.concatenate([np.zeros(8, np.int32), own])


def engine_of(store: Store, tenant: str) -> Versioned:
    return Versioned(store.namespace(LAYOUT, model="m", tenant=tenant), PAGES)


def scope_of(name: str, engine: Versioned) -> Scope:
    """Everything that tenant a has, said in one of three ways."""
    if name == "prefix":
        return Scope(prefix=engine.space.sequence(prompt_of(0)).keys[0].tobytes().hex())
    return Scope(tenant="a") if name == "tenant" else Scope(namespace=engine.space.digest.hex())


def serve(directory: Path, round_number: int, persist: bool, scope: str, death: str) -> None:
    random = np.random.default_rng(round_number)
    store = open_store(
        directory, host=HOST_BYTES, disk_capacity=DISK_BYTES, persist=persist, dirty_age_s=0.02
    )
    version = round_number - 1

    def save_for_ever() -> None:
        engines = engine_of(store, "a"), engine_of(store, "b")
        for number in itertools.count(round_number):
            engine = engines[number % 3 == 0]
            sequence = engine.space.sequence(prompt_of(number % PROMPTS))
            # After the sequence began: one that began after the call has the new weights.
            engine.version = version if engine is engines[0] else 0
            table = engine.table(sequence.blocks)
            engine.compute(sequence, table)
            sequence.save(engine.pool, table).result()

    def load_for_ever() -> None:
        engine = engine_of(store, "a")
        for number in itertools.count():
            with engine.space.sequence(prompt_of(number % PROMPTS)).lookup() as ticket:
                ticket.load(engine.pool, engine.table(max(ticket.blocks, 1))).result()

    for work in (save_for_ever, load_for_ever):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(float(random.uniform(0.02, 0.15)))
    with ExitStack() as stack:
        if death in FAILPOINTS:
            stack.enter_context(armed(death, _die))
        if death == "call":
            threading.Timer(float(random.uniform(0, 0.02)), _die).start()
        version = round_number
        store.invalidate(scope_of(scope, engine_of(store, "a")))
        os.write(1, b"returned\n")
        time.sleep(0.0 if death == "returned" else float(random.uniform(0, 0.05)))
        _die()


class LandingIo(FileIo):
    """Reads wait until `go`; when READS of them have landed, the process is killed."""

    READS = 6

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.go = threading.Event(), threading.Event()
        self.landed = itertools.count(1)
        self.armed = False

    def pread(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:  # type: ignore[override]
        if not self.armed:
            return super().pread(fd, buffer, offset)
        self.waiting.set()
        self.go.wait()
        done = super().pread(fd, buffer, offset)
        if next(self.landed) == self.READS:
            _die()
        return done


def land_and_die(directory: Path, scope: str) -> None:
    """Blocks are read from disk into the arena while they are invalidated, and land afterwards."""
    io = LandingIo()
    store = open_store(directory, host=HOST_BYTES, disk_capacity=DISK_BYTES, persist=True, io=io)
    engine = engine_of(store, "a")
    engine.save(prompt_of(0))
    emptied_host(store)
    store._parts.invalidator._settle_s = 0.0
    io.armed = True
    ticket = engine.space.sequence(prompt_of(0)).lookup()
    ticket.load(engine.pool, engine.table(ticket.blocks))
    io.waiting.wait()
    store.invalidate(scope_of(scope, engine))
    os.write(1, b"returned\n")
    io.go.set()
    time.sleep(60)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    for line in sys.stdin:
        directory, round_number, persist, scope, death = line.split()
        pid = os.fork()
        if pid == 0 and death == "landing":
            land_and_die(Path(directory), scope)
        elif pid == 0:
            serve(Path(directory), int(round_number), persist == "True", scope, death)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


if __name__ == "__main__":
    main()
