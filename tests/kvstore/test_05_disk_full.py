"""Row 5: the disk fills up at any write. Nothing is raised, reads go on, and writes come back."""

import errno
from itertools import count
from pathlib import Path

import pytest

from kvstore.tiers.catalogue import CommitFault
from support.checks import assert_at_rest, disk_usage
from support.failing_device import WRITES
from support.stepping import BACK_S, BLOCK, Stepping


def fill(case: Stepping, first: int, prompts: int) -> None:
    for seed in range(first, first + prompts):
        case.save(seed)
        case.write()
        case.clock.advance(0.3)


def run(path: Path, kth: int, *, cycle: bool, catalogue: CommitFault | None) -> tuple[bool, float]:
    """A store whose device is full from its kth write on, and is emptied later.

    catalogue: the writes are the catalogue's commits, which end with this fault.
    Returns: (whether the kth write came, seconds until writes were back).
    """
    case = Stepping(path)
    fill(case, 0, 3)
    kept = case.disk_seeds(range(3))
    assert kept == [0, 1, 2]
    writes, full = count(1), [True]
    if catalogue is None:
        case.device.fault = lambda name: (
            errno.ENOSPC if name in WRITES and next(writes) >= kth and full[0] else 0
        )
    else:
        case.catalogues.fail = lambda: catalogue if next(writes) >= kth and full[0] else None
    prompts = 60 if cycle else 4  # with 60 the tier is full by its capacity too: blocks give way
    fill(case, 10, prompts)
    case.forget_host()
    result = case.ask(2)
    assert cycle or result.tokens == case.blocks * BLOCK  # from a disk that is full
    assert case.ask(10 + prompts - 1).tokens == case.blocks * BLOCK
    full[0] = False
    injected = sum(case.device.injected.values()) + case.catalogues.failed
    took_s = case.seconds_until_written(999)
    case.device.fault = lambda name: 0
    assert case.wrong == 0
    assert_at_rest(case.store)
    assert disk_usage(path) <= 8 << 20
    case.store.close()
    return injected > 0, took_s


@pytest.mark.slow
@pytest.mark.parametrize("catalogue", [None, *CommitFault], ids=str)
@pytest.mark.parametrize("cycle", [False, True], ids=["roomy", "cycling"])
def test_05_full_at_the_kth_write(
    tmp_path: Path, cycle: bool, catalogue: CommitFault | None
) -> None:
    """At every write of the short run; at some of the long one."""
    longest, injected = 0.0, 0
    for kth in (9, 20, 33) if cycle else count(1):
        came, took_s = run(tmp_path / str(kth), kth, cycle=cycle, catalogue=catalogue)
        longest = max(longest, took_s)
        injected += came
        if not came:
            break
    print(f"full at each of {injected} writes; writes back within {longest:.2f} s")
    assert injected > 2
    assert longest <= BACK_S
