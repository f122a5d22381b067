"""Every bug that can be planted is caught: its check passes without it, and fails with it.

A bug without a check in this file fails too.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import load_config
from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from kvstore.tiers.failpoints import BUGS, armed, plant
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.writeback import GROUP_BLOCKS
from support.disk_blocks import Rig, block, fill, found_blocks, open_rig
from support.engine import WAIT_S, Engine, prompt
from support.images import copy_store, image_at
from support.layouts import small_layout
from support.moves import emptied_host

BLOCK = 4
BLOCKS = 100  # more than a group of write-back
TOKENS = prompt(BLOCKS * BLOCK + 1)
PAGE = 4096


def engine_of(store: Store, blocks: int = BLOCKS) -> Engine:
    return Engine(store.namespace(small_layout(BLOCK), model="m"), blocks)


def open_small(directory: Path, **settings: Any) -> Store:
    return open_store(directory, host="8MiB", disk_capacity="32MiB", **settings)


class PowerLoss(Exception):
    """The instant at which the power goes."""


class Unsynced(FileIo):
    """Knows what each page of a segment held before the writes that are not synced yet."""

    def __init__(self) -> None:
        self.before: dict[str, list[tuple[int, bytes]]] = {}

    def pwritev(self, fd: int, buffers: Any, offset: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith(".seg"):
            old = aligned_buffer(sum(map(len, buffers)))
            super().pread(fd, old, offset)
            self.before.setdefault(name, []).append((offset, bytes(old)))
        super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.before.pop(os.readlink(f"/proc/self/fd/{fd}"), None)

    def lose(self, copy: Path) -> None:
        """In a copy of the volume: what was not synced is as it was."""
        for name, writes in self.before.items():
            with (copy / Path(name).name).open("r+b") as file:
                for offset, old in reversed(writes):
                    file.seek(offset)
                    file.write(old)


class ShortOnce(FileIo):
    """The first read of a record ends in the middle, as a signal or the system may end it."""

    def __init__(self) -> None:
        self.left = 1

    def preadv(self, fd: int, buffer: Any, offset: int) -> int:
        if self.left and offset >= PAGE and len(buffer) >= 2 * PAGE:
            self.left -= 1
            return super().preadv(fd, memoryview(buffer)[:PAGE], offset)
        return super().preadv(fd, buffer, offset)


def all_good(rig: Rig) -> bool:
    return all(rig.good(slot, number) for number, slot in found_blocks(rig).items())


def flipped_payload(directory: Path) -> None:
    """A bit of a payload on disk turns over: a miss."""
    with open_small(directory) as store:
        engine_of(store).save(TOKENS)
    with (directory / "disk0" / "00000000.seg").open("r+b") as file:
        file.seek(PAGE + PAGE + 3)  # header of the file, header of the record
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with open_small(directory) as store:
        assert engine_of(store).ask(TOKENS).tokens < BLOCKS * BLOCK  # checks every byte


def power_loss_after_a_commit(directory: Path) -> None:
    """What a catalogue names was synced before."""
    io, copy = Unsynced(), directory.with_name("after")
    rig = open_rig(directory, io)

    def lose_power() -> None:
        copy_store(directory, copy)
        io.lose(copy)
        raise PowerLoss

    rig.write(range(8))
    rig.tier.flush_removals()
    slots = rig.reserve(8)
    with armed("catalogue.committed", lose_power), pytest.raises(PowerLoss):
        rig.put(slots, [block(n) for n in range(8, 16)])
    rig = open_rig(copy)
    assert len(found_blocks(rig)) == 16
    assert all_good(rig)
    rig.tier.close()


def kill_before_a_removal_is_committed(directory: Path) -> None:
    """A slot whose removal is not committed is not written to, for want of any other."""
    rig = open_rig(directory, capacity_bytes=1 << 20)
    slots = fill(rig)
    rig.tier.remove(np.array(sorted(slots.values())[:8], np.int64))
    free = rig.reserve(8)
    with image_at("disk.written", directory, directory.with_name("after")):
        if len(free):
            rig.put(free, [block(n) for n in range(5000, 5000 + len(free))])
        else:
            copy_store(directory, directory.with_name("after"))
    rig.tier.close()
    rig = open_rig(directory.with_name("after"), capacity_bytes=1 << 20)
    assert found_blocks(rig).keys() == slots.keys()
    assert all_good(rig)
    rig.tier.close()


def pressure_while_a_load_copies(directory: Path) -> None:
    """A load pauses before its copy; what it holds must not give way to others."""
    copying, resume = threading.Event(), threading.Event()
    with open_store(host="4MiB") as store:
        engine = engine_of(store)
        sequence, _ = engine.save(TOKENS)
        fill_pages = engine.pool.fill

        def fill_late(*arguments: Any) -> None:
            copying.set()
            assert resume.wait(WAIT_S)
            fill_pages(*arguments)

        engine.pool.fill = fill_late  # type: ignore[method-assign]
        engine.clear()
        table = engine.table(BLOCKS)
        load = sequence_ticket(engine).load(engine.pool, table)
        assert copying.wait(WAIT_S)
        other = engine_of(store)
        for seed in range(2, 12):
            other.save(prompt(BLOCKS * BLOCK + 1, seed))
        resume.set()
        assert engine.wrong(sequence, table, load.result(WAIT_S).tokens) == []


def sequence_ticket(engine: Engine) -> Any:
    return engine.space.sequence(TOKENS).lookup()


def short_read(directory: Path) -> None:
    """The rest is read, and the block is a hit."""
    with open_small(directory) as store:
        engine_of(store).save(TOKENS)
    io = ShortOnce()
    with open_small(directory, io=io) as store:
        io.left = 1
        assert engine_of(store).ask(TOKENS).tokens == BLOCKS * BLOCK
        assert io.left == 0


def drop_in_the_middle(directory: Path) -> None:
    """A dropped block takes along all below it."""
    with open_small(directory) as store:
        engine_of(store).save(TOKENS)
        emptied_host(store)
        placement = store._placement
        with placement.lock:
            rows = placement.index.rows_of(tier=TierName.DISK)
            placement.drop_bad(int(rows[placement.index.rows.depth[rows] == 5][0]), TierName.DISK)
        store.check_integrity()
        assert engine_of(store).ask(TOKENS).tokens == 5 * BLOCK


def stop_after_one_group(directory: Path) -> None:
    """What a kill after the first group leaves on disk is a prefix, and can be used."""
    copy = directory.with_name("after")
    config = load_config(directory, host="8MiB", disk_capacity="32MiB")
    with Store(config, threads=False) as store:  # One group after the other.
        engine = engine_of(store)
        sequence, table = engine.space.sequence(TOKENS), engine.table(BLOCKS)
        engine.compute(sequence, table)
        sequence.save(engine.pool, table)
        store.flush()
        placement = store._placement
        with placement.lock:  # Its first block is bad on disk: all are to be written once more.
            rows = placement.index.rows_of(tier=TierName.DISK)
            placement.drop_bad(int(rows[placement.index.rows.depth[rows] == 0][0]), TierName.DISK)
        with image_at("catalogue.committed", directory, copy):
            store.flush()
    with open_small(copy) as store:
        assert engine_of(store).ask(TOKENS).tokens == GROUP_BLOCKS * BLOCK


CHECKS: dict[str, Callable[[Path], None]] = {
    "skip_checksum": flipped_payload,
    "publish_before_sync": power_loss_after_a_commit,
    "reuse_before_commit": kill_before_a_removal_is_committed,
    "hold_by_timer": pressure_while_a_load_copies,
    "ignore_short_read": short_read,
    "keep_children": drop_in_the_middle,
    "leaf_first": stop_after_one_group,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    check = CHECKS[bug]
    (tmp_path / "without").mkdir()
    check(tmp_path / "without" / "store")
    (tmp_path / "with").mkdir()
    with plant(bug), pytest.raises(AssertionError):
        check(tmp_path / "with" / "store")


def test_each_check_has_its_bug() -> None:
    assert CHECKS.keys() == set(BUGS)
