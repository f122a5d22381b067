"""Every kernel compiled for this device and loaded, and all of the tests' cases run on it."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from bench.gpu.compiling import compile_log
from bench.gpu.place import Place
from bench.gpu.results import ROOT, Figure
from kvstore.cuda import nvrtc
from kvstore.cuda.kernel_table import HEAD_DIMS, KERNELS, SOURCES
from support.cuda_launcher import DeviceLauncher
from support.kernel_runner import all_cases
from support.probe_cases import probe_cases

TABLE = ROOT / "cuda" / "resources.txt"
TWIN_ARCHITECTURE = 90


def compile_all(place: Place) -> list[Figure]:
    """Compile in parallel, load everything, and compare registers with the committed table."""
    architecture = getattr(place.device, "architecture", TWIN_ARCHITECTURE)
    jobs = []
    for source in SOURCES:
        sizes = HEAD_DIMS if source.startswith(("decode_tensor", "decode_fp32")) else (0,)
        jobs += list(product([source], [architecture], place.pick(sizes, sizes[:1])))
    # Never a fork of this process, which has a driver in it.
    with ProcessPoolExecutor(place.pick(12, 1), multiprocessing.get_context("spawn")) as pool:
        logs = list(pool.map(compile_log, jobs))
    found = {name: r for log in logs for name, r in nvrtc.resources(log).items()}
    warned = [line for log in logs for line in nvrtc.warnings_in(log)]
    spilled = [name for name, r in found.items() if r.spill_bytes]
    if not place.twin:
        assert found.keys() == KERNELS.keys(), found.keys() ^ KERNELS.keys()
        for name in KERNELS:
            place.device._function(name, 0)  # type: ignore[attr-defined]
    figures = [
        Figure("kernels loaded", len(found)),
        Figure("warnings", len(warned), goal="0"),
        Figure("kernels that spill registers", " ".join(spilled) or "none", goal="none"),
    ]
    known = committed(architecture)
    if known:
        other = [
            f"{n}: {r.registers}, not {known[n]}"
            for n, r in found.items()
            if r.registers != known[n]
        ]
        figures.append(Figure("registers unlike the table", "; ".join(other) or "none"))
    else:
        figures.append(Figure("registers unlike the table", f"no column sm_{architecture}"))
    return figures


def committed(architecture: int, path: Path = TABLE) -> dict[str, int]:
    """Registers of each kernel in the committed table; {} for another architecture."""
    header, _, *rows = path.read_text().splitlines()
    names = re.findall(r"sm_(\d+)", header)
    if str(architecture) not in names:
        return {}
    column = 2 + names.index(str(architecture))
    return {row.split()[0]: int(row.split()[column]) for row in rows if row.strip()}


def run_probes(place: Place) -> list[Figure]:
    """The helpers that are PTX, each alone."""
    cases = probe_cases()
    launcher = DeviceLauncher(place.device)
    for case in cases:
        case.run(launcher, 0)
    return [Figure("helpers that do what their CPU branch does", f"{len(cases)} of {len(cases)}")]


def run_cases(place: Place) -> list[Figure]:
    """All cases. Those that fail are named; all are run before the step fails."""
    cases = place.pick(all_cases(), all_cases()[::45])
    launcher = DeviceLauncher(place.device)
    wrong = []
    for case in cases:
        try:
            case.run(launcher, 0)
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}"[:200])
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "; ".join(wrong[:8])
    return [Figure("kernel cases that are right", f"{len(cases)} of {len(cases)}", goal="all")]
