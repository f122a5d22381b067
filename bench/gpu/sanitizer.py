"""compute-sanitizer over small cases, in processes of their own: python -m bench.gpu.sanitizer"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.gpu.place import Place
from bench.gpu.results import ROOT, Figure, NotMeasured

PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/opt/nvidia/compute-sanitizer/compute-sanitizer",
)
# Small, and of every kind: the tool makes each launch many times slower.
PATTERN = (
    r"^(probe-.*|(gather|scatter)-(row(3|20|528|4112)|rows3x48|heads|mixed|skip|bad_page1)|"
    r"rope-.*-(0|4|7|13|18)|decode-(bf16|fp16|fp32)-(64|128)-\d*[05])$"
)
TWIN_TOOL = "memcheck"  # stands for all of them, and is none
TWIN_PATTERN = "^probe-.*|^gather-row3$"
NOT_HERE = ("Device not supported", "not supported on this", "error 999")
LIMIT_S = 90.0


def sanitize(place: Place, tool: str) -> list[Figure]:
    """Run the cases under one tool. Raises NotMeasured where the tool is not there."""
    command = [sys.executable, "-m", "bench.gpu.sanitizer", place.pick(PATTERN, TWIN_PATTERN)]
    if place.twin and tool != TWIN_TOOL:
        raise NotMeasured("the twin has no such tool")
    if place.twin:
        command.append("--twin")
    else:
        found = shutil.which("compute-sanitizer") or next(
            (path for path in PLACES if Path(path).exists()), None
        )
        if found is None:
            raise NotMeasured("compute-sanitizer is not installed")
        command = [found, "--tool", tool, "--error-exitcode", "77", *command]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    said = done.stdout + done.stderr
    if any(words in said for words in NOT_HERE):
        raise NotMeasured(f"{tool} does not take this device: {said[-200:]}")
    assert done.returncode == 0, f"{tool} exits with {done.returncode}: {said[-1500:]}"
    ran = re.search(r"ran (\d+)", said)
    assert ran is not None, said[-500:]
    return [Figure(f"cases that {tool} finds clean", int(ran[1]), goal="all")]


def main(pattern: str, twin: bool) -> None:
    from kvstore.cuda.device import Device  # noqa: PLC0415
    from support.cuda_launcher import DeviceLauncher  # noqa: PLC0415
    from support.kernel_runner import all_cases  # noqa: PLC0415

    device: Device
    if twin:
        from support.device_llama import shim_device  # noqa: PLC0415

        device = shim_device()
    else:
        from kvstore.cuda.cuda_device import CudaDevice  # noqa: PLC0415

        device = CudaDevice()
    launcher = DeviceLauncher(device)
    cases = [case for case in all_cases() if re.search(pattern, case.name)]
    for case in cases:
        case.run(launcher, 0)
    print(f"ran {len(cases)}")


if __name__ == "__main__":
    main(sys.argv[1], "--twin" in sys.argv)
