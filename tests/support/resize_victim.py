"""A process that resizes its store, to be killed in the middle of it.

It forks a child for each line on its standard input, "STORE FAILPOINT HOST DISK SEED", so that many
kills do not pay for as many interpreters. The child fills a store and says "full"; then it resizes
to HOST and DISK bytes and kills itself at the failpoint. With "random" as the failpoint it goes on
resizing, while it saves, until it is killed. The process answers "pid PID" first and, in the end,
"ended SIGNAL".
"""

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.failpoints import armed
from support.engine import Engine
from support.writer import LAYOUT, PAGES

HOST_BYTES = 8 << 20
DISK_BYTES = 16 << 20
DISK_LEAST = 5 << 20
PROMPTS = 36  # More than both tiers hold: 8.6 MiB.


def prompt_of(number: int) -> npt.NDArray[np.int32]:
    """Tokens of 20 blocks."""
    return np.random.default_rng((7, number)).integers(0, 1000, 4 * 20 + 1, dtype=np.int32)


def fill(store: Store) -> None:
    engine = Engine(store.namespace(LAYOUT, model="m"), PAGES)
    for number in range(PROMPTS):
        engine.save(prompt_of(number))
        if number % 4 == 0:
            store.flush()
    store.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def resize(directory: Path, failpoint: str, host: int, disk: int, seed: int) -> None:
    with open_store(directory, host=HOST_BYTES, persist=True, dirty_age_s=0.0) as store:
        fill(store)
        os.write(1, b"full\n")
        if failpoint != "random":
            with armed(failpoint, die):
                store.resize(host_bytes=host, disk_bytes=disk)
            return
        random = np.random.default_rng(seed)
        threading.Thread(target=_save_for_ever, args=(store,), daemon=True).start()
        while True:
            store.resize(
                host_bytes=int(random.integers(4 << 20, 24 << 20)),
                disk_bytes=int(random.integers(DISK_LEAST, 24 << 20)),
            )


def _save_for_ever(store: Store) -> None:
    while True:
        fill(store)


def main() -> None:
    for line in sys.stdin:
        directory, failpoint, host, disk, seed = line.split()
        pid = os.fork()
        if pid == 0:
            resize(Path(directory), failpoint, int(host), int(disk), int(seed))
            os._exit(0)
        os.write(1, f"pid {pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(1, f"ended {os.WTERMSIG(status)}\n".encode())


if __name__ == "__main__":
    main()
