"""Row 6: the device fails one call in so many, for long: never a wrong byte, never an exit."""

import errno
import random
from pathlib import Path

import pytest

from kvstore.tiers.base import MissReason, TierName
from support.checks import assert_at_rest
from support.stepping import Stepping

PROMPTS = 50


def go_on(case: Stepping, operations: int, seed: int) -> dict[str, int]:
    """Random saves and loads of so many blocks. Returns: how many loads ended how."""
    chance = random.Random(seed)
    ends = {"whole": 0, "part": 0, "none": 0, "disk_tokens": 0}
    while case.operations < operations:
        if chance.random() < 0.1:
            case.save(chance.randrange(PROMPTS))
            case.write(2)
        else:
            result = case.ask(chance.randrange(PROMPTS))
            whole = result.tokens == case.blocks * 4
            ends["whole" if whole else "part" if result.tokens else "none"] += 1
            ends["disk_tokens"] += result.by_tier[TierName.DISK]
        if chance.random() < 0.5:
            case.forget_host()
        case.clock.advance(0.1)
        case.write(1)
    return ends


def check(case: Stepping, ends: dict[str, int]) -> None:
    """Nothing wrong was served, nothing leaked, and the disk is itself again."""
    case.device.fault = lambda name: 0
    case.device.short = 0
    case.device.late_s = 0.0
    assert case.wrong == 0
    assert ends["whole"] and ends["disk_tokens"]
    assert case.seconds_until_written(10_000) <= 5.0
    assert_at_rest(case.store)
    case.forget_host()
    assert case.ask(10_000).by_tier[TierName.DISK] == case.blocks * 4
    assert case.wrong == 0
    case.store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "blocks"), [(32, 100_000), (1000, 10_000)])
def test_06_one_call_in_so_many_fails(tmp_path: Path, rate: int, blocks: int) -> None:
    case = Stepping(tmp_path / "s", blocks=16, block_bytes=3_500)
    case.device.one_in(rate)
    ends = go_on(case, blocks, seed=rate)
    injected = sum(case.device.injected.values())
    calls = case.device.operations
    print(f"EIO 1 in {rate}: {blocks} blocks, {calls} calls, {injected} failed, {ends}")
    assert calls > blocks / 5 and 0.4 * calls / rate < injected < 2 * calls / rate
    check(case, ends)


@pytest.mark.slow
def test_06_short_and_late_reads(tmp_path: Path) -> None:
    case = Stepping(tmp_path / "s", blocks=16, block_bytes=11_000)
    case.device.short, case.device.late_s = 5, 0.0005
    case.device.one_in(500)
    ends = go_on(case, 6_000, seed=1)
    injected = case.device.injected
    print(f"short and late: {dict(injected)}, {ends}")
    assert injected["short"] > 100 and injected["late"] > 10
    check(case, ends)


def test_a_device_that_reads_nothing_is_off_and_drops_nothing(tmp_path: Path) -> None:
    case = Stepping(tmp_path / "s")
    for seed in range(8):
        case.save(seed)
    case.store.flush()
    case.save(100)  # in host memory alone
    case.forget_host()
    blocks = case.store.stats()["tiers"]["disk"]["blocks"]
    case.device.fault = lambda name: errno.EIO if name == "preadv" else 0
    reasons = [case.ask(seed).reason for seed in range(8)]
    assert MissReason.OFF in reasons and all(case.ask(seed).tokens == 0 for seed in range(8))
    counters = case.store.counters()
    assert counters["disk_times.off"] == 1 and counters["disk_state"] == 2
    assert counters["misses.off"] > 0 and counters["bad_blocks.disk"] == 0
    with case.engine.space.sequence(case.tokens(3)).lookup() as ticket:
        assert ticket.blocks == 0 and ticket.misses == {MissReason.OFF: case.blocks * 4}
    assert case.ask(100).tokens == case.blocks * 4  # what host memory has
    asked = case.device.calls["preadv"]
    for _ in range(40):  # Four seconds: a probe each second, nothing else.
        case.clock.advance(0.1)
        case.write()
        case.ask(5)
    assert 3 <= case.device.calls["preadv"] - asked <= 12
    kept = case.store.stats()["tiers"]["disk"]["blocks"]
    assert kept == blocks + case.blocks  # Prompt 100 was written meanwhile, nothing was dropped.
    case.device.fault = lambda name: 0
    case.clock.advance(1.0)
    case.write()
    assert case.store.counters()["disk_state"] == 0
    assert all(case.ask(seed).tokens == case.blocks * 4 for seed in range(8))
    assert case.wrong == 0
    assert_at_rest(case.store)
    case.store.close()


def test_one_bad_block_is_dropped_with_what_follows_it(tmp_path: Path) -> None:
    """The device answers otherwise: the block is to blame."""
    case = Stepping(tmp_path / "s")
    case.save(1)
    case.save(2)
    case.store.flush()
    case.forget_host()
    reads = iter([0, 0, 0, 0, errno.EIO, errno.EIO])  # one block, twice; then its segment's header
    case.device.fault = lambda name: next(reads, 0) if name == "preadv" else 0
    result = case.ask(1)
    assert result.tokens < case.blocks * 4 and result.reason is MissReason.IO_ERROR
    counters = case.store.counters()
    assert counters["bad_blocks.disk"] == 1 and counters["disk_times.off"] == 0
    assert case.ask(1).tokens == result.tokens  # the prefix before it stays
    case.save(1)
    case.store.flush()
    case.forget_host()
    assert case.ask(1).tokens == case.ask(2).tokens == case.blocks * 4
    assert_at_rest(case.store)
    case.store.close()


@pytest.mark.long
@pytest.mark.parametrize("rate", [32, 1000])
def test_06_long(tmp_path: Path, rate: int) -> None:
    """10,000,000 operations over 20 stores of different seeds."""
    for seed in range(20):
        case = Stepping(tmp_path / str(seed), blocks=16, block_bytes=3_500)
        case.device.one_in(rate)
        check(case, go_on(case, 500_000, seed))
