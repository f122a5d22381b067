"""`kvstore ls`: which blocks lie on disk."""

from support.stored import BLOCKS, Stored, run


def test_every_block_is_listed(stored: Stored) -> None:
    document = run("ls", "--store", stored.directory, "--json").document
    by_place = {block["first_token"]: block for block in document["blocks"]}
    assert [by_place[16 * i]["key"] for i in range(BLOCKS)] == list(stored.keys)
    assert [by_place[16 * i]["parent"] for i in range(1, BLOCKS)] == list(stored.keys[:-1])
    assert {block["label"] for block in document["blocks"]} == {"a-model a-tenant"}
    assert document["not_listed"] == 0


def test_limit(stored: Stored) -> None:
    document = run("ls", "--store", stored.directory, "--json", "--limit", "3").document
    assert (len(document["blocks"]), document["not_listed"]) == (3, BLOCKS - 3)
    document = run("ls", "--store", stored.directory, "--json", "--limit", "0").document
    assert (len(document["blocks"]), document["not_listed"]) == (BLOCKS, 0)


def test_for_people(stored: Stored) -> None:
    ran = run("ls", "--store", stored.directory, "--limit", "2")
    assert ran.code == 0
    assert "a-model" in ran.out
    assert f"2 blocks listed, {BLOCKS - 2} more" in ran.out
    assert sum(key[:16] in ran.out for key in stored.keys) == 2
