"""What a device was measured to do is kept for it, and decides how blocks move."""

from pathlib import Path

import pytest

from kvstore.cuda.calibration import (
    Calibration,
    Direction,
    Measured,
    calibration_of,
    run_calibration,
)
from kvstore.cuda.cpu_device import CpuDevice
from kvstore.cuda.page_mover import Method, choose
from kvstore.native import cache
from support.race_checker import RaceChecker


def measured(piece: int, method: Method, seconds: float, busy: bool = True) -> Measured:
    return Measured(Direction.LOAD, piece, method, busy, 1 << 20, seconds)


def test_the_fastest_method_near_a_size_is_chosen() -> None:
    found = Calibration(
        "gpu",
        (
            measured(4096, Method.COPIES, 3.0),
            measured(4096, Method.STAGED, 1.0),
            measured(1 << 20, Method.COPIES, 1.0),
            measured(1 << 20, Method.STAGED, 2.0),
            measured(4096, Method.DIRECT, 0.1, busy=False),  # Only while nobody computes.
        ),
    )
    assert found.method(Direction.LOAD, 5000) is Method.STAGED
    assert found.method(Direction.LOAD, 4 << 20) is Method.COPIES
    assert found.bytes_per_s(Direction.LOAD, 5000) == 1 << 20
    assert found.method(Direction.SAVE, 5000) is choose(5000)
    assert found.bytes_per_s(Direction.SAVE, 5000) is None


def test_a_calibration_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvstore.cuda.calibration.PIECE_BYTES", (512,))
    device = CpuDevice()
    first = calibration_of(device)
    assert {m.method for m in first.measured} == set(Method)
    assert all(m.seconds > 0 for m in first.measured)
    with monkeypatch.context() as nobody:
        nobody.setattr("kvstore.cuda.calibration.run_calibration", None)
        assert calibration_of(device) == first
    path = next((tmp_path / "kvstore").glob("calibration-*.json"))
    for broken in (b"{", b"[]", path.read_bytes().replace(b'"format": 1', b'"format": 2')):
        cache.publish(path, broken)
        assert calibration_of(device, measure=False) == Calibration("cpu")
    device.close()


def test_a_calibration_orders_its_own_work() -> None:
    checked = RaceChecker()
    run_calibration(checked, (256, 4096))
    checked.assert_ordered()
    checked.close()
