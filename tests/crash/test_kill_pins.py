"""kill -9 of an owner with pins: the next one keeps what they cover, and what is saved then."""

import subprocess
import sys
from pathlib import Path

from kvstore.store import open as open_store
from support.checks import assert_at_rest
from support.pinning import BLOCKS, DISK, HOUR_S, engine_of, fill, stored, tokens_of

TESTS = Path(__file__).resolve().parents[1]


def test_pins_outlive_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "support.pinning", str(tmp_path / "store")],
        cwd=TESTS,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"pinned\n"
        owner.kill()
    with open_store(tmp_path / "store", **DISK) as store:
        pins = store.pins()
        assert [(one.pin_id, one.blocks, one.stored_blocks) for one in pins] == [
            (1, BLOCKS, BLOCKS),
            (2, BLOCKS, 3),
        ]
        assert all(one.ttl_s == HOUR_S for one in pins)
        engine = engine_of(store)
        engine.save(tokens_of(2))
        engine.save(tokens_of(3))
        fill(engine)
        assert stored(engine, tokens_of(1)) == stored(engine, tokens_of(2)) == BLOCKS
        assert stored(engine, tokens_of(3)) == 0
        assert_at_rest(store)
