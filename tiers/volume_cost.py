"""What the parts of a volume take on its device at most, in bytes. Pure."""

from kvstore.tiers.catalogue import LOCK_BYTES
from kvstore.tiers.catalogue import map_bytes as catalogue_bytes
from kvstore.tiers.catalogue_row import worst_row_bytes
from kvstore.tiers.catalogue_tables import Namespace
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.segment import HEADER_BYTES

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
    least = FIXED_BYTES + segment_cost(segment_bytes, 8192) + catalogue_bytes(rows, PAGE)
    if budget_bytes < least:
        raise ConfigError(
            f"each disk path needs at least {least} bytes for one segment of {segment_bytes}; "
            "raise disk_capacity or lower the segment size"
        )
