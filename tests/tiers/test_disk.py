"""The disk tier: what it names is there, whole; slots come and go by commits."""

import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.native import build
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_outcomes import BadRun, Written
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import HeaderFault, RecordFormat
from kvstore.tiers.record_read import RecordCheck
from support.disk_blocks import (
    LARGE,
    LONGER,
    MIB,
    SEGMENT,
    SMALL,
    block,
    count_rows,
    fill,
    found_blocks,
    open_rig,
)

SLOT = RecordFormat.of(SMALL).slot_bytes


def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    stored = {
        layout: dict(zip(numbers, rig.write(list(numbers), layout)[0].tolist(), strict=True))
        for layout, numbers in (
            (SMALL, range(0, 20)),
            (LONGER, range(100, 117)),
            (LARGE, range(200, 203)),
        )
    }
    for again in range(3):
        for layout, blocks in stored.items():
            assert all(rig.good(slot, number, layout) for number, slot in blocks.items())
        rig.tier.check_integrity()
        rig.tier.close()
        if again == 1:
            (tmp_path / "d" / "clean").unlink()  # as after a kill: the catalogue is walked first
        rig = open_rig(tmp_path / "d")
        assert found_blocks(rig) == {n: s for blocks in stored.values() for n, s in blocks.items()}
        assert rig.loaded.rebuilt == () and rig.loaded.damaged == 0
        assert {tokens: len(rows) for tokens, rows in rig.loaded.rows.items()} == {16: 23, 40: 17}
        assert rig.tier.namespaces()[rig.name].layout == SMALL.canonical()
    rig.tier.close()


