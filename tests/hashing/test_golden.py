"""Keys and checksums that must never change: stored data is found and checked by them.

golden.json was computed by plain.py, which shares no code with the product. Here the product must
give the same in five processes with other hash seeds, and plain.py under another Python version.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"
PROCESSES = (("0", False), ("1", True), ("4294967295", False), ("random", True), ("random", False))
VERSIONS = range(9, 20)  # the minors of Python 3 that plain.py is tried under


def run(*command: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def result(process: subprocess.Popen[str]) -> Any:
    out, problem = process.communicate(timeout=120)
    assert process.returncode == 0, out + problem
    return json.loads(out.splitlines()[-1])


def test_five_processes_with_other_hash_seeds_give_the_golden_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    for seed, fallback in PROCESSES:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        arguments = (sys.executable, str(HERE / "product.py"), str(GOLDEN), *["plain"] * fallback)
        started.append(run(*arguments))
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {len(rows) for rows in golden.values()} == {5, 26, 34}
    for process in started:
        assert result(process) == golden


def test_another_python_version_computes_the_golden_vectors() -> None:
    """Uses whatever other version the machine has, and this one where it has none."""
    mine = list(sys.version_info[:2])
    siblings = Path(sys.base_prefix).parent
    others = [str(path) for path in siblings.glob("*3.*/bin/python3")]
    others += filter(None, (shutil.which(f"python3.{minor}") for minor in VERSIONS))
    for python in [*others, sys.executable]:
        asked = run(python, "-I", "-c", "import sys; print(list(sys.version_info[:2]))")
        out, _ = asked.communicate(timeout=60)
        usable = asked.returncode == 0 and json.loads(out)[0] == 3 and json.loads(out)[1] >= 8
        if usable and (json.loads(out) != mine or python == sys.executable):
            break
    assert result(run(python, "-I", "-B", str(HERE / "plain.py"), str(GOLDEN))) == json.loads(out)


def test_a_wrong_vector_is_noticed(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    golden["chains"][3]["keys"][1] = "00" * 16
    wrong = tmp_path / "golden.json"
    wrong.write_text(json.dumps(golden), encoding="utf-8")
    process = run(sys.executable, "-I", "-B", str(HERE / "plain.py"), str(wrong))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.startswith("chains 3")
