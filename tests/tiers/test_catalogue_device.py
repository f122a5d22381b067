"""LMDB's own writes fail, in a child process: it lives, serves no wrong byte, comes back."""

import errno
from pathlib import Path

import pytest

from support.shim import Control, Kind, environment, run_python

CHILD = "import sys; from tiers.test_catalogue_device import child; child(*sys.argv[1:])"
ERRORS = (errno.EIO, errno.ENOSPC)


def child(path: str, control_path: str) -> None:
    """Fail every kind of call at several places, one after the other, on one store."""
    from support.checks import assert_at_rest  # noqa: PLC0415
    from support.stepping import Stepping  # noqa: PLC0415

    control = Control(Path(control_path))
    case = Stepping(Path(path), disk="32MiB")
    seed, longest, injected = 100, 0.0, 0
    for old in range(4):
        case.save(old)
    case.store.flush()
    for kind in (Kind.PAGES, Kind.META, Kind.SYNC):
        for at in (1, 2):
            for error in ERRORS:
                failed = control.failed(kind)
                control.fail(kind, error, at=at)
                for _ in range(3):
                    seed += 1
                    case.save(seed)
                    case.write()
                    case.clock.advance(0.3)
                injected += control.failed(kind) - failed
                # Reads go on while the catalogue takes nothing.
                case.forget_host()
                assert case.ask(seed % 4).tokens == case.blocks * 4
                control.clear(kind)
                seed += 1
                longest = max(longest, case.seconds_until_written(seed))
    assert_at_rest(case.store)
    case.forget_host()
    assert all(case.ask(old).tokens == case.blocks * 4 for old in range(4))
    wrong, reopened = case.wrong, case.store._placement.disk._upkeep.reopened  # type: ignore
    case.store.close()
    again = Stepping(Path(path), disk="32MiB")
    kept = again.disk_seeds(range(4))
    assert all(again.ask(old).tokens == again.blocks * 4 for old in kept)
    again.store.close()
    print(injected, reopened, wrong + again.wrong, len(kept), f"{longest:.2f}")


@pytest.mark.slow
def test_writes_of_the_catalogue_fail_and_it_comes_back(tmp_path: Path) -> None:
    control = tmp_path / "control"
    Control.make(control)
    env = environment(control=control)
    printed = run_python(CHILD, str(tmp_path / "store"), str(control), env=env)
    injected, reopened, wrong, kept, longest = printed.split()
    print(f"{injected} calls failed, {reopened} catalogues made anew, back within {longest} s")
    assert int(injected) >= 12 and int(reopened) >= 12
    assert (int(wrong), int(kept)) == (0, 4)
    assert float(longest) <= 5.0
