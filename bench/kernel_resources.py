"""Registers, spills and shared memory of every kernel, for each architecture that is supported.

    python -m bench.kernel_resources [--write]

No GPU is needed. The table lies in cuda/resources.txt; a test compares it with what NVRTC says.
"""

import sys
from pathlib import Path

from kvstore.cuda import nvrtc
from kvstore.cuda.kernel_table import DTYPES, HEAD_DIMS, KERNELS, SOURCES, decode_shared_bytes

ARCHITECTURES = (80, 90, 100)
TABLE = Path(__file__).resolve().parents[1] / "cuda" / "resources.txt"
SHARED = {f"decode_{t}_{d}": decode_shared_bytes(t, d) for t in DTYPES for d in HEAD_DIMS}


def table() -> str:
    """The table as text. Raises CompileError; AssertionError for a warning or a spill."""
    columns: dict[int, dict[str, nvrtc.Resources]] = {}
    for architecture in ARCHITECTURES:
        found = columns[architecture] = {}
        for source in SOURCES:
            log = nvrtc.compile_source(source, architecture).log
            assert not nvrtc.warnings_in(log), nvrtc.warnings_in(log)
            found.update(nvrtc.resources(log))
        assert found.keys() == KERNELS.keys(), found.keys() ^ KERNELS.keys()
        spilled = [n for n, r in found.items() if r.spill_bytes or r.stack_bytes]
        assert not spilled, f"sm_{architecture} spills in {spilled}"
    lines = ["kernel            dynamic shared bytes  registers on " + _names(), ""]
    for name in KERNELS:
        registers = "  ".join(f"{columns[a][name].registers:5d}" for a in ARCHITECTURES)
        lines.append(f"{name:17s} {SHARED.get(name, 0):20d}  {registers}")
    return "\n".join(lines) + "\n"


def _names() -> str:
    return ", ".join(f"sm_{architecture}" for architecture in ARCHITECTURES)


if __name__ == "__main__":
    text = table()
    if "--write" in sys.argv:
        TABLE.write_text(text)
    sys.stdout.write(text)
