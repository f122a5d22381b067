"""What the parts of a volume take on its device at most, in bytes. Pure."""

from collections.abc import Iterable
from pathlib import Path

from kvstore.tiers.catalogue import BASE_BYTES, LOCK_BYTES, map_bytes
from kvstore.tiers.catalogue_row import worst_row_bytes
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.segment import HEADER_BYTES, FileHeader

PAGE = 4096
FIXED_BYTES = 8 * PAGE + LOCK_BYTES  # Two directories, volume, clean and their .new, with room.
SEGMENT_ROW_BYTES = 256  # Of the segments table, and of the directory's own blocks.
EXTENTS_PER_BLOCK = 170  # Half of what a block of ext4's extent tree holds: it splits in halves.


def segment_cost(segment_bytes: int, slot_bytes: int) -> int:
    """Bytes a segment takes at most: its file, and the blocks that list its extents.

    A slot written into reserved blocks may split an extent; ext4 counts such blocks to the file.
    """
    extents = (segment_bytes - HEADER_BYTES) // slot_bytes + 2
    return segment_bytes + PAGE * (1 + -(-extents // EXTENTS_PER_BLOCK)) + SEGMENT_ROW_BYTES


def namespace_cost(namespace: Namespace) -> int:
    """Bytes one namespace takes in the catalogue at worst."""
    size = len(namespace.pack()) + 32
    return min(PAGE, 4 * size) if size < 2000 else PAGE * (1 + -(-size // PAGE))


def refuse_too_small(budget_bytes: int, segment_bytes: int) -> None:
    """Raise ConfigError for a share of the capacity that holds no segment with its rows."""
    rows = (segment_bytes - HEADER_BYTES) // 8192 * worst_row_bytes(16) + SEGMENT_ROW_BYTES
    least = FIXED_BYTES + segment_cost(segment_bytes, 8192) + map_bytes(rows, PAGE)
    if budget_bytes < least:
        raise ConfigError(
            f"each disk path needs at least {least} bytes for one segment of {segment_bytes}; "
            "raise disk_capacity or lower the segment size"
        )


def refuse_over_budget(
    path: Path,
    budget_bytes: int,
    segment_bytes: int,
    headers: Iterable[FileHeader],
    catalogue_bytes: int,
) -> None:
    """Raise ConfigError if what is there already takes more than the budget."""
    need = FIXED_BYTES + max(catalogue_bytes, BASE_BYTES)
    need += sum(segment_cost(segment_bytes, header.slot_bytes or 8192) for header in headers)
    if need > budget_bytes:
        raise ConfigError(
            f"{path} takes {need} bytes already and its share of the disk capacity is "
            f"{budget_bytes}; raise disk_capacity, or remove the directory to start anew"
        )
