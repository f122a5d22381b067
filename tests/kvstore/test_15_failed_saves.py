"""Row 15: a save that failed, or was written in part, is never visible, wherever it failed."""

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.base import TierName
from kvstore.tiers.catalogue import CommitFault
from kvstore.tiers.failpoints import armed
from support.checks import NO_LEAKS, assert_at_rest
from support.stepping import BLOCK, Stepping

OLD = 8  # prompts that were saved without a fault


class CopyFailed(Exception):
    """What a copy engine says when a copy failed."""


def check(case: Stepping, seed: int) -> None:
    """A prompt whose save failed is not there."""
    with case.engine.space.sequence(case.tokens(seed)).lookup() as ticket:
        assert ticket.blocks == 0, seed


def make(path: Path) -> Stepping:
    case = Stepping(path, blocks=2, block_bytes=3_500)
    for seed in range(OLD):
        case.save(seed)
    case.store.flush()
    return case


def finish(case: Stepping) -> None:
    case.device.fault = lambda name: 0
    case.catalogues.fail = lambda: None
    assert case.seconds_until_written(99_999_999) <= 5.0
    assert_at_rest(case.store)
    case.forget_host()
    assert all(case.ask(seed).tokens == case.blocks * BLOCK for seed in range(OLD))
    assert case.wrong == 0
    case.store.close()


def fail_copies(case: Stepping, monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Saves whose copy into host memory fails: at once, in the middle, or as it ends."""
    chance = random.Random(15)
    failed = 0

    copies = case.engine.pool.copies
    gather = copies.gather

    def broken(pages: Any, payloads: Any, sums: Any, ready: Any) -> None:
        nonlocal failed
        failed += 1
        some = chance.randrange(len(pages) + 1)
        if some:
            gather(pages[:some], payloads[:some], sums[:some], ready)
        raise CopyFailed

    def refuse() -> None:
        nonlocal failed
        failed += 1
        raise CopyFailed

    with monkeypatch.context() as patch:
        patch.setattr(copies, "gather", broken)
        for seed in range(1000, 1000 + count * 4 // 5):
            saved = case.save(seed)
            assert saved.saved == 0 and sum(saved.dropped.values()) == case.blocks
            check(case, seed)
    assert case.store.leaks() == NO_LEAKS
    for point in ("save.copied", "save.published"):
        with armed(point, refuse):
            for seed in range(100_000, 100_000 + count // 10):
                assert case.save(seed).saved == 0
                check(case, seed)
    return failed


def fail_writes(case: Stepping, kind: str, count: int) -> int:
    """Groups whose write, sync or commit fails; their blocks leave host memory afterwards."""
    faults = [0]

    def once(name: str) -> int:
        if name == kind and faults[0] == 0:
            faults[0] = 1
            return errno.EIO
        return 0

    def commit() -> CommitFault | None:
        if faults[0]:
            return None
        faults[0] = 1
        return CommitFault.MAP_FULL if kind == "full" else CommitFault.DEVICE

    failed = 0
    for seed in range(1_000_000, 1_000_000 + count):
        assert case.save(seed).saved == case.blocks
        faults[0] = 0
        if kind in {"full", "device"}:
            case.catalogues.fail = commit
        else:
            case.device.fault = once
        case.write(1)
        assert faults[0] == 1
        failed += 1
        case.device.fault, case.catalogues.fail = lambda name: 0, lambda: None
        placement = case.store._placement
        with placement.lock:
            placement.dirty.clear()  # Never written again: only what got there may be seen.
            rows = placement.index.rows_of(tier=TierName.HOST)
            placement.left(TierName.HOST, placement.index.drop_subtree(rows, TierName.HOST))
        check(case, seed)
        case.clock.advance(3.0)
        if kind == "device" or seed % 16 == 0:
            case.write(1)  # Upkeep: new catalogues, files of lost segments.
    return failed


@pytest.mark.slow
def test_15_a_failed_copy_is_never_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    case = make(tmp_path / "s")
    failed = fail_copies(case, monkeypatch, 8000)
    print(f"{failed} copies failed, none visible")
    assert failed == 8000
    finish(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [("pwritev", 1300), ("fdatasync", 200), ("full", 490), ("device", 10)]
)
def test_15_a_failed_write_is_never_visible(
    tmp_path: Path, kind: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    case = make(tmp_path / "s")
    failed = fail_writes(case, kind, count)
    print(f"{failed} times {kind} failed, nothing visible")
    assert failed == count
    if kind == "fdatasync":  # Old prompts may lie in a lost segment: save them again.
        for seed in range(OLD):
            case.save(seed)
        case.store.flush()
    finish(case)


@pytest.mark.long
def test_15_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1,000,000 injected failures."""
    caplog.set_level("CRITICAL")
    case = make(tmp_path / "s")
    assert fail_copies(case, monkeypatch, 900_000) == 900_000
    assert fail_writes(case, "pwritev", 90_000) + fail_writes(case, "full", 10_000) == 100_000
    finish(case)
