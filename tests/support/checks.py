"""What must be true of a store whenever nothing is under way."""

import time
from contextlib import suppress
from pathlib import Path

from kvstore.store import Store
from kvstore.tiers.base import TierName

REST_S = 5.0
NO_LEAKS = {"leases": 0, "holds": 0}


def assert_at_rest(store: Store) -> None:
    """Nothing leaked, every tier is prefix-closed, and every slot taken has its block."""
    store.flush()
    assert store.leaks() == NO_LEAKS
    store.check_integrity()
    placement = store._placement
    with placement.lock:
        index = placement.index
        assert placement.host.blocks == index.blocks(TierName.HOST), "a host slot leaked"
    # After a flush the writer still lets colder blocks give way: out of the index, then removed.
    deadline = time.monotonic() + REST_S
    while placement.disk is not None:
        assert placement.disk.flush_removals() is None
        with placement.lock:
            left = placement.disk.slab.occupied() - placement.index.blocks(TierName.DISK)
        if left == 0:
            break
        assert time.monotonic() < deadline, f"{left} disk slots leaked"
        time.sleep(0.01)


def disk_usage(path: Path) -> int:
    """Bytes a directory takes, as du counts them; files may come and go meanwhile."""
    total = 0
    for found in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            total += found.lstat().st_blocks * 512
    return total
