"""How many bytes a commit to a catalogue wrote: LMDB makes its own calls, and does not say."""

from kvstore.tiers.io import thread_written_bytes

PAGE = 4096
PATHS_PAGES = 24  # From the root to the leaves, in four tables and in LMDB's own two.


def commit_bytes(before: int | None, row_bytes: int, removed: int) -> int:
    """Whole pages that this thread wrote since its count was `before`; at least one, of the meta.

    Where the system keeps no such count: what the commit of so many bytes of rows and so many
    removals takes at most, near enough: half-full pages of new rows, a page for each removal.
    """
    after = thread_written_bytes()
    size = PAGE * (PATHS_PAGES + removed) + 2 * row_bytes
    if before is not None and after is not None:
        size = after - before
    return -(-size // PAGE) * PAGE
