"""Imports point one way.

integrations, daemon, cli -> runtime, insight -> core -> tiers -> cuda, hashing -> native
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tree import PRODUCT, ROOT, Source, plant, sources

# What each layer may import besides itself; "kvstore" is the core: the files directly in kvstore/.
LOW = {"kvstore.native"}
TIERS = LOW | {"kvstore.hashing", "kvstore.cuda"}
CORE = TIERS | {"kvstore.tiers"}
ABOVE_CORE = CORE | {"kvstore"}
LAYERS: dict[str, set[str]] = {
    "kvstore.native": set(),
    "kvstore.hashing": LOW,
    "kvstore.cuda": LOW,
    "kvstore.tiers": TIERS,
    "kvstore": CORE,
    "kvstore.insight": ABOVE_CORE,
    "kvstore.runtime": ABOVE_CORE,
    "kvstore.daemon": ABOVE_CORE | {"kvstore.insight"},
    "kvstore.integrations": ABOVE_CORE | {"kvstore.runtime"},
    "kvstore.cli": ABOVE_CORE | {"kvstore.runtime", "kvstore.insight", "kvstore.daemon"},
}
# The store stands alone: torch belongs to the engines. The commands reach it through the runtime.
MAY_IMPORT_TORCH = {"kvstore.runtime", "kvstore.integrations"}
BARE = {"tiers", "hashing", "daemon", "integrations"}
NVIDIA = {"bindings", "core", "pathfinder"}


def layer_of(module: str) -> str | None:
    """The layer a module, or a name in it, belongs to; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "kvstore":
        return None
    return next((name for name in LAYERS if name == ".".join(parts[:2])), "kvstore")


def import_faults(source: Source) -> Iterator[str]:
    own = layer_of(source.module)
    reached = ((ref.name, ref.line) for ref in source.references() if "." in ref.name)
    used = [*source.imports(), *reached]
    for module, line in sorted(set(used), key=lambda found: found[1]):
        target = layer_of(module)
        if own and target not in {None, own} | LAYERS[own]:
            yield f"{source.path}:{line}: {own} uses {module} of {target}"
    for module, line in source.imports():
        first, second = (*module.split("."), "")[:2]
        if module.startswith("."):
            yield f"{source.path}:{line}: relative import"
        if first in BARE or (first == "cuda" and second not in NVIDIA):
            yield f"{source.path}:{line}: imports {first} by its bare name"
        if first == "torch" and own and own not in MAY_IMPORT_TORCH:
            yield f"{source.path}:{line}: {own} imports torch"


def shadow_faults(root: Path) -> Iterator[str]:
    """A file kvstore/tiers.py would win over the folder tiers/ that is mapped to the same name."""
    for folder in PRODUCT:
        for shadow in (root / "kvstore" / folder, root / "kvstore" / f"{folder}.py"):
            if shadow.exists():
                yield f"{shadow.relative_to(root)}: hides the folder {folder}/"


def faults(root: Path) -> list[str]:
    found = [fault for source in sources(root) for fault in import_faults(source)]
    return [*found, *shadow_faults(root)]


def test_imports_point_down() -> None:
    assert faults(ROOT) == []


def test_every_layer_is_looked_at() -> None:
    seen = {layer_of(source.module) for source in sources(ROOT, PRODUCT)}
    assert set(LAYERS) - seen <= {"kvstore.insight"}  # comes with a later version


