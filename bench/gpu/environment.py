"""What the figures were taken on. Reads only."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.place import Place
from bench.gpu.results import Figure, commit

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "numpy", "lmdb", "xxhash")
ASKED = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,pcie.link.gen.max"


def environment(place: Place) -> list[Figure]:
    """Names and versions."""
    found = [Figure("commit", commit()), Figure("device", place.device.name)]
    found.append(Figure("python", platform.python_version()))
    for name in PACKAGES:
        try:
            found.append(Figure(name, version(name)))
        except PackageNotFoundError:
            continue
    found.append(Figure("torch's CUDA", str(torch.version.cuda)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found.append(Figure("processors", os.cpu_count() or 0))
    found.append(Figure("host memory", round(memory / 2**30, 1), "GiB"))
    if not place.twin and shutil.which("nvidia-smi"):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found.append(Figure("nvidia-smi " + ASKED, done.stdout.strip()))
    return found
