"""kill -9 in the middle of an import: a sound store with a part of the blocks, and it goes on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.exporting import export_store
from kvstore.importing import import_archive
from kvstore.scrub import verify_store
from support.archives import LAYOUT
from support.checks import assert_at_rest
from support.engine import Engine, prompt

# Imports, says so when some blocks are in, and goes on.
KILLED = """
import os, pathlib, sys
from kvstore.hashing.chain import chain_function
from kvstore.hashing.checksum import run_checksums
from kvstore.hashing.namespace import root_key
from kvstore.importing import import_archive
said = []
def progress(done, total):
    if done > 400_000 and not said:
        said.append(os.write(1, b"."))
with open(sys.argv[2], "rb") as source:
    import_archive(pathlib.Path(sys.argv[1]), source, progress, partial=True)
os.write(1, b".")
"""


@pytest.mark.slow
def test_kill_in_the_middle_of_an_import(tmp_path: Path) -> None:
    """At instants spread over the import: afterwards the store is sound, and takes the rest."""
    with kvstore.open(tmp_path / "large", host="8MiB", disk_capacity="32MiB") as store:
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        for seed in range(12):
            engine.save(prompt(4 * 50 + 1, seed=100 + seed))
            store.flush()
    file = tmp_path / "archive"
    with open(file, "wb") as sink:
        export_store(tmp_path / "large", sink.write)
    target = tmp_path / "store"
    kvstore.open(target, host="4MiB", disk_capacity="32MiB").close()
    ended = []
    for kill in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(target), str(file)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.01 * kill)
        process.send_signal(signal.SIGKILL)
        ended.append(process.wait())
        process.stdout.close()
    assert -signal.SIGKILL in ended
    with kvstore.open(target, host="4MiB", disk_capacity="32MiB") as store:
        engine = Engine(store.namespace(LAYOUT, model="m"), 64)
        kept = sum(engine.ask(prompt(201, seed=100 + seed)).tokens // 4 for seed in range(12))
        assert kept > 0
        assert_at_rest(store)
    assert verify_store(target).bad == []
    with open(file, "rb") as source:
        done = import_archive(target, source)
    assert (done.present, done.imported) == (kept, 600 - kept)
