"""Runs steps until one fails, the budget ends, or all are done: python -m bench.gpu.child

Exit code 0: nothing is left to try. 3: a step failed, and a new process goes on after it, for a
device that has failed answers nobody any more.
"""

import argparse
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.results import NotMeasured, Results
from bench.gpu.steps import STEPS, Step

if TYPE_CHECKING:
    from bench.gpu.place import Place

FAILED = 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--until-s", type=float, required=True)
    parser.add_argument("--tried", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--twin", action="store_true")
    arguments = parser.parse_args()
    results = Results(arguments.results, arguments.twin)
    passed = results.done() | set(filter(None, arguments.tried.split(",")))
    left = [
        step
        for step in STEPS
        if step.name not in passed
        and (not arguments.only or step.name in arguments.only.split(","))
    ]
    if not left:
        return 0
    from bench.gpu.place import Place  # noqa: PLC0415  Only now is torch needed.

    place = Place(arguments.twin)
    try:
        return run(place, left, results, arguments.until_s)
    finally:
        shutil.rmtree(place.folder, ignore_errors=True)


def run(place: "Place", left: list[Step], results: Results, until_s: float) -> int:
    """The steps, in order. Returns: the exit code."""
    for step in left:
        if time.monotonic() + (0 if place.twin else step.seconds) > until_s:
            results.add(step.name, "not measured", [], why=f"the budget had no {step.seconds} s")
            continue
        results.add(step.name, "began", [])
        print(f"{step.name} ...", end=" ", flush=True)
        began = time.monotonic()
        try:
            figures = step.run(place)
        except NotMeasured as reason:
            results.add(step.name, "not measured", [], time.monotonic() - began, str(reason))
            print(f"not measured: {reason}", flush=True)
            continue
        except Exception as error:
            print("failed", flush=True)
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:2000]
            results.add(step.name, "failed", [], time.monotonic() - began, why)
            return FAILED
        seconds = time.monotonic() - began
        results.add(step.name, "ok", figures, seconds)
        print(f"ok, {seconds:.1f} s", flush=True)
        for figure in figures:
            goal = f"  (goal {figure.goal})" if figure.goal else ""
            print(f"    {figure.name}: {figure.value} {figure.unit}{goal}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
