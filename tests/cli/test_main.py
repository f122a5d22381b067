"""What all commands have in common: exit codes, errors in one sentence, help."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli.main import app, main
from support.stored import Stored, assert_one_sentence, run

COMMANDS = ("stats", "ls", "verify", "bench")


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(command in shown.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.output


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"kvstore {kvstore.__version__}\n"


def test_without_arguments_there_is_help() -> None:
    ran = run()
    assert ran.code == 2
    assert "verify" in ran.out + ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("stats",),
        ("stats", "--store"),
        ("stats", "--store", "x", "--colour"),
        ("ls", "--store", "x", "--limit", "many"),
        ("ls", "--store", "x", "--limit", "-1"),
        ("bench", "network"),
        ("bench", "host", "--size", "much"),
        ("bench", "host", "--size", "1KiB"),
        ("bench", "disk", "--directory", "no/such/place"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...]) -> None:
    assert_one_sentence(run(*arguments))


@pytest.mark.parametrize("command", ["stats", "ls", "verify"])
def test_what_is_not_a_store_is_one_sentence(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for name in ("missing", "file", "folder"):
        ran = run(command, "--store", tmp_path / name)
        assert_one_sentence(ran)
        assert name in ran.err


def test_a_store_of_another_format_is_one_sentence(stored: Stored) -> None:
    facts = stored.directory / "store.toml"
    facts.write_text(facts.read_text().replace("format = 1", "format = 99"), encoding="utf-8")
    ran = run("stats", "--store", stored.directory)
    assert_one_sentence(ran)
    assert "99" in ran.err


def test_main_gives_the_exit_code(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--store", str(stored.directory), "--json"]) == 0
    assert main(["stats", "--store", "no/such/store"]) == 2
    assert "no/such/store" in capsys.readouterr().err


def test_commands_import_no_engine() -> None:
    code = "import sys, kvstore.cli.main; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd="/", check=True)
