"""After kill -9 of its owner under load a host arena serves its blocks again within two seconds."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.home import read_facts
from kvstore.store import Store
from kvstore.tiers.arena_file import arena_path
from kvstore.tiers.io import FileIo
from kvstore.tiers.record import MAGIC
from support.arena_owner import BLOCKS, LAYOUT, config_of, prompt_of, prompts_in
from support.engine import Engine
from support.shim import TESTS

BAR_S = 2.0
MIB, GIB = 1 << 20, 1 << 30


def kill_under_load(directory: Path, host_bytes: int) -> None:
    """An owner fills its arena and is killed while it saves."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "support.arena_owner", str(directory), str(host_bytes)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith("saved"):
            break
    owner.kill()
    owner.wait()
    owner.stdout.close()


def flip_a_bit(arena: Path) -> None:
    """Change a bit in the payload of the first record."""
    with arena.open("r+b") as file:
        data = file.read(16 * MIB)
        at = data.index(MAGIC, 4096) + LAYOUT.payload_bytes // 2
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))


def restart(directory: Path, host_bytes: int, *, flip: bool) -> None:
    facts_before = read_facts(directory, FileIo())
    assert facts_before is not None
    arena = arena_path(Path("/dev/shm"), facts_before.store_id)
    assert arena.stat().st_blocks * 512 > host_bytes * 0.7
    if flip:
        flip_a_bit(arena)
    began = time.monotonic()
    with Store(config_of(directory, host_bytes)) as store:
        opened = time.monotonic() - began
        engine = Engine(store.namespace(LAYOUT, model="m"), BLOCKS)
        prompts = prompts_in(host_bytes)
        with engine.space.sequence(prompt_of(prompts - 1)).lookup() as ticket:
            first = ticket.load(engine.pool, engine.table(BLOCKS)).result(BAR_S)
        first_hit = time.monotonic() - began
        assert first.tokens == BLOCKS * 16
        tokens, bad = 0, []
        for number in range(prompts - 1, -1, -1):
            with engine.space.sequence(prompt_of(number)).lookup() as ticket:
                result = engine.load(ticket)  # asserts every byte
            tokens += result.tokens
            if result.tokens < BLOCKS * 16:
                bad.append(number)
        print(
            f"host arena of {host_bytes / MIB:.0f} MiB: open {opened:.2f} s, first hit "
            f"{first_hit:.2f} s, {tokens // 16} of {prompts * BLOCKS} blocks exact"
        )
        assert first_hit < BAR_S
        counted = store.counters()["bad_blocks.host"]
        if flip:
            assert len(bad) == 1 and counted == 1
            _, saved = engine.save(prompt_of(bad[0]))
            assert saved.dropped == {}
            assert engine.ask(prompt_of(bad[0])).tokens == BLOCKS * 16, "it did not heal"
        else:
            assert bad == [] and counted == 0
        store.check_integrity()
    assert not arena.exists()


@pytest.mark.slow
@pytest.mark.parametrize("flip", [False, True], ids=["whole", "flipped"])
def test_an_arena_serves_again(tmp_path: Path, flip: bool) -> None:
    kill_under_load(tmp_path / "store", 256 * MIB)
    restart(tmp_path / "store", 256 * MIB, flip=flip)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_large_arena_serves_again(tmp_path: Path) -> None:
    kill_under_load(tmp_path / "store", 4 * GIB)
    restart(tmp_path / "store", 4 * GIB, flip=False)
