"""`kvstore stats`, also beside a live owner and after one was killed."""

import os
import signal
import subprocess
import sys

import kvstore
from kvstore.tiers.base import MissReason
from kvstore.tiers.record import RecordFormat
from support.stored import BLOCKS, LAYOUT, Stored, pages, prompt, run

SLOT_BYTES = RecordFormat.of(LAYOUT).slot_bytes
HOLD = """
import sys, time, kvstore
store = kvstore.open(sys.argv[1], host="8MiB", disk_capacity="64MiB")
print("open", flush=True)
time.sleep(60)
"""


def test_the_fixed_interface(stored: Stored) -> None:
    ran = run("stats", "--store", stored.directory, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert document["tiers"]["disk"] == {
        "capacity_bytes": 64 << 20,
        "used_bytes": BLOCKS * SLOT_BYTES,
        "blocks": BLOCKS,
    }
    assert document["tiers"]["host"]["capacity_bytes"] == 8 << 20
    assert document["tokens_asked"] == 2 * BLOCKS * 16
    assert sum(document["tokens_hit"].values()) == BLOCKS * 16
    assert document["misses"][MissReason.ABSENT] == BLOCKS * 16
    assert set(document["misses"]) == set(MissReason)


def test_for_people(stored: Stored) -> None:
    ran = run("stats", "--store", stored.directory)
    assert ran.code == 0
    assert "not in use" in ran.out
    assert "disk" in ran.out
    assert "64.0 MiB" in ran.out
    assert "absent" in ran.out


def test_beside_a_live_owner(stored: Stored) -> None:
    with kvstore.open(stored.directory, host="8MiB", disk_capacity="64MiB") as store:
        space = store.namespace(LAYOUT, model="a-model", tenant="a-tenant")
        pool = space.pool(pages(BLOCKS))
        space.sequence(prompt(BLOCKS, seed=3)).save(pool, range(BLOCKS)).result()
        store.flush()
        document = run("stats", "--store", stored.directory, "--json").document
        assert document["in_use"]
        assert document["tiers"]["disk"]["blocks"] == 2 * BLOCKS
    document = run("stats", "--store", stored.directory, "--json").document
    assert not document["in_use"]
    assert document["tiers"]["host"]["blocks"] == 0
    assert document["tiers"]["disk"]["blocks"] == 2 * BLOCKS


def test_host_memory_of_a_live_owner(stored: Stored) -> None:
    with kvstore.open(stored.directory, host="8MiB", disk_capacity="64MiB") as store:
        space = store.namespace(LAYOUT, model="a-model", tenant="a-tenant")
        pool = space.pool(pages(BLOCKS))
        space.sequence(prompt(BLOCKS, seed=3)).save(pool, range(BLOCKS)).result()
        store.flush()
        host = run("stats", "--store", stored.directory, "--json").document["tiers"]["host"]
        assert host["blocks"] >= BLOCKS
        assert host["used_bytes"] == host["blocks"] * SLOT_BYTES


def test_after_a_killed_owner(stored: Stored) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(stored.directory)], cwd="/", stdout=subprocess.PIPE
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        assert run("stats", "--store", stored.directory, "--json").document["in_use"]
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate()
    document = run("stats", "--store", stored.directory, "--json").document
    assert not document["in_use"]
    assert document["tiers"]["disk"]["blocks"] == BLOCKS
    assert document["tokens_asked"] == 2 * BLOCKS * 16
