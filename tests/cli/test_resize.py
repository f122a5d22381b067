"""`kvstore resize`, by the store's owner while it runs, and without one."""

import kvstore
from support.checks import disk_usage
from support.stored import (
    BLOCKS,
    LAYOUT,
    Stored,
    assert_one_sentence,
    pages,
    prompt,
    run,
    run_here,
)

MIB = 1 << 20


def test_without_an_owner(stored: Stored) -> None:
    ran = run_here("resize", "--store", stored.directory, "--disk", "16MiB", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.document
    assert (document["disk_bytes"], document["reason"]) == (16 * MIB, None)
    assert disk_usage(stored.directory) <= 16 * MIB
    disk = run_here("stats", "--store", stored.directory, "--json").document["tiers"]["disk"]
    assert disk["capacity_bytes"] == 16 * MIB
    assert disk["blocks"] == BLOCKS
    ran = run_here("resize", "--store", stored.directory, "--disk", "20MiB")
    assert ran.code == 0
    assert "disk 20.0 MiB; 0 blocks gave way" in ran.out
    with kvstore.open(stored.directory, host="8MiB") as store:
        space = store.namespace(LAYOUT, model="a-model", tenant="a-tenant")
        with space.sequence(prompt(BLOCKS)).lookup() as ticket:
            loaded = ticket.load(space.pool(pages(BLOCKS, seed=9)), range(BLOCKS)).result()
        assert loaded.tokens == BLOCKS * 16


def test_by_the_owner(stored: Stored) -> None:
    with kvstore.open(stored.directory, host="8MiB") as store:
        ran = run("resize", "--store", stored.directory, "--host", "5MiB", "--disk", "30MiB")
        assert (ran.code, ran.err) == (0, "")
        tiers = store.stats()["tiers"]
        assert tiers["host"]["capacity_bytes"] == 5 * MIB
        assert tiers["disk"]["capacity_bytes"] == 30 * MIB


def test_what_cannot_be_is_one_sentence(stored: Stored) -> None:
    store = ("resize", "--store", stored.directory)
    for arguments in (
        (),
        ("--host", "8MiB"),
        ("--disk", "1MiB"),
        ("--disk", "much"),
        ("--disk", "1000PiB"),
    ):
        assert_one_sentence(run_here(*store, *arguments))
    no_store = stored.directory / "disk0"
    assert_one_sentence(run_here("resize", "--store", no_store, "--disk", "8MiB"))
