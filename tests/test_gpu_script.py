"""The script for a GPU: all of its steps on the CPU twin, and how it keeps to its budget.

It has one try on a real device, so no typo may be left for it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import child, results
from bench.gpu.kernels import committed
from bench.gpu.report import report
from bench.gpu.results import Figure, NotMeasured, Results
from bench.gpu.steps import STEPS, Step
from kvstore.cuda.kernel_table import KERNELS
from support.tree import ROOT

NO_TOOL_ON_A_CPU = {"racecheck", "synccheck", "initcheck"}


@pytest.mark.slow
def test_every_step_runs_on_the_twin(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "bench.gpu", "--twin", "--budget-s", "250"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [*command, "--results", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    states = {line["step"]: line["state"] for line in Results(path, twin=True).lines()}
    missing = {name for name, state in states.items() if state != "ok"}
    assert missing == NO_TOOL_ON_A_CPU | {"demo"}, ran.stdout[-3000:]
    assert list(states) == [step.name for step in STEPS]
    page = path.with_suffix(".md").read_text()
    assert "CPU twin" in page and page.count("not measured") == len(missing)


class Twin:
    twin = False


def steps(calls: list[str]) -> list[Step]:
    def fine(place: object) -> list[Figure]:
        calls.append("fine")
        return [Figure("speed", 0.9, goal="0.85")]

    def absent(place: object) -> list[Figure]:
        raise NotMeasured("no tool")

    def broken(place: object) -> list[Figure]:
        raise RuntimeError("an illegal | address")

    class Given(Step):
        def run(self, place: object) -> list[Figure]:
            found: list[Figure] = self.arguments[0](place)
            return found

    listed = {"fine": fine, "absent": absent, "long": fine, "broken": broken, "after": fine}
    return [
        Given(name, 1000 if name == "long" else 1, "", "", (work,)) for name, work in listed.items()
    ]


def test_results_come_as_they_are_found_and_are_not_taken_again(tmp_path: Path) -> None:
    calls: list[str] = []
    kept, made = Results(tmp_path / "r", twin=False), steps(calls)
    until_s = time.monotonic() + 100
    assert child.run(Twin(), made, kept, until_s) == child.FAILED  # type: ignore[arg-type]
    assert calls == ["fine"] and kept.done() == {"fine"}
    assert child.run(Twin(), made[4:], kept, until_s) == 0  # type: ignore[arg-type]
    states = {line["step"]: line["state"] for line in kept.lines()}
    wanted = ["ok", "not measured", "not measured", "failed", "ok"]
    assert list(states.values()) == wanted
    page = report(kept.lines(), [step.name for step in made] + ["never"], "make gpu", False)
    assert "| fine | speed | 0.9 | 0.85 |" in page
    assert "| broken | | **failed**: RuntimeError: an illegal / address | |" in page
    assert "not measured: no tool" in page and "| never | | not measured" in page
    assert "had no 1000" in page


def test_a_line_that_was_cut_off_and_another_commit_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r"
    Results(path, twin=False).add("a", "ok", [])
    with path.open("a") as file:
        file.write(json.dumps({"step": "b"})[:9])
    assert Results(path, twin=False).done() == {"a"} and not Results(path, twin=True).done()
    monkeypatch.setattr(results, "commit", lambda: "another")
    assert not Results(path, twin=False).done()


def test_the_register_table_is_read_for_its_architectures() -> None:
    assert committed(90).keys() == KERNELS.keys() and committed(90) != committed(100)
    assert committed(75) == {}
