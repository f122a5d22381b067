"""The preloaded library sees all that LMDB writes, and fails it where it is told to."""

import errno
from pathlib import Path

import pytest

from support.shim import Control, Event, Kind, entries, environment, run_python

COMMITS = """
import sys, lmdb
env = lmdb.open(sys.argv[1], map_size=1 << 20, max_dbs=2)
table = env.open_db(b"rows")
for number in range(int(sys.argv[2])):
    try:
        with env.begin(write=True) as txn:
            for at in range(40):
                txn.put(b"%d-%d" % (number, at), bytes(100), db=table)
        print("done")
    except lmdb.Error as error:
        print(type(error).__name__, error)
"""


def run_commits(tmp_path: Path, commits: int, env: dict[str, str]) -> list[str]:
    return run_python(COMMITS, str(tmp_path / "lm"), str(commits), env=env).split("\n")[:-1]


def test_the_log_is_the_file(tmp_path: Path) -> None:
    """The logged writes alone, one after the other, give the file that LMDB left."""
    log = tmp_path / "log"
    run_commits(tmp_path, 20, environment(log=log))
    data = tmp_path / "lm" / "data.mdb"
    image = bytearray(data.stat().st_size)
    found = list(entries(log))
    for entry in found:
        assert entry.name == str(data)
        if entry.event is Event.WRITE:
            image[entry.offset : entry.offset + len(entry.data)] = entry.data
    assert bytes(image) == data.read_bytes()
    assert [entry.sequence for entry in found] == list(range(1, len(found) + 1))
    events = [entry.event for entry in found]
    assert events[0] is Event.MADE
    assert events.count(Event.DURABLE_WRITE) == 21  # a meta page for each commit
    assert events.count(Event.SYNC) == 21


@pytest.mark.parametrize("kind", [Kind.PAGES, Kind.META, Kind.SYNC])
def test_the_planned_call_fails_and_no_other(tmp_path: Path, kind: Kind) -> None:
    control = Control.make(tmp_path / "control")
    env = environment(control=tmp_path / "control")
    assert run_commits(tmp_path, 1, env) == ["done"]
    before = control.calls(kind)
    # A new process: opening the table is no commit, and writes nothing.
    control.fail(kind, errno.ENOSPC, at=2, count=1)
    told = run_commits(tmp_path, 3, env)
    assert control.failed(kind) == 1
    assert control.calls(kind) > before
    # After a meta page that failed LMDB refuses all that follows, until it is opened anew.
    later = kind is not Kind.META
    assert [line == "done" for line in told] == [True, False, later]
    assert "No space left" in told[1]


def test_every_call_fails_until_the_plan_is_cleared_and_a_write_is_cut(tmp_path: Path) -> None:
    control = Control.make(tmp_path / "control")
    env = environment(control=tmp_path / "control")
    run_commits(tmp_path, 1, env)
    control.fail(Kind.SYNC, errno.EIO)
    assert not any(line == "done" for line in run_commits(tmp_path, 3, env))
    control.clear(Kind.SYNC)
    assert run_commits(tmp_path, 3, env) == ["done"] * 3
    # LMDB goes on after a write that moved fewer pages.
    control.fail(Kind.PAGES, 0, count=1, short_bytes=4096)
    assert run_commits(tmp_path, 2, env) == ["done"] * 2
    assert control.failed(Kind.PAGES) == 1
