"""`kvstore export` and `kvstore import`, as a user runs them."""

from pathlib import Path

import kvstore
from support.stored import BLOCKS, Stored, run_here


def test_there_and_back(stored: Stored, tmp_path: Path) -> None:
    file, target = tmp_path / "archive", tmp_path / "other"
    kvstore.open(target, host="8MiB", disk_capacity="64MiB").close()
    done = run_here("export", file, "--store", stored.directory, "--tenant", "a-tenant")
    code, out = done.code, done.out
    assert code == 0
    assert out.startswith(f"{BLOCKS} blocks of 1 namespaces")
    assert [path.name for path in tmp_path.glob("archive*")] == ["archive"]
    done = run_here("import", file, "--store", target)
    code, out = done.code, done.out
    assert code == 0
    assert out.startswith(f"{BLOCKS} blocks imported, 0 were there already, 0 refused")
    done = run_here("import", file, "--store", target)
    code, out = done.code, done.out
    assert out.startswith(f"0 blocks imported, {BLOCKS} were there already")


def test_nothing_is_written_over(stored: Stored, tmp_path: Path) -> None:
    file = tmp_path / "archive"
    file.write_text("mine")
    done = run_here("export", file, "--store", stored.directory)
    code, out, err = done.code, done.out, done.err
    assert (code, out) == (2, "")
    assert "exists already" in err
    assert file.read_text() == "mine"
    done = run_here("export", "-", "--store", stored.directory, "--json")
    code, err = done.code, done.err
    assert (code, err.count("\n")) == (2, 1)


def test_a_failed_export_leaves_no_file(stored: Stored, tmp_path: Path) -> None:
    prefix = "00" * 16
    done = run_here("export", tmp_path / "x", "--store", stored.directory, "--prefix", prefix)
    code, err = done.code, done.err
    assert code == 2
    assert prefix in err
    assert not list(tmp_path.glob("x*"))


def test_a_cut_file(stored: Stored, tmp_path: Path) -> None:
    file, target = tmp_path / "archive", tmp_path / "other"
    kvstore.open(target, host="8MiB", disk_capacity="64MiB").close()
    run_here("export", file, "--store", stored.directory)
    file.write_bytes(file.read_bytes()[:100_000])
    done = run_here("import", file, "--store", target)
    code, out, err = done.code, done.out, done.err
    assert (code, out) == (2, "")
    assert "ends too early" in err
    assert "Traceback" not in err
    done = run_here("import", file, "--store", target, "--partial")
    code, out = done.code, done.out
    assert code == 1
    assert out.startswith("4 blocks imported")
    assert "The archive is not whole." in out


def test_a_file_that_is_not_there(stored: Stored, tmp_path: Path) -> None:
    done = run_here("import", tmp_path / "nothing", "--store", stored.directory)
    code, err = done.code, done.err
    assert code == 2
    assert "No such file" in err
