"""Maps the repository's folders onto one import namespace: tiers/ is kvstore.tiers, and so on.

Nothing but `kvstore` is ever installed at the top level: `cuda` belongs to NVIDIA's packages,
and `daemon`, `tests` and `tiers` are nobody's to claim.
"""

from setuptools import setup

FOLDERS = ("tiers", "hashing", "cuda", "daemon", "integrations")
INSIDE = ("kvstore.native", "kvstore.cli", "kvstore.runtime", "kvstore.runtime.models")

setup(
    packages=["kvstore", *INSIDE, *(f"kvstore.{folder}" for folder in FOLDERS)],
    package_dir={"kvstore": "kvstore", **{f"kvstore.{folder}": folder for folder in FOLDERS}},
    package_data={
        "kvstore": ["py.typed"],
        "kvstore.native": ["*.cpp", "*.hpp"],
        "kvstore.runtime": ["*.cpp", "*.hpp", "*.txt"],
        "kvstore.cuda": ["*.cu", "*.cuh"],
    },
    include_package_data=False,  # Package data is exactly the lines above: no manifest guessing.
)
