"""python -m bench.gpu --budget-s 240: see bench/gpu/__init__.py.

Starts the steps in a process of its own, and a new one after a step that failed or hung.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from bench.gpu.child import FAILED
from bench.gpu.report import report
from bench.gpu.results import ROOT, Results
from bench.gpu.steps import STEPS

GRACE_S = 30.0  # A step may take three times what was guessed, and this.
REPORT_S = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--budget-s", type=float, default=240)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu" / "results.jsonl")
    parser.add_argument("--report", type=Path, help="the page; beside the results unless told")
    parser.add_argument(
        "--wheels", type=Path, help="a folder of wheels that are used if it is there"
    )
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    parser.add_argument("--twin", action="store_true", help="on the CPU, with tiny sizes")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.budget_s - REPORT_S
    if arguments.wheels is not None and arguments.wheels.is_dir():
        use_wheels(arguments.wheels, arguments.results.parent / "site")
    results = Results(arguments.results, arguments.twin)
    for line in results.lines():
        if line["state"] == "began":  # An earlier run was stopped from outside.
            results.add(line["step"], "not measured", [], why="the run was stopped in it")
    tried: set[str] = set()
    code = 0
    while time.monotonic() < until_s:
        code, step = run_child(arguments, results, until_s, tried)
        if code == 0 or step is None or step in tried:
            break
        tried.add(step)
    command = "python -m bench.gpu " + shlex.join(sys.argv[1:])
    page = arguments.report or arguments.results.with_suffix(".md")
    names = [step.name for step in STEPS]
    page.write_text(report(results.lines(), names, command.strip(), arguments.twin))
    print(f"written: {page}", flush=True)
    failed = [line["step"] for line in results.lines() if line["state"] == "failed"]
    print(f"failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed or code not in (0, FAILED) else 0


def use_wheels(folder: Path, target: Path) -> None:
    """Unpack wheels where the steps' process finds them; nothing is installed.

    Those of another Python are left out: what is installed may do.
    """
    target.mkdir(parents=True, exist_ok=True)
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(folder.glob("*.whl")):
        if wheel.stem.split("-")[-3] not in (own, "py3", "py2.py3"):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def run_child(
    arguments: argparse.Namespace, results: Results, until_s: float, tried: set[str]
) -> tuple[int, str | None]:
    """Returns: the exit code, and the step that the process ended in."""
    command = [sys.executable, "-m", "bench.gpu.child", "--results", str(arguments.results)]
    command += ["--until-s", str(until_s), "--tried", ",".join(sorted(tried))]
    command += ["--only", arguments.only]
    command += ["--twin"] if arguments.twin else []
    child = subprocess.Popen(command, cwd=ROOT)
    limits = {step.name: 3 * step.seconds + GRACE_S for step in STEPS}
    step, since = None, time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        now = next((x["step"] for x in results.lines() if x["state"] == "began"), None)
        if now != step:
            step, since = now, time.monotonic()
        late = time.monotonic() - since > limits.get(step or "", 90.0)
        if (late and not arguments.twin) or time.monotonic() > until_s:
            child.kill()
            child.wait()
            if step is not None:
                state = "failed" if late else "not measured"
                results.add(step, state, [], time.monotonic() - since, "stopped: it took too long")
            return FAILED, step
    if child.returncode not in (0, FAILED):
        began = next((x["step"] for x in results.lines() if x["state"] == "began"), None)
        if began is None:
            print(f"the process ended with {child.returncode} before its first step", flush=True)
            return child.returncode, None
        results.add(began, "failed", [], why=f"the process ended with {child.returncode}")
        return FAILED, began
    last = [x["step"] for x in results.lines() if x["state"] == "failed" and x["step"] not in tried]
    return child.returncode, last[-1] if last else None


if __name__ == "__main__":
    sys.exit(main())
