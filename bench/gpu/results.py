"""What was found, one JSON line for each step as it ends, and what a later run does not repeat."""

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Figure:
    """One figure. goal: what the project aims at, in words; "" where there is none."""

    name: str
    value: float | str
    unit: str = ""
    goal: str = ""


SOURCES = (".py", ".cu", ".cuh", ".cpp", ".hpp")


class NotMeasured(Exception):
    """A step cannot run here, for a reason that is no fault of the code under test."""


def commit() -> str:
    """The commit of the checkout; where it has no history, a digest of its sources."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.strip():
        return done.stdout.strip()
    digest = hashlib.sha256()  # A copy without its history is named by what is in it.
    for folder in ("kvstore", "tiers", "cuda", "bench"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in SOURCES:
                digest.update(path.read_bytes())
    return f"sources {digest.hexdigest()[:12]}"


class Results:
    """A file of results. Lines of another commit, or of a twin beside a GPU, do not count."""

    def __init__(self, path: Path, twin: bool) -> None:
        self._path = path
        self._of = {"commit": commit(), "twin": twin}

    def lines(self) -> list[dict[str, Any]]:
        """The last line of every step; a line that was cut off is none."""
        found: dict[str, dict[str, Any]] = {}
        text = self._path.read_text() if self._path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if all(entry.get(name) == value for name, value in self._of.items()):
                found[entry["step"]] = entry
        return list(found.values())

    def done(self) -> set[str]:
        """Steps that ended well."""
        return {line["step"] for line in self.lines() if line["state"] == "ok"}

    def add(
        self, step: str, state: str, figures: list[Figure], seconds: float = 0.0, why: str = ""
    ) -> None:
        """state: "began", "ok", "failed" or "not measured"."""
        entry = {
            **self._of,
            "step": step,
            "state": state,
            "seconds": round(seconds, 2),
            "figures": [asdict(figure) for figure in figures],
            "why": why,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
