"""`kvstore pin`, by the store's owner while it runs, and without one."""

from pathlib import Path

import pytest

import kvstore
from kvstore.cli.main import main
from support.stored import BLOCKS, LAYOUT, Ran, Stored, assert_one_sentence, pages, prompt, run

Capture = pytest.CaptureFixture[str]


def here(capsys: Capture, *arguments: str | Path) -> Ran:
    """The command in this very process, which is many times faster."""
    code = main([str(argument) for argument in arguments])
    return Ran(code, *capsys.readouterr())


def test_without_an_owner(stored: Stored, capsys: Capture) -> None:
    store = ["pin", "--store", stored.directory]
    ran = here(capsys, *store, "--prefix", stored.keys[4], "--ttl", "90m", "--json")
    assert (ran.code, ran.document["refused"]) == (0, None)
    pin = ran.document["pin"]
    assert (pin["pin_id"], pin["blocks"], pin["stored_blocks"], pin["ttl_s"]) == (1, 5, 5, 5400)
    ran = here(capsys, *store, "--prefix", stored.keys[-1])
    assert ran.code == 0
    assert f"pin 2: {BLOCKS} blocks" in ran.out
    assert "kept until 1d after the last hit" in ran.out
    listed = here(capsys, *store, "--list", "--json").document["pins"]
    assert [one["key"] for one in listed] == [stored.keys[4], stored.keys[-1]]
    assert {one["label"] for one in listed} == {"a-model a-tenant"}
    told = here(capsys, *store, "--list").out
    assert "5 of 5" in told
    assert "1h 30m" in told
    assert f"pinned: {BLOCKS} blocks" in here(capsys, "stats", "--store", stored.directory).out
    assert here(capsys, *store, "--remove", "1").out == "pin 1 removed\n"
    ran = here(capsys, *store, "--remove", "1", "--json")
    assert (ran.code, ran.document) == (1, {"removed": False})
    with kvstore.open(stored.directory, host="8MiB") as opened:
        assert [one.pin_id for one in opened.pins()] == [2]


def test_by_the_owner(stored: Stored) -> None:
    with kvstore.open(stored.directory, host="8MiB") as store:
        command = ["pin", "--store", stored.directory]
        ran = run(*command, "--prefix", stored.keys[4], "--ttl", "1h", "--json")
        assert (ran.code, ran.document["pin"]["blocks"]) == (0, 5)
        assert run(*command, "--list", "--json").document["pins"][0]["key"] == stored.keys[4]
        assert [one.ttl_s for one in store.pins()] == [3600]
        ran = run(*command, "--prefix", "00" * 16)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("kvstore: not pinned: no block has this key")
        assert run(*command, "--remove", "1").code == 0
        assert store.pins() == []


def test_what_is_beyond_the_share_is_refused(stored: Stored) -> None:
    with kvstore.open(stored.directory, host="8MiB", pin_fraction=0.0) as store:
        space = store.namespace(LAYOUT, model="a-model", tenant="a-tenant")
        answer = store.pin(space.sequence(prompt(BLOCKS)), ttl_s=60)
        assert answer == kvstore.PinRefused(kvstore.PinRefusal.OVER_BUDGET)
        ran = run("pin", "--store", stored.directory, "--prefix", stored.keys[0], "--json")
        assert (ran.code, ran.document) == (1, {"pin": None, "refused": "over_budget"})
        assert "pin_fraction" in ran.err
        assert space.pool(pages(1)).pages == 1


def test_what_makes_no_sense_is_one_sentence(stored: Stored, capsys: Capture) -> None:
    store = ["pin", "--store", str(stored.directory)]
    for arguments in (
        [],
        ["--list", "--remove", "1"],
        ["--prefix", "abc"],
        ["--prefix", stored.keys[0], "--ttl", "1"],
        ["--prefix", stored.keys[0], "--ttl", "0s"],
        ["--prefix", stored.keys[0], "--ttl", "3 weeks"],
        ["--remove", "0"],
    ):
        assert_one_sentence(here(capsys, *store, *arguments))
    assert_one_sentence(here(capsys, "pin", "--store", stored.directory / "disk0", "--list"))
