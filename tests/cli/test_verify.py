"""`kvstore verify`: finds every kind of damage, blames nothing that is sound, changes nothing."""

import hashlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvstore
from kvstore.inspect import list_blocks
from kvstore.scrub import verify_store
from kvstore.tiers.errors import StoreError
from kvstore.tiers.record import RecordFormat
from support.stored import BLOCKS, LAYOUT, Stored, assert_one_sentence, pages, prompt, run, run_here

SHAPE = RecordFormat.of(LAYOUT)


def damage(stored: Stored, key: str, offset: int, data: bytes | None = None) -> None:
    """Overwrite bytes of a block's record on disk; one flipped bit unless told."""
    (place,) = (block.place for block in list_blocks(stored.directory) if block.key == key)
    path, _, at = place.rpartition(":")
    with open(path, "r+b") as file:
        file.seek(int(at) + offset)
        old = file.read(1)
        file.seek(int(at) + offset)
        file.write(bytes([old[0] ^ 4]) if data is None else data)


def digests(directory: Path) -> dict[Path, str]:
    """Every file of a store but LMDB's table of readers, which reading it writes to."""
    files = [p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != "lock.mdb"]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_sound_store(stored: Stored) -> None:
    before = digests(stored.directory)
    ran = run_here("verify", "--store", stored.directory, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert set(ran.document) == {"blocks", "bytes", "bad", "unchecked", "seconds", "resumed"}
    assert ran.document["blocks"] == BLOCKS
    assert ran.document["bytes"] == BLOCKS * SHAPE.slot_bytes
    assert ran.document["bad"] == []
    assert digests(stored.directory) == before


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "header_magic"),
        (8, "header_version"),
        (16, "header_checksum"),
        (40, "header_checksum"),
        (256 + 4 * 16 + 1, "header_checksum"),
        (SHAPE.header_bytes - 1, "header_checksum"),
        (SHAPE.header_bytes, "payload_checksum"),
        (SHAPE.header_bytes + SHAPE.payload_bytes - 1, "payload_checksum"),
    ],
)
def test_one_flipped_bit_is_found(stored: Stored, offset: int, reason: str) -> None:
    damage(stored, stored.keys[7], offset)
    found = verify_store(stored.directory)
    assert [(bad.key, bad.reason) for bad in found.bad] == [(stored.keys[7], reason)]
    assert found.blocks == BLOCKS


def test_bad_blocks_are_exit_code_1(stored: Stored) -> None:
    for block in (3, 11):
        damage(stored, stored.keys[block], SHAPE.header_bytes + 5)
    ran = run_here("verify", "--store", stored.directory, "--json")
    assert ran.code == 1
    found = {(bad["key"], bad["reason"]) for bad in ran.document["bad"]}
    assert found == {(stored.keys[block], "payload_checksum") for block in (3, 11)}
    ran = run_here("verify", "--store", stored.directory)
    assert ran.code == 1
    assert "2 bad" in ran.out


def test_another_blocks_record_is_found(stored: Stored) -> None:
    """A whole, sound record in the wrong slot: only the catalogue can tell."""
    places = {block.key: block.place for block in list_blocks(stored.directory)}
    path, _, at = places[stored.keys[0]].rpartition(":")
    with open(path, "rb") as file:
        file.seek(int(at))
        record = file.read(SHAPE.slot_bytes)
    damage(stored, stored.keys[1], 0, record)
    (bad,) = verify_store(stored.directory).bad
    assert (bad.key, bad.reason) == (stored.keys[1], "header_key")


def test_a_short_segment_is_found(stored: Stored) -> None:
    with open(stored.segments[-1], "r+b") as file:
        file.truncate(8192)
    reasons = {bad.reason for bad in verify_store(stored.directory).bad}
    assert reasons == {"io_error"}


def test_a_missing_segment_is_found(stored: Stored) -> None:
    """Its rows name no slot any more."""
    for segment in stored.segments:
        segment.unlink()
    found = verify_store(stored.directory)
    assert [bad.reason for bad in found.bad] == ["no_slot"] * BLOCKS


def test_a_broken_catalogue_is_bad_and_no_crash(stored: Stored) -> None:
    data = stored.directory / "disk0" / "catalogue" / "data.mdb"
    size = data.stat().st_size
    data.write_bytes(b"\xa5" * size)
    ran = run_here("verify", "--store", stored.directory, "--json")
    assert ran.code == 1
    place = str(stored.directory / "disk0")
    assert ran.document["bad"] == [{"key": "", "reason": "catalogue", "place": place}]


def test_beside_an_owner_that_keeps_writing(tmp_path: Path) -> None:
    """Slots are reused all the time here; none may be called bad for that."""
    directory = tmp_path / "store"
    with kvstore.open(directory, host="4MiB", disk_capacity="8MiB") as store:
        space = store.namespace(LAYOUT, model="a-model")
        pool = space.pool(pages(BLOCKS))
        stop = threading.Event()

        def write() -> None:
            seed = 0
            while not stop.is_set():
                seed += 1
                space.sequence(prompt(BLOCKS, seed)).save(pool, range(BLOCKS)).result()
                store.flush()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            found = [run("verify", "--store", directory, "--json") for _ in range(2)]
        finally:
            stop.set()
            writer.join()
    assert [(ran.code, ran.document["bad"]) for ran in found] == [(0, [])] * 2
    assert max(ran.document["blocks"] for ran in found) > 0


def test_an_owner_is_not_read_from_its_own_process(stored: Stored) -> None:
    with (
        kvstore.open(stored.directory, host="8MiB", disk_capacity="64MiB"),
        pytest.raises(StoreError, match="this very process"),
    ):
        verify_store(stored.directory)


def test_progress_counts_up_to_all_bytes(stored: Stored) -> None:
    told: list[tuple[int, int]] = []
    found = verify_store(stored.directory, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (found.bytes, found.bytes)


def test_an_interrupt_keeps_the_position(stored: Stored) -> None:
    """At this rate the second read waits for seconds, so the interrupt comes in the middle."""
    command = [sys.executable, "-m", "kvstore.cli", "verify", "--store", str(stored.directory)]
    process = subprocess.Popen(
        [*command, "--rate", "20KB", "--json"],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 60
    while "data.mdb" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "kvstore: interrupted; verify --resume goes on from here\n"
    assert (stored.directory / "scrub").exists()
    found = verify_store(stored.directory, resume=True)
    assert (found.blocks, found.bad, found.resumed) == (BLOCKS, [], True)
    assert not (stored.directory / "scrub").exists()


def test_a_rate_that_is_no_size(stored: Stored) -> None:
    assert_one_sentence(run_here("verify", "--store", stored.directory, "--rate", "fast"))
