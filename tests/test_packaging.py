"""The folders install as one import name, `kvstore`, and NVIDIA's `cuda` stays NVIDIA's.

The store alone needs neither torch nor CuPy nor a GPU.
"""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.tree import PRODUCT, ROOT, plant, sources

ENGINES = ("kvstore.runtime", "kvstore.integrations")
SHIPPED = (".py", ".cpp", ".hpp", ".cu", ".cuh", ".txt", ".typed")
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "cupy", "cuda", "transformers", "tokenizers", "gguf"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocker())
"""
FOLDERS_IMPORT = """
import kvstore, kvstore.tiers.layout, kvstore.hashing, kvstore.cuda, kvstore.daemon
import sys
assert kvstore.tiers.layout.Layout.__module__ == "kvstore.tiers.layout"
assert not {"tiers", "hashing", "daemon", "integrations"} & set(sys.modules)
"""
NVIDIA_SURVIVES = [
    "import cuda.bindings.driver as driver; assert driver.cuInit",
    "import kvstore.cuda, cuda.bindings.driver; assert kvstore.cuda.__name__ == 'kvstore.cuda'",
    "import cuda.bindings, kvstore.cuda, sys; assert 'cuda.copy' not in sys.modules",
    "import cuda.bindings, cuda\nassert not any(p == '' for p in cuda.__path__)",
]
PLACES = pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["checkout", "elsewhere"])


def python(
    code: str, cwd: Path, executable: str = sys.executable, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, `path` first on its search path. `-c` puts cwd there too."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def passes(
    code: str, cwd: Path, executable: str = sys.executable, path: Path | None = None
) -> None:
    ran = python(code, cwd, executable, path)
    assert ran.returncode == 0, ran.stderr


@PLACES
def test_folders_import_as_one_namespace(cwd: Path) -> None:
    passes(FOLDERS_IMPORT, cwd)


@PLACES
@pytest.mark.parametrize("code", NVIDIA_SURVIVES)
def test_the_cuda_namespace_stays_nvidias(code: str, cwd: Path, tmp_path: Path) -> None:
    """With a stand-in laid out as NVIDIA's wheels are: `cuda/` without an __init__.py."""
    plant(tmp_path, "cuda/bindings/__init__.py", "")
    plant(tmp_path, "cuda/bindings/driver.py", "cuInit = True")
    passes(code, cwd, path=tmp_path)


def test_a_plain_folder_named_cuda_would_hide_it(tmp_path: Path) -> None:
    """What the guard in cuda/__init__.py prevents, so that the tests above are known to bite."""
    plant(tmp_path, "nvidia/cuda/bindings/__init__.py", "")
    plant(tmp_path, "checkout/cuda/__init__.py", "")
    ran = python("import cuda.bindings", tmp_path / "checkout", path=tmp_path / "nvidia")
    assert "No module named 'cuda.bindings'" in ran.stderr


def store_modules() -> list[str]:
    """Everything but the engines; of the commands, what the first of them imports."""
    above = (*ENGINES, "kvstore.cli.")
    modules = [source.module for source in sources(ROOT, PRODUCT)]
    return [name for name in modules if not name.startswith(above)] + ["kvstore.cli.main"]


@PLACES
def test_the_store_imports_without_torch_and_cupy(cwd: Path) -> None:
    passes(BLOCKER + "\n".join(f"import {module}" for module in store_modules()), cwd)


def test_the_blocker_blocks() -> None:
    assert "torch is not installed" in python(BLOCKER + "import torch", ROOT).stderr


def test_importing_the_store_loads_no_engine_and_no_command_line() -> None:
    heavy = {"torch", "transformers", "rich", "typer", "kvstore.cli", "kvstore.runtime"}
    passes(
        f"import kvstore, sys; found = {heavy} & set(sys.modules); assert not found, found", ROOT
    )


def test_public_names_are_listed() -> None:
    kvstore = importlib.import_module("kvstore")
    modules = {source.module.split(".")[1] for source in sources(ROOT, PRODUCT)[1:]}
    public = {name for name in vars(kvstore) if not name.startswith("_")} - modules - {"Path"}
    assert public <= set(kvstore.__all__)
    assert all(hasattr(kvstore, name) for name in kvstore.__all__)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a copy of this tree, and the wheel made from that sdist alone."""
    work = tmp_path_factory.mktemp("packaging")
    tree = work / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    make = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    made = subprocess.run(
        [sys.executable, "-c", make, str(work)], cwd=tree, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr.decode()
    (sdist,) = work.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(work), str(sdist)], check=True)
    (wheel,) = work.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path]) -> str:
    """A fresh interpreter with the wheel, and with this one's site-packages for what it needs.

    A .pth file's folders are searched but their own .pth files are not read, so the editable
    install of this checkout is not visible from there.
    """
    home = built[1].parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    executable = str(home / "bin" / "python")
    pip = [executable, "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(built[1])], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return executable


@pytest.mark.slow
def test_everything_ships(built: tuple[Path, Path]) -> None:
    files = [source.path for source in sources(ROOT, PRODUCT, SHIPPED)]
    in_wheel = [path if path.startswith("kvstore/") else f"kvstore/{path}" for path in files]
    with tarfile.open(built[0]) as sdist, zipfile.ZipFile(built[1]) as wheel:
        sent = {name.partition("/")[2] for name in sdist.getnames()}
        assert sorted(set(files) - sent) == []
        assert {"setup.py", "README.md", "LICENSE"} <= sent
        assert sorted(set(in_wheel) - set(wheel.namelist())) == []
        assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"kvstore"}
    assert any(path.endswith(".cpp") for path in files)


@pytest.mark.slow
@PLACES
def test_the_wheel_works(installed: str, cwd: Path) -> None:
    """In the checkout its own folders win, elsewhere the installed ones; both are one namespace."""
    passes(FOLDERS_IMPORT, cwd, installed)
    where = "import kvstore, kvstore.tiers; print(kvstore.tiers.__file__)"
    found = Path(python(where, cwd, installed).stdout.strip())
    assert found.is_relative_to(ROOT) == (cwd == ROOT)
    passes(BLOCKER + "\n".join(f"import {module}" for module in store_modules()), cwd, installed)
    ran = subprocess.run(
        [installed, "-m", "kvstore.cli", "--help"], cwd=cwd, capture_output=True, check=True
    )
    assert b"verify" in ran.stdout


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize("code", NVIDIA_SURVIVES)
def test_nvidias_own_package_works_beside_the_wheel(code: str, installed: str, cwd: Path) -> None:
    passes(code, cwd, installed)
