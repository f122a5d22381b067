"""`kvstore export` and `kvstore import`, as a user runs them."""

from pathlib import Path

import pytest

import kvstore
from kvstore.cli.main import main
from support.stored import BLOCKS, Stored


def ran(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_there_and_back(stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "archive", tmp_path / "other"
    kvstore.open(target, host="8MiB", disk_capacity="64MiB").close()
    code, out, _ = ran(capsys, "export", file, "--store", stored.directory, "--tenant", "a-tenant")
    assert code == 0
    assert out.startswith(f"{BLOCKS} blocks of 1 namespaces")
    assert [path.name for path in tmp_path.glob("archive*")] == ["archive"]
    code, out, _ = ran(capsys, "import", file, "--store", target)
    assert code == 0
    assert out.startswith(f"{BLOCKS} blocks imported, 0 were there already, 0 refused")
    code, out, _ = ran(capsys, "import", file, "--store", target)
    assert out.startswith(f"0 blocks imported, {BLOCKS} were there already")


def test_nothing_is_written_over(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "archive"
    file.write_text("mine")
    code, out, err = ran(capsys, "export", file, "--store", stored.directory)
    assert (code, out) == (2, "")
    assert "exists already" in err
    assert file.read_text() == "mine"
    code, _, err = ran(capsys, "export", "-", "--store", stored.directory, "--json")
    assert (code, err.count("\n")) == (2, 1)


def test_a_failed_export_leaves_no_file(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = "00" * 16
    code, _, err = ran(
        capsys, "export", tmp_path / "x", "--store", stored.directory, "--prefix", prefix
    )
    assert code == 2
    assert prefix in err
    assert not list(tmp_path.glob("x*"))


def test_a_cut_file(stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "archive", tmp_path / "other"
    kvstore.open(target, host="8MiB", disk_capacity="64MiB").close()
    ran(capsys, "export", file, "--store", stored.directory)
    file.write_bytes(file.read_bytes()[:100_000])
    code, out, err = ran(capsys, "import", file, "--store", target)
    assert (code, out) == (2, "")
    assert "ends too early" in err
    assert "Traceback" not in err
    code, out, _ = ran(capsys, "import", file, "--store", target, "--partial")
    assert code == 1
    assert out.startswith("4 blocks imported")
    assert "The archive is not whole." in out


def test_a_file_that_is_not_there(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = ran(capsys, "import", tmp_path / "nothing", "--store", stored.directory)
    assert code == 2
    assert "No such file" in err
