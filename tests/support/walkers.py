"""The walk of a catalogue in a child process, without an interpreter's start for each.

One child forks for each catalogue. A fork that dies, or does not answer, is blamed on its
catalogue: that one is unsound, as it would be with a child of its own.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

from kvstore.tiers import walk
from kvstore.tiers.catalogues import LmdbCatalogues
from kvstore.tiers.walk import Walk
from support.shim import TESTS

ANSWER_S = 30.0
WALK_S = 20
END, DIED = b"end", b"died"


class Walkers(LmdbCatalogues):
    """Catalogues of a tier whose walks go through one child. deaths: where one died."""

    def __init__(self) -> None:
        self.deaths: list[Path] = []
        self._child: subprocess.Popen[bytes] | None = None

    def walk(self, directory: Path, file_bytes: int) -> Walk:
        """As LmdbCatalogues.walk."""
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{directory}\n".encode())
        child.stdin.flush()
        lines: list[bytes] = []
        while not lines or not lines[-1].startswith(END):
            ready, _, _ = select.select([child.stdout], [], [], ANSWER_S)
            line = child.stdout.readline() if ready else b""
            if not line:
                self.deaths.append(directory)
                self.close()
                return Walk(False, {})
            lines.append(line)
        if lines[-1].split()[1] == DIED:
            self.deaths.append(directory)
        return walk.walk_of(lines[:-1], sound=lines[-1].split()[1] == b"True")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "support.walkers"],
                cwd=TESTS,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        return self._child

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        forked = os.fork()
        if not forked:
            signal.alarm(WALK_S)  # It may go round in a circle.
            with contextlib.suppress(Exception, SystemExit):
                walk.walk_all(line.strip())
                sys.stdout.flush()
                os._exit(0)
            os._exit(1)
        status = os.waitpid(forked, 0)[1]
        said = DIED.decode() if os.WIFSIGNALED(status) else status == 0
        print(END.decode(), said, flush=True)


if __name__ == "__main__":
    main()