PLANTED = [
    ("kvstore/native/x.py", "import kvstore.hashing.chain", "kvstore.native uses"),
    ("hashing/x.py", "from kvstore.tiers.layout import Layout", "kvstore.hashing uses"),
    ("hashing/x.py", "import kvstore.cuda", "kvstore.hashing uses"),
    ("cuda/x.py", "from kvstore import hashing", "kvstore.cuda uses"),
    ("cuda/x.py", "import kvstore.tiers.errors", "kvstore.cuda uses"),
    ("tiers/x.py", "from kvstore.index import Index", "kvstore.tiers uses"),
    ("tiers/x.py", "from kvstore import KvstoreError", "kvstore.tiers uses"),
    ("kvstore/x.py", "def f():\n    import kvstore.runtime.engine", "kvstore uses"),
    ("kvstore/__init__.py", "from kvstore import cli", "kvstore uses"),
    ("kvstore/x.py", "import kvstore\nkvstore.runtime.engine", "kvstore uses"),
    ("kvstore/x.py", "import kvstore.insight.explain as e", "kvstore uses"),
    ("kvstore/x.py", "import importlib\nimportlib.import_module('kvstore.cli')", "kvstore uses"),
    ("kvstore/x.py", "import kvstore.daemon", "kvstore uses"),
    ("kvstore/runtime/x.py", "import kvstore.cli.main", "kvstore.runtime uses"),
    ("kvstore/runtime/models/x.py", "import kvstore.insight", "kvstore.runtime uses"),
    ("kvstore/insight/x.py", "import kvstore.runtime", "kvstore.insight uses"),
    ("daemon/x.py", "from kvstore.runtime import engine", "kvstore.daemon uses"),
    ("daemon/x.py", "import kvstore.cli", "kvstore.daemon uses"),
    ("integrations/x.py", "import kvstore.daemon.server", "kvstore.integrations uses"),
    ("integrations/x.py", "from kvstore.cli import main", "kvstore.integrations uses"),
    ("kvstore/cli/x.py", "import kvstore.integrations", "kvstore.cli uses"),
    ("kvstore/x.py", "import torch", "imports torch"),
    ("tiers/x.py", "from torch import Tensor", "imports torch"),
    ("daemon/x.py", "def f():\n    import torch.nn", "imports torch"),
    ("kvstore/cli/x.py", "import torch", "imports torch"),
    ("kvstore/x.py", "from importlib import import_module\nimport_module('torch')", "torch"),
    ("kvstore/cli/x.py", "from . import main", "relative import"),
    ("tests/x.py", "from .support import tree", "relative import"),
    ("tests/tiers/x.py", "import tiers.record", "bare name"),
    ("bench/x.py", "from hashing import chain", "bare name"),
    ("cuda/x.py", "from cuda import copy", "bare name"),
    ("examples/x.py", "import daemon", "bare name"),
    ("examples/x.py", "import integrations.vllm", "bare name"),
    ("kvstore/tiers.py", "", "hides the folder"),
    ("kvstore/cuda/x.py", "", "hides the folder"),
]


@pytest.mark.parametrize(("path", "code", "fault"), PLANTED)
def test_a_planted_import_is_found(path: str, code: str, fault: str, tmp_path: Path) -> None:
    plant(tmp_path, path, code)
    assert fault in "\n".join(faults(tmp_path))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("cuda/x.py", "from cuda.bindings import driver\nimport kvstore.native.build"),
        ("tiers/x.py", "import kvstore.cuda.copy\nfrom kvstore.hashing import chain"),
        (
            "kvstore/x.py",
            "from kvstore.tiers.disk import DiskTier\nfrom kvstore.index import Index",
        ),
        ("kvstore/runtime/models/x.py", "import torch\nfrom kvstore.runtime.pages import PagePool"),
        ("kvstore/cli/x.py", "import kvstore.daemon.server, kvstore.runtime.engine, kvstore"),
        ("daemon/x.py", "import kvstore.insight.mrc\nfrom kvstore.config import Config"),
        ("integrations/x.py", "import torch, kvstore.client"),
        ("tiers/x.py", "import kvstore.tiers.base\nkvstore.tiers.base.MissReason"),
    ],
)
def test_what_is_allowed_is_not_a_fault(path: str, code: str, tmp_path: Path) -> None:
    plant(tmp_path, path, code)
    assert faults(tmp_path) == []
