"""Outcomes of the tiers: a closed set, so that every caller handles every one."""

from enum import StrEnum


class MissReason(StrEnum):
    """Why a block was not served. Every miss is counted under exactly one of these."""

    ABSENT = "absent"  # never stored, as far as the store remembers
    EVICTED = "evicted"  # was stored and gave way to others
    INVALIDATED = "invalidated"  # dropped on request
    STARTING = "starting"  # the disk's catalogue is still being read
    COLLISION = "collision"  # another block carries this key
    EXPIRED = "expired"  # the ticket's leases ran out before the load
    DECLINED = "declined"  # loading would have cost more than computing
    CHECKSUM = "checksum"  # stored bytes failed their check
    HEADER = "header"  # the stored header is not this block's
    IO_ERROR = "io_error"  # the device did not deliver
    NO_ROOM = "no_room"  # no memory to land the block in
    TIMEOUT = "timeout"  # the deadline passed first
    OFF = "off"  # the tier is off


class SaveDrop(StrEnum):
    """Why a block was not saved. Every drop is counted under exactly one of these."""

    PRESENT = "present"  # already stored: nothing to do
    HOST_FULL = "host_full"  # every slot is in use or not yet written back
    QUEUE_FULL = "queue_full"  # saves come faster than memory can take them
    COLLISION = "collision"  # another block carries this key
    PARENT_GONE = "parent_gone"  # the block before it is not stored
    STARTING = "starting"  # the disk's catalogue is still being read
    CLOSED = "closed"  # the store was closing
    INVALIDATED = "invalidated"  # its namespace was invalidated after the request began


class TierName(StrEnum):
    """The tiers, from the fastest to the slowest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