def test_reads_check_the_same_with_and_without_the_compiled_helper(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    slots, _ = rig.write(range(4))
    segment = tmp_path / "d" / "00000000.seg"
    damage = {0: 4096 + 300, 1: 4096 + SLOT + 4096 + 2500, 2: 4096 + 2 * SLOT}
    with segment.open("r+b") as file:
        for at in damage.values():
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    os.sync()
    check, buffer = RecordCheck(SMALL), aligned_buffer(SLOT)

    def faults() -> list[Any]:
        return [rig.tier.read_record(slot, buffer, check) for slot in slots.tolist()]

    wanted = [HeaderFault.CHECKSUM, BadRun(2), HeaderFault.MAGIC, None]
    assert faults() == wanted
    with build.forced_fallback():
        assert faults() == wanted
    other = RecordCheck(Layout(16, SMALL.groups * 2))
    longer = aligned_buffer(other.record.slot_bytes)
    assert rig.tier.read_record(int(slots[3]), longer, other) is HeaderFault.LENGTH
    with pytest.raises(ValueError, match="bytes"):
        rig.tier.read_record(int(slots[3]), buffer[:4096], check)
    rig.tier.close()


def test_a_freed_slot_is_reused_only_after_its_removal_is_committed(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    stored = fill(rig)
    gone = np.array([stored[n] for n in range(8)], np.int64)
    rig.tier.remove(gone)
    rig.tier.remove(gone)  # twice is once
    assert len(rig.reserve(1)) == 0
    assert rig.tier.removing() == 8
    assert rig.tier.flush_removals() is None
    free = rig.reserve(16)
    assert sorted(free.tolist()) == sorted(gone.tolist())
    # A group's removals ride on its own commit.
    more = np.array([stored[n] for n in range(8, 16)], np.int64)
    assert isinstance(rig.put(free, [block(n) for n in range(900, 908)], more), Written)
    assert rig.tier.free(SLOT) == 8
    rig.tier.close()
    rig = open_rig(tmp_path / "d")
    assert sorted(found_blocks(rig)) == [*range(16, len(stored)), *range(900, 908)]
    rig.tier.close()


def test_a_class_gets_a_segment_of_another(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    stored = fill(rig)
    large = RecordFormat.of(LARGE).slot_bytes
    assert len(rig.reserve(1, LARGE)) == 0 and not rig.tier.has_room(large)
    assert not rig.tier.reassign(0, large), "blocks of the old class are left"
    victims = [slot for slot in stored.values() if slot // rig.tier.per == 0]
    rig.tier.remove(np.array(victims, np.int64))
    assert not rig.tier.reassign(0, large), "their removal is not committed"
    rig.tier.flush_removals()
    assert rig.tier.reassign(0, large)
    slots, outcome = rig.write(range(800, 803), LARGE)
    assert isinstance(outcome, Written)
    assert {slot // rig.tier.per for slot in slots.tolist()} == {0}
    rig.tier.check_integrity()
    rig.tier.close()
    rig = open_rig(tmp_path / "d")
    found = found_blocks(rig)
    assert all(rig.good(found[n], n, LARGE) for n in range(800, 803))
    kept = {n: s for n, s in stored.items() if s // rig.tier.per != 0}
    assert {n: found[n] for n in kept} == kept
    rig.tier.close()


def test_a_chain_stays_on_its_device_while_there_is_room(tmp_path: Path) -> None:
    rig = open_rig([tmp_path / "a", tmp_path / "b"])
    first = rig.reserve(1)
    home = int(first[0]) // rig.tier.per % 2
    more = rig.reserve(100, near=int(first[0]))
    assert {slot // rig.tier.per % 2 for slot in more.tolist()} == {home}
    rest = rig.reserve(10_000, near=int(first[0]))
    assert {slot // rig.tier.per % 2 for slot in rest.tolist()} == {0, 1}
    rig.tier.cancel(np.concatenate([first, more, rest]))
    assert rig.tier.used_bytes == 0
    rig.tier.close()


def test_a_lost_device_costs_its_own_blocks(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    rig = open_rig(paths)
    stored = fill(rig)
    per = rig.tier.per
    rig.tier.close()
    shutil.rmtree(paths[0])
    rig = open_rig(paths)
    assert found_blocks(rig) == {n: s for n, s in stored.items() if s // per % 2 == 1}
    rig.tier.close()


def test_misused_groups_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    rig = open_rig(tmp_path / "d")
    slots = rig.reserve(2)
    blocks = [block(1), block(2)]
    for bad_slots, bad_blocks in (
        (slots[:1], blocks),
        (slots[[0, 0]], blocks),
        (slots + 50, blocks),
        (slots, [block(1, LONGER), block(2, LONGER)][:1]),
    ):
        with pytest.raises(ValueError):
            rig.put(bad_slots, bad_blocks)
    large = rig.reserve(2, LARGE)
    with pytest.raises(ValueError):
        rig.put(large, blocks)
    assert isinstance(rig.put(slots, blocks), Written)
    rig.tier.close()


def test_groups_written_and_removed_by_many_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        rig = open_rig(tmp_path / "d", submit=pool.submit, threads=3)
        stored: dict[int, int] = {}
        lock = threading.Lock()

        def work(worker: int) -> None:
            rng = random.Random(worker)
            for turn in range(20):
                first = worker * 1000 + turn * 8
                with lock:
                    ours = [n for n in stored if n // 1000 == worker]
                    gone = rng.sample(ours, min(len(ours), 8)) if turn > 6 else []
                    victims = np.array([stored.pop(n) for n in gone], np.int64)
                slots = rig.reserve(8)
                if len(slots) < 8:
                    rig.tier.cancel(slots)
                    rig.tier.remove(victims)
                    rig.tier.flush_removals()
                    continue
                blocks = [block(n) for n in range(first, first + 8)]
                assert isinstance(rig.put(slots, blocks, victims), Written)
                with lock:
                    stored.update(zip(range(first, first + 8), slots.tolist(), strict=True))

        with ThreadPoolExecutor(4) as workers:
            list(workers.map(work, range(1, 5)))
        rig.tier.check_integrity()
        assert all(rig.good(slot, n) for n, slot in stored.items())
        assert rig.tier.flush_removals() is None
        assert rig.tier.blocks == len(stored)
        rig.tier.close()
    rig = open_rig(tmp_path / "d")
    assert found_blocks(rig) == stored
    rig.tier.close()


def test_nothing_is_reserved_before_the_catalogue_is_read(tmp_path: Path) -> None:
    open_rig(tmp_path / "d").tier.close()
    tier = DiskTier([tmp_path / "d"], 3 * MIB, SEGMENT, FileIo(), store_id=bytes(range(16)))
    assert len(tier.reserve(SLOT, 4)) == 0 and tier.free(SLOT) == 0
    assert count_rows(tier.load().rows) == 0
    assert len(tier.reserve(SLOT, 4)) == 4
    tier.close()
    tier.close()
