"""Runs kernel cases in a process of its own, which a sanitizer, or a planted bug, may end.

    python -m support.kernel_runner LIBRARY PATTERN STEP SEED...

Every STEP-th case whose name matches PATTERN, under each scheduling seed. Prints how many ran.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.cuda_shim import Kernels
from support.decode_cases import decode_cases
from support.kernel_cases import Case, copy_cases, rope_cases
from support.probe_cases import probe_cases

TESTS = Path(__file__).resolve().parents[1]
PRELOADED = {"asan": ("libasan.so", "libubsan.so"), "tsan": ("libtsan.so",)}
OPTIONS = {
    "plain": {},
    "asan": {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    "tsan": {"TSAN_OPTIONS": "report_signal_unsafe=0:history_size=0:exitcode=66"},
}


def all_cases() -> list[Case]:
    """Every case there is."""
    return [*probe_cases(), *copy_cases(), *rope_cases(), *decode_cases()]


def run_apart(
    library: Path,
    mode: str,
    *,
    pattern: str = "",
    step: int = 1,
    seeds: Sequence[int] = (1,),
    timeout_s: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Run cases in another process, under the sanitizer that the library was built with."""
    command = ["setarch", "-R", sys.executable, "-m", "support.kernel_runner", str(library)]
    command += [pattern, str(step), *map(str, seeds)]
    found = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in PRELOADED.get(mode, ())
    ]
    variables = [f"{name}={value}" for name, value in OPTIONS[mode].items()]
    if found:
        variables.append(f"LD_PRELOAD={':'.join(found)}")
    return subprocess.run(
        ["env", *variables, *command],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def main() -> None:
    library, pattern, step, *seeds = sys.argv[1:]
    kernels = Kernels(Path(library))
    chosen = [case for case in all_cases() if re.search(pattern, case.name)][:: int(step)]
    assert chosen, f"no case matches {pattern!r}"
    for case in chosen:
        for seed in seeds:
            try:
                case.run(kernels, int(seed))
            except Exception as error:
                print(f"FAILED {case.name} seed {seed}: {error}"[:600], flush=True)
                raise SystemExit(1) from None
    print(f"ran {len(chosen)}")


if __name__ == "__main__":
    main()
