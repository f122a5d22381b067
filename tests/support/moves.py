"""What may happen to a store between a save and a lookup, so that each tier is asked."""

from collections.abc import Callable

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName

Move = Callable[[Store], Store]


def as_it_is(store: Store) -> Store:
    """Host memory answers."""
    return store


def emptied_host(store: Store) -> Store:
    """Everything leaves host memory, as a flood of other blocks makes it, so disk alone answers."""
    store.flush()
    placement = store._placement
    with placement.lock:
        rows = placement.index.rows_of(tier=TierName.HOST)
        placement.left(TierName.HOST, placement.index.drop_subtree(rows, TierName.HOST))
    return store


def restarted(store: Store) -> Store:
    """Another owner, that has what is on disk."""
    store.close()
    return open_store(store.config.home, host="8MiB")
