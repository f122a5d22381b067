"""Files that fail: each failure is an outcome, and nothing of a failed group is ever served."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.tiers.disk_outcomes import IoFault, WriteFailed, WriteFault, Written
from kvstore.tiers.io import aligned_buffer
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.record_read import RecordCheck
from support.disk_blocks import (
    LARGE,
    SMALL,
    FaultyIo,
    block,
    found_blocks,
    open_rig,
)

SLOT = RecordFormat.of(SMALL).slot_bytes


def test_bytes_are_synced_before_the_row_is_committed(tmp_path: Path) -> None:
    io = FaultyIo()
    rig = open_rig(tmp_path / "d", io)
    rig.write(range(3))
    io.calls.clear()
    volume = rig.tier._volumes[0]
    commit = volume.journal.commit
    volume.journal.commit = lambda rows: (io.calls.append("commit"), commit(rows))[1]  # type: ignore[func-returns-value]
    rig.write([5, 6, 7])
    kinds = [name for name in io.calls if name != "pread"]
    assert set(kinds[:-2]) == {"pwritev"} and kinds[-2:] == ["fdatasync", "commit"]
    rig.tier.close()


def test_a_failed_sync_abandons_the_segment_for_good(tmp_path: Path) -> None:
    io = FaultyIo()
    rig = open_rig(tmp_path / "d", io)
    stored = dict(zip(range(20), rig.write(range(20))[0].tolist(), strict=True))
    segment_of = {n: slot // rig.tier.per for n, slot in stored.items()}
    assert set(segment_of.values()) == {0, 1}
    slots = rig.reserve(4)
    assert {slot // rig.tier.per for slot in slots.tolist()} == {1}
    io.fail = lambda name: errno.EIO if name == "fdatasync" else 0
    outcome = rig.put(slots, [block(n) for n in range(50, 54)])
    io.fail = lambda name: 0
    assert isinstance(outcome, WriteFailed) and outcome.reason is WriteFault.SYNC_FAILED
    lost = {n for n, segment in segment_of.items() if segment == 1}
    assert sorted(outcome.abandoned.tolist()) == sorted(stored[n] for n in lost)
    # Nothing of it is handed out again, though the file is there until the next start.
    again, written = rig.write(range(60, 70))
    assert isinstance(written, Written)
    assert 1 not in {slot // rig.tier.per for slot in again.tolist()}
    rig.tier.check_integrity()
    rig.tier.close()
    rig = open_rig(tmp_path / "d")
    assert set(found_blocks(rig)) == set(range(20)) - lost | set(range(60, 70))
    rig.tier.close()


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, WriteFault.NO_SPACE), (errno.EIO, WriteFault.IO_ERROR)]
)
def test_a_failed_write_gives_its_slots_back(
    tmp_path: Path, number: int, reason: WriteFault
) -> None:
    io = FaultyIo()
    with ThreadPoolExecutor(4) as pool:
        rig = open_rig(tmp_path / "d", io, submit=pool.submit, threads=4)
        old, _ = rig.write(range(4))
        used = rig.tier.used_bytes
        failures = iter([0, 0, number])
        slots = rig.reserve(40)
        io.fail = lambda name: next(failures, 0) if name == "pwritev" else 0
        outcome = rig.put(slots, [block(n) for n in range(10, 50)], old)
        assert isinstance(outcome, WriteFailed) and outcome.reason is reason
        assert rig.tier.used_bytes == used
        # The removals of the failed group ride on the next commit.
        assert isinstance(rig.write(range(70, 80))[1], Written)
        rig.tier.check_integrity()
        rig.tier.close()
    rig = open_rig(tmp_path / "d")
    assert sorted(found_blocks(rig)) == list(range(70, 80))
    rig.tier.close()


@pytest.mark.parametrize("failures", [1, 2], ids=["the old header is written again", "it is not"])
def test_blocks_outlive_a_change_of_class_that_failed(tmp_path: Path, failures: int) -> None:
    """The new header reached the file, but nobody can know: the segment keeps its class."""
    rig = open_rig(tmp_path / "d")
    rig.tier.remove(rig.write(range(4))[0])
    rig.tier.flush_removals()
    volume, left = rig.tier._volumes[0], iter(range(failures))
    rewrite = volume.rewrite_header

    def rewrite_and_fail(segment: int, slot_bytes: int) -> None:
        attempt = next(left, None)
        if attempt in (None, 0):
            rewrite(segment, slot_bytes)
        if attempt is not None:
            raise OSError(errno.EIO, "Input/output error")

    volume.rewrite_header = rewrite_and_fail  # type: ignore[method-assign]
    assert not rig.tier.reassign(0, RecordFormat.of(LARGE).slot_bytes)
    slots, written = rig.write(range(10, 14))
    assert isinstance(written, Written) and set(slots // rig.tier.per) == {0}
    rig.tier.close()
    rig = open_rig(tmp_path / "d")
    assert sorted(found_blocks(rig)) == list(range(10, 14))
    assert all(rig.good(slot, number) for number, slot in found_blocks(rig).items())
    rig.tier.close()


def test_a_segment_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    io = FaultyIo()
    rig = open_rig(tmp_path / "d", io)
    io.fail = lambda name: errno.ENOSPC if name == "allocate" else 0
    assert len(rig.reserve(4)) == 0
    io.fail = lambda name: 0
    assert sorted(p.suffix for p in (tmp_path / "d").glob("*.seg")) == []
    assert len(rig.reserve(4)) == 0  # It is not tried again at once.
    rig.tier.health.retry_now()
    assert isinstance(rig.write(range(4))[1], Written)
    rig.tier.close()


def test_a_read_is_tried_twice_and_then_a_fault(tmp_path: Path) -> None:
    io = FaultyIo()
    rig = open_rig(tmp_path / "d", io)
    slot = int(rig.write([1])[0][0])
    buffer = aligned_buffer(SLOT)
    failures = iter([errno.EIO])
    io.fail = lambda name: next(failures, 0)
    assert rig.tier.read_into(slot, buffer) is None
    assert buffer == block(1).record
    io.fail = lambda name: errno.EIO
    assert rig.tier.read_into(slot, buffer) == IoFault(errno.EIO, "EIO", device=True)
    fault = rig.tier.read_record(slot, buffer, RecordCheck(SMALL))
    assert isinstance(fault, IoFault) and fault.errno == errno.EIO
    io.fail = lambda name: 0
    os.truncate(tmp_path / "d" / "00000000.seg", 4096 + SLOT - 4096)
    fault = rig.tier.read_into(slot, buffer)
    assert isinstance(fault, IoFault) and fault.errno == 0
    assert isinstance(rig.tier.read_into(1 << 30, buffer), IoFault)
    rig.tier.close()
