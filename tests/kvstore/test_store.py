"""The store as a whole: what a hit is, who may share it, and what collides."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.store import Store
from kvstore.store import open as open_store
from kvstore.tiers.base import MissReason, SaveDrop, TierName
from support.checks import assert_at_rest
from support.engine import Engine, prompt
from support.layouts import small_layout
from support.moves import Move, as_it_is, emptied_host, restarted

BLOCK = 4
PAGES = 64
LAYOUT = small_layout(BLOCK)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(host="8MiB") as opened:
        yield opened
        assert_at_rest(opened)


@pytest.fixture(params=[as_it_is, emptied_host, restarted], ids=["host", "disk", "restart"])
def tier(request: pytest.FixtureRequest) -> Move:
    """What happens between a save and the lookup, so that each tier is asked."""
    reopen: Move = request.param
    return reopen


@pytest.fixture
def disk_store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", host="8MiB", disk_capacity="32MiB")


def engine_of(store: Store, **identity: Any) -> Engine:
    identity.setdefault("model", "sha256:weights")
    return Engine(store.namespace(identity.pop("layout", LAYOUT), **identity), PAGES)


# --- lengths


@pytest.mark.parametrize(
    ("length", "usable"),
    [(0, 0), (1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (28, 6), (29, 7), (31, 7)],
)
def test_one_token_is_always_left_to_compute(
    disk_store: Store, tier: Move, length: int, usable: int
) -> None:
    engine_of(disk_store).save(prompt(length))
    with tier(disk_store) as store:
        engine = engine_of(store)
        with engine.space.sequence(prompt(length)).lookup() as ticket:
            assert (ticket.blocks, ticket.tokens) == (usable, usable * BLOCK)
            assert ticket.tokens <= max(0, length - 1)
            assert sum(ticket.by_tier.values()) == ticket.tokens
            assert ticket.misses == {}
            assert engine.load(ticket).tokens == usable * BLOCK
        assert_at_rest(store)


@pytest.mark.parametrize("cut", range(2 * BLOCK + 1))
def test_prompts_that_diverge_share_whole_blocks_only(store: Store, cut: int) -> None:
    engine = engine_of(store)
    tokens = prompt(4 * BLOCK + 1)
    engine.save(tokens)
    other = np.concatenate([tokens[:cut], prompt(4 * BLOCK, 2) + 100_000])
    with engine.space.sequence(other).lookup() as ticket:
        assert ticket.blocks == cut // BLOCK
        assert ticket.misses == {
            MissReason.ABSENT: (cut + 4 * BLOCK - 1) // BLOCK * BLOCK - ticket.tokens
        }
        engine.load(ticket)


def test_a_lookup_again_with_tokens_of_ones_own_leases_once(store: Store) -> None:
    """A request that was preempted and comes back holds more than the store has."""
    engine = engine_of(store)
    tokens = prompt(6 * BLOCK + 1)
    engine.save(tokens[: 3 * BLOCK])
    sequence = engine.space.sequence(tokens)
    with sequence.lookup() as first:
        assert first.tokens == 3 * BLOCK
    with sequence.lookup(skip_tokens=5 * BLOCK) as second:
        assert second.tokens == 3 * BLOCK
        result = engine.load(second)
        assert sum(result.by_tier.values()) == 0


def test_growing_a_sequence_finds_more(store: Store) -> None:
    engine = engine_of(store)
    tokens = prompt(10 * BLOCK + 1)
    engine.save(tokens)
    sequence = engine.space.sequence(tokens[: 2 * BLOCK + 1])
    with sequence.lookup() as ticket:
        assert ticket.blocks == 2
    sequence.extend(tokens[2 * BLOCK + 1 :])
    with sequence.lookup() as ticket:
        assert ticket.blocks == 10


# --- who may share


OTHERS: list[dict[str, Any]] = [
    {"tenant": "b"},
    {"salt": b"b"},
    {"salt": b""},
    {"adapter": "french@2"},
    {"adapter": "german@1"},
    {"adapter": ""},
    {"model": "sha256:other"},
    {"layout": small_layout(BLOCK, dtype="bfloat16"), "mixed": True},
    {"shards": 2},
    {"attributes": {"rope_theta": "1000"}},
]
BASE: dict[str, Any] = {"tenant": "a", "salt": b"a", "adapter": "french@1"}


def test_nobody_else_hits_and_the_same_does(disk_store: Store, tier: Move) -> None:
    tokens = prompt(8 * BLOCK + 1)
    engine_of(disk_store, **BASE).save(tokens)
    with tier(disk_store) as store:
        for other in OTHERS:
            with engine_of(store, **{**BASE, **other}).space.sequence(tokens).lookup() as ticket:
                assert ticket.tokens == 0
                # It cannot even be told that somebody else has it.
                assert set(ticket.misses) == {MissReason.ABSENT}
        assert engine_of(store, **BASE).ask(tokens).tokens == 8 * BLOCK
        assert_at_rest(store)


def test_tenants_with_the_same_prompt_keep_their_own_bytes(disk_store: Store, tier: Move) -> None:
    tokens = prompt(8 * BLOCK + 1)
    for tenant in ("a", "b", "c"):
        assert engine_of(disk_store, tenant=tenant).save(tokens)[1].saved == 8
    with tier(disk_store) as store:
        for tenant in ("a", "b", "c"):
            assert engine_of(store, tenant=tenant).ask(tokens).tokens == 8 * BLOCK
        assert_at_rest(store)


def test_media_is_part_of_what_a_block_is(disk_store: Store) -> None:
    tokens = prompt(4 * BLOCK + 1)
    one, two = {2: b"x" * 32}, {2: b"y" * 32}
    engine_of(disk_store).save(tokens, media=one)
    for store in (disk_store, emptied_host(disk_store)):
        engine = engine_of(store)
        assert engine.ask(tokens, media=two).tokens == 2 * BLOCK  # the text before it is shared
        assert engine.ask(tokens).tokens == 2 * BLOCK
        assert engine.ask(tokens, media=one).tokens == 4 * BLOCK
        assert_at_rest(store)
    with restarted(disk_store) as store:
        engine = engine_of(store)
        assert engine.ask(tokens, media=two).tokens == 2 * BLOCK
        assert engine.ask(tokens).tokens == 2 * BLOCK
        engine.ask(tokens, media=one)  # exact, whatever it finds
        assert_at_rest(store)


# --- collisions


def colliding(
    parent: bytes, tokens: npt.NDArray[np.int32], media: dict[int, bytes] | None
) -> npt.NDArray[np.uint8]:
    """Keys that are the same for all blocks whose first token has the same rest by 3."""
    keys = np.zeros((len(tokens), 16), np.uint8)
    keys[:, 0] = tokens[:, 0] % 3
    keys[:, 1] = (
        1 + np.arange(len(tokens)) + (parent[1] if parent[0] < 3 and not any(parent[2:]) else 0)
    )
    return keys


def chain_of(*firsts: int) -> npt.NDArray[np.int32]:
    """Blocks that begin with these tokens; blocks of tokens that are all one number."""
    return np.repeat(np.array([*firsts, 0], np.int32), BLOCK)[: len(firsts) * BLOCK + 1]


def _colliding(store: Store) -> Engine:
    return Engine(store.namespace(LAYOUT, model="m", chain=colliding), PAGES)


def test_the_test_hash_collides(store: Store) -> None:
    space = _colliding(store).space
    one, two = space.sequence(chain_of(0, 1)), space.sequence(chain_of(3, 4))
    assert np.array_equal(one.keys, two.keys)


def test_a_collision_is_a_counted_miss(disk_store: Store, tier: Move) -> None:
    _colliding(disk_store).save(chain_of(0, 1, 2))
    with tier(disk_store) as store:
        engine = _colliding(store)
        for other in ((3, 1, 2), (0, 4, 2), (0, 1, 5)):
            tokens = chain_of(*other)
            shared = next(at for at, first in enumerate(other) if first > 2)
            with engine.space.sequence(tokens).lookup() as ticket:
                assert ticket.blocks == shared
                assert set(ticket.misses) == {MissReason.COLLISION}
                engine.load(ticket)  # compares every byte
            _, saved = engine.save(tokens)
            assert saved.dropped == {SaveDrop.COLLISION: 3 - shared}
            assert engine.ask(tokens).tokens == shared * BLOCK
        assert engine.ask(chain_of(0, 1, 2)).tokens == 3 * BLOCK  # the first is unharmed
        assert store.counters()["misses.collision"] > 0
        assert_at_rest(store)


def test_a_collision_whose_parent_was_dropped_reaches_nothing(
    disk_store: Store, tier: Move
) -> None:
    """0-1 goes, 3-1 comes under the same keys: what lay under 0 must not be found under 3."""
    _colliding(disk_store).save(chain_of(0, 1, 2))
    store = tier(disk_store)
    placement = store._placement
    for name in (TierName.HOST, TierName.DISK):
        with placement.lock:
            rows = placement.index.rows_of(tier=name)
            roots = rows[placement.index.rows.depth[rows] == 0]
            placement.left(name, placement.index.drop_subtree(roots, name))
    assert_at_rest(store)
    engine = _colliding(store)
    assert engine.save(chain_of(3))[1].saved == 1
    for tokens in (chain_of(3, 1, 2), chain_of(3, 4, 2)):
        with engine.space.sequence(tokens).lookup() as ticket:
            assert ticket.blocks == 1
            engine.load(ticket)
    assert engine.ask(chain_of(0, 1, 2)).tokens == 0
    assert engine.save(chain_of(3, 4))[1].saved == 1
    assert engine.ask(chain_of(3, 4, 2)).tokens == 2 * BLOCK
    assert_at_rest(store)
    store.close()


def test_collisions_within_one_prompt(store: Store) -> None:
    """A hash that gives every block of a prompt the same key."""

    def constant(
        parent: bytes, tokens: npt.NDArray[np.int32], media: dict[int, bytes] | None
    ) -> npt.NDArray[np.uint8]:
        return np.full((len(tokens), 16), 7, np.uint8)

    engine = Engine(store.namespace(LAYOUT, model="m", chain=constant), PAGES)
    _, saved = engine.save(chain_of(1, 2, 3))
    assert (saved.saved, saved.dropped) == (1, {SaveDrop.COLLISION: 2})
    with engine.space.sequence(chain_of(1, 2, 3)).lookup() as ticket:
        assert ticket.blocks == 1
        assert set(ticket.misses) == {MissReason.COLLISION}
    with engine.space.sequence(chain_of(2, 2, 3)).lookup() as ticket:
        assert ticket.blocks == 0


# --- starting


def test_a_store_answers_at_once_while_it_starts_and_then_finds_everything(
    disk_store: Store,
) -> None:
    tokens = prompt(5 * BLOCK + 1)
    engine_of(disk_store).save(tokens)
    disk_store.close()
    with open_store(disk_store.config.home, host="8MiB", wait=False) as store:
        engine = engine_of(store)
        while True:
            with engine.space.sequence(tokens).lookup() as ticket:
                if ticket.blocks:
                    assert engine.load(ticket).tokens == 5 * BLOCK
                    break
                assert set(ticket.misses) == {MissReason.STARTING}
        assert_at_rest(store)


def test_a_huge_prompt_works(store: Store) -> None:
    engine = Engine(store.namespace(small_layout(16, layers=1), model="m"), 1)
    sequence = engine.space.sequence(np.arange(1_000_000, dtype=np.int32))
    with sequence.lookup() as ticket:
        assert ticket.misses == {MissReason.ABSENT: 62_499 * 16}
