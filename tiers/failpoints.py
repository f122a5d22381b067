"""Named places where a test interferes: it stops the process there, or plants a known bug.

In production nothing is armed and nothing is planted, and no setting, file or variable can change
that: only a test that imports this module. A pass then costs one look at an empty container.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

FAILPOINTS = (
    "save.copied",  # pages are in host slots, which no block names yet
    "save.published",  # the slots' magics are written, the index does not know them
    "save.indexed",
    "host.evict",  # victims have left the index, their slots are still published
    "host.steal",  # a segment of host memory is about to change its class
    "writeback.take",  # a group was chosen
    "disk.write",  # before the first byte of a group
    "disk.written",  # before the sync
    "disk.synced",  # before the commit
    "catalogue.commit",  # in the transaction, before LMDB writes
    "catalogue.committed",
    "writeback.publish",  # committed, the index does not know
    "disk.evict",  # victims have left the index, their rows are still in the catalogue
    "disk.free",  # a removal is committed, the slots are not free yet
    "disk.reuse",  # a slot that held a block was given out again
    "disk.add_segment",  # a segment file is made, the catalogue does not know
    "disk.steal",  # a segment on disk is about to change its class
    "start.rebuild",  # a damaged catalogue is about to be replaced
    "start.recover",  # the catalogue was read, the index is empty
    "start.takeover",  # a former owner's arena was scanned
    "invalidate.dropped",  # blocks have left the tiers in memory, nothing durable says so
    "invalidate.noted",  # the floors are durable, removals are not committed
    "invalidate.settled",
    "resize.give_back",  # a segment of host memory has no class, its memory is still taken
    "resize.drop",  # a segment's blocks are gone by a commit, its file is about to be removed
    "resize.dropped",  # its file is gone, the catalogue does not know
    "resize.shrink",  # store.toml has the lower capacity, the volumes' headers still the higher
    "resize.grow",  # the volumes' headers have the higher capacity, store.toml still the lower
    "stop.mark",  # the catalogue is closed, the mark of a clean stop not written
)
BUGS = (
    "skip_checksum",  # a payload is not verified
    "publish_before_sync",  # a row is committed before its bytes are durable
    "reuse_before_commit",  # a slot is free before its block's removal is committed
    "hold_by_timer",  # a load's hold ends before its copy
    "ignore_short_read",  # a read that ended early counts as whole
    "keep_children",  # a dropped block's descendants stay
    "leaf_first",  # write-back does not care for ancestors
)

_armed: dict[str, Callable[[], None]] = {}
_planted: set[str] = set()


def reach(name: str) -> None:
    """Pass a failpoint: whatever a test armed it with happens now, on this thread."""
    if _armed and name in _armed:
        _armed[name]()


def planted(bug: str) -> bool:
    """Whether a test planted this bug."""
    return bug in _planted


@contextmanager
def armed(name: str, action: Callable[[], None]) -> Iterator[None]:
    """For tests: `action` runs whenever the failpoint is reached, until the block ends."""
    if name not in FAILPOINTS:
        raise ValueError(f"no failpoint {name!r}; see FAILPOINTS")
    _armed[name] = action
    try:
        yield
    finally:
        del _armed[name]


@contextmanager
def plant(bug: str) -> Iterator[None]:
    """For tests: the code has this bug until the block ends."""
    if bug not in BUGS:
        raise ValueError(f"no bug {bug!r} can be planted; see BUGS")
    _planted.add(bug)
    try:
        yield
    finally:
        _planted.discard(bug)
