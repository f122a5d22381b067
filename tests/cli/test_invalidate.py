"""`kvstore invalidate`, with an owner that runs and without one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.main import main
from support.stored import BLOCKS, LAYOUT, Ran, Stored, assert_one_sentence, pages, prompt, run

Capture = pytest.CaptureFixture[str]


def here(capsys: Capture, *arguments: str | Path) -> Ran:
    """The command in this very process, which is many times faster."""
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return Ran(code, told.out, told.err)


def tokens_found(directory: Path, tenant: str = "a-tenant") -> int:
    with kvstore.open(directory, host="8MiB") as store:
        return found_in(store, tenant)


def found_in(store: kvstore.Store, tenant: str = "a-tenant") -> int:
    space = store.namespace(LAYOUT, model="a-model", tenant=tenant)
    with space.sequence(prompt(BLOCKS)).lookup() as ticket:
        loaded = ticket.load(space.pool(pages(BLOCKS)), range(BLOCKS)).result()
        return loaded.tokens


@contextmanager
def owned(stored: Stored) -> Iterator[kvstore.Store]:
    """The store in use, by this process."""
    with kvstore.open(stored.directory, host="8MiB") as store:
        yield store


@pytest.mark.parametrize(
    "scope", [["--tenant", "a-tenant"], ["--model", "a-model"], ["--all", "--yes"], ["--prefix"]]
)
def test_without_an_owner(stored: Stored, scope: list[str], capsys: Capture) -> None:
    asked = [*scope, stored.keys[0]] if scope == ["--prefix"] else scope
    ran = here(capsys, "invalidate", "--store", stored.directory, *asked, "--json")
    document = ran.document
    assert document["bytes"] > 0
    del document["bytes"]
    assert document == {"blocks": BLOCKS, "namespaces": 1, "durable": True}
    assert here(capsys, "ls", "--store", stored.directory, "--json").document["blocks"] == []
    assert tokens_found(stored.directory) == 0


def test_the_owner_does_it_while_it_runs(stored: Stored) -> None:
    with owned(stored) as store:
        assert found_in(store) == BLOCKS * 16
        ran = run("invalidate", "--store", stored.directory, "--prefix", stored.keys[5])
        assert ran.code == 0
        assert f"{BLOCKS - 5} blocks" in ran.out
        assert "of 1 namespaces dropped; durable" in ran.out
        assert found_in(store) == 5 * 16
    assert tokens_found(stored.directory) == 5 * 16


def test_nothing_matched_says_what_there_is(stored: Stored, capsys: Capture) -> None:
    for opened in (owned(stored), nullcontext()):
        with opened:
            ran = here(capsys, "invalidate", "--store", stored.directory, "--tenant", "nobody")
        assert ran.code == 0
        assert ran.out.startswith("0 blocks, 0 B, of 0 namespaces")
        assert "a-model a-tenant" in ran.out
    assert tokens_found(stored.directory) == BLOCKS * 16


def test_what_is_not_durable_is_told_by_the_exit_code(stored: Stored, capsys: Capture) -> None:
    (stored.directory / "invalidated.new").mkdir()  # so that the file cannot be written
    ran = here(capsys, "invalidate", "--store", stored.directory, "--tenant", "a-tenant")
    assert ran.code == 1
    assert "not durable" in ran.out
    assert ran.err.startswith("kvstore: the disk did not take it")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--all"],
        ["--tenant", "a", "--all", "--yes"],
        ["--prefix", "12"],
        ["--namespace", "xyz"],
    ],
)
def test_wrong_usage(stored: Stored, arguments: list[str], capsys: Capture) -> None:
    assert_one_sentence(here(capsys, "invalidate", "--store", stored.directory, *arguments))


def test_what_is_no_store(tmp_path: Path, capsys: Capture) -> None:
    assert_one_sentence(here(capsys, "invalidate", "--store", tmp_path, "--tenant", "a"))
