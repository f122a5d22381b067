"""A small store on disk and the command that looks into it, run as a user runs it."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore.cli.main import main

BLOCKS = 20
LAYERS = 3
RUN_BYTES = 3000
LAYOUT = kvstore.Layout(16, (kvstore.CacheGroup("full", LAYERS, (RUN_BYTES, RUN_BYTES), "uint8"),))


@dataclass(frozen=True)
class Stored:
    """A closed store with BLOCKS blocks of one prompt, whose keys these are, on disk."""

    directory: Path
    keys: tuple[str, ...]

    @property
    def segments(self) -> list[Path]:
        return sorted((self.directory / "disk0").glob("*.seg"))


def prompt(blocks: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Random tokens: whole blocks and one more, so that all blocks may be used."""
    return np.random.default_rng(seed).integers(0, 50_000, blocks * 16 + 1, dtype=np.int32)


def pages(count: int, seed: int = 1) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (count, int(n)), np.uint8) for n in LAYOUT.run_lengths]


def make_store(directory: Path) -> Stored:
    """A store that was asked for a prompt that it had, and once for one that it had not."""
    with kvstore.open(directory, host="8MiB", disk_capacity="64MiB") as store:
        space = store.namespace(LAYOUT, model="a-model", tenant="a-tenant")
        pool = space.pool(pages(BLOCKS))
        sequence = space.sequence(prompt(BLOCKS))
        assert sequence.save(pool, range(BLOCKS)).result().saved == BLOCKS
        with space.sequence(prompt(BLOCKS)).lookup() as ticket:
            assert ticket.load(pool, range(BLOCKS)).result().tokens == BLOCKS * 16
        with space.sequence(prompt(BLOCKS, seed=2)).lookup() as ticket:
            assert ticket.blocks == 0
        keys = tuple(key.tobytes().hex() for key in sequence.keys)
    return Stored(directory, keys)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found


def run(*arguments: str | Path) -> Ran:
    """The command as a user runs it: in a process of its own."""
    command = [sys.executable, "-m", "kvstore.cli", *map(str, arguments)]
    ran = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def run_here(*arguments: str | Path) -> Ran:
    """The same in this process, which is faster: for a store that it does not own itself."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Ran(code, out.getvalue(), err.getvalue())


def assert_one_sentence(ran: Ran) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that is no traceback."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("kvstore: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
