"""Checking a stored block before a byte of it reaches an engine: header, every run, and identity.

A hash found the block; here it is compared with the tokens that the request itself carries.
"""

import numpy as np
import numpy.typing as npt

from kvstore.hashing.checksum import verify_runs
from kvstore.placement import Placement
from kvstore.sequence import Sequence
from kvstore.tiers.base import MissReason
from kvstore.tiers.disk_outcomes import BadRun, IoFault
from kvstore.tiers.failpoints import planted
from kvstore.tiers.record import HeaderFault

NO_MEDIA = bytes(32)


def read_block(
    placement: Placement, sequence: Sequence, block: int, row: int, disk_slot: int, host_slot: int
) -> MissReason | None:
    """Read a record from disk into a host slot and check it: header, every run, identity.

    Returns: None | OFF (the device fails: the block may be good) | IO_ERROR, CHECKSUM, HEADER.
    """
    assert placement.disk is not None
    space = sequence.space
    view = placement.host.record_view(host_slot, space.record.slot_bytes)
    fault = placement.disk.read_record(disk_slot, view, space.check)
    if isinstance(fault, IoFault):
        placement.counters.add("read_faults.disk")
        return MissReason.OFF if fault.device else MissReason.IO_ERROR
    if fault is not None:
        bad_bytes = isinstance(fault, BadRun) or fault is HeaderFault.CHECKSUM
        return MissReason.CHECKSUM if bad_bytes else MissReason.HEADER
    header = np.frombuffer(view, np.uint8)[: space.record.header_bytes]
    return _check_identity(placement, sequence, block, row, header)


def check_host(
    placement: Placement, sequence: Sequence, block: int, row: int, slot: int
) -> MissReason | None:
    """Check a record that lies in a host slot, likewise."""
    record, layout = sequence.space.record, sequence.space.layout
    view = np.frombuffer(placement.host.record_view(slot, record.slot_bytes), np.uint8)
    header = view[: record.header_bytes]
    fault = record.check_header(header)
    if fault is not None:
        return MissReason.CHECKSUM if fault is HeaderFault.CHECKSUM else MissReason.HEADER
    payload = view[record.header_bytes : record.header_bytes + record.payload_bytes]
    sums = np.ascontiguousarray(record.checksums(header[None])[0])
    if (
        not planted("skip_checksum")
        and verify_runs(payload, layout.run_offsets, layout.run_lengths, sums) >= 0
    ):
        return MissReason.CHECKSUM
    return _check_identity(placement, sequence, block, row, header)


def _check_identity(
    placement: Placement, sequence: Sequence, block: int, row: int, header: npt.NDArray[np.uint8]
) -> MissReason | None:
    """Whether a whole header is this very block's, by the sequence's own tokens."""
    fault = sequence.space.record.check_identity(
        header,
        namespace=sequence.space.digest,
        key=sequence.keys[block].tobytes(),
        parent=sequence.parent_key(block),
        generation=int(placement.index.rows.content[row]),
        tokens=sequence.block_tokens(block, block + 1)[0],
    )
    media = sequence.media.get(block, NO_MEDIA)
    same = fault is None and header[96:128].tobytes() == media
    return None if same else MissReason.HEADER
