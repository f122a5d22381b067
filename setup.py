"""Maps the repository's folders onto one import namespace: tiers/ is kvstore.tiers, and so on.

Nothing but `kvstore` is ever installed at the top level: `cuda` belongs to NVIDIA's packages,
and `daemon`, `tests` and `tiers` are nobody's to claim.
"""

from pathlib import Path

from setuptools import setup

FOLDERS = ("tiers", "hashing", "cuda", "daemon", "integrations")
ROOT = Path(__file__).resolve().parent


def packages() -> dict[str, str]:
    """Import name -> folder, for every folder with an __init__.py."""
    found = {}
    for top in ("kvstore", *FOLDERS):
        for init in sorted((ROOT / top).rglob("__init__.py")):
            folder = init.parent.relative_to(ROOT).as_posix()
            name = folder.replace("/", ".")
            found[name if top == "kvstore" else f"kvstore.{name}"] = folder
    return found


setup(
    packages=list(packages()),
    package_dir=packages(),
    package_data={"": ["py.typed", "*.cpp", "*.hpp", "*.cu", "*.cuh", "*.txt"]},
    include_package_data=False,  # Package data is exactly the line above: no manifest guessing.
)
