"""What a check of a store can find: why a block is bad, and where it lies."""

from dataclasses import dataclass
from enum import StrEnum


class BadReason(StrEnum):
    """Why a block is bad; the first that applies. The order is a file format: only append."""

    CATALOGUE = "catalogue"  # a volume's catalogue cannot be read
    CATALOGUE_ROW = "catalogue_row"  # a row of it is damaged
    NO_SLOT = "no_slot"  # the row names a slot that is in no segment
    NO_NAMESPACE = "no_namespace"  # the row names a namespace that the catalogue lost
    NO_PARENT = "no_parent"  # the block before it is not there
    SEGMENT_HEADER = "segment_header"  # the first page of a segment file is damaged
    IO_ERROR = "io_error"  # the device did not deliver, or the file ends too early
    HEADER_MAGIC = "header_magic"
    HEADER_VERSION = "header_version"
    HEADER_CHECKSUM = "header_checksum"
    HEADER_LENGTH = "header_length"
    HEADER_NAMESPACE = "header_namespace"
    HEADER_KEY = "header_key"
    HEADER_PARENT = "header_parent"
    HEADER_TOKENS = "header_tokens"
    HEADER_GENERATION = "header_generation"
    PAYLOAD_CHECKSUM = "payload_checksum"


# What only reading a record finds.
FOUND_BY_READING = frozenset(BadReason) - {
    BadReason.CATALOGUE,
    BadReason.CATALOGUE_ROW,
    BadReason.NO_SLOT,
    BadReason.NO_NAMESPACE,
    BadReason.NO_PARENT,
    BadReason.SEGMENT_HEADER,
}


@dataclass(frozen=True)
class BadBlock:
    """A block whose bytes are not those that were saved, or that can never be found.

    key: hex, "" where no row names it.  place: file, and the byte offset of the record.
    segment, index: its slot; -1 where it is no slot.
    """

    key: str
    reason: BadReason
    place: str
    segment: int = -1
    index: int = -1

    def document(self) -> dict[str, str]:
        """As `kvstore verify --json` prints it."""
        return {"key": self.key, "reason": self.reason, "place": self.place}
