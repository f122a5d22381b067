"""What must be true of a store whenever nothing is under way."""

from contextlib import suppress
from pathlib import Path

from kvstore.store import Store
from kvstore.tiers.base import TierName

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
        if placement.disk is not None:
            assert placement.disk.flush_removals() is None
            taken = placement.disk.slab.occupied()
            assert taken == index.blocks(TierName.DISK), "a disk slot leaked"


def disk_usage(path: Path) -> int:
    """Bytes a directory takes, as du counts them; files may come and go meanwhile."""
    total = 0
    for found in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            total += found.lstat().st_blocks * 512
    return total
