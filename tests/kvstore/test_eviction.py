"""Who goes first: always the coldest leaf, in every tier, whatever came before."""

import numpy as np
import pytest

from kvstore import eviction
from kvstore.eviction import Evictor
from kvstore.index import Index
from kvstore.tiers.base import TierName
from kvstore.tiers.slab import Slab
from support.index_model import honest

HOST, DISK = TierName.HOST, TierName.DISK
BLOCK_TOKENS = 4
SLOT_BYTES = 8192


class Store:
    """An index of blocks named by numbers, with slots that never run out."""

    def __init__(self, slot_bytes: tuple[int, ...] = (SLOT_BYTES,)) -> None:
        self.index = Index(rows_expected=4)
        for size in slot_bytes:
            self.index.add_space(BLOCK_TOKENS, size)
        self.next_slot = 0
        self.key: dict[int, bytes] = {-1: bytes(16)}

    def save(
        self, *names: int, under: int = -1, space: int = 0, tier: TierName = HOST
    ) -> list[int]:
        """A chain of new blocks; returns their rows, root first."""
        tokens = [(name,) * BLOCK_TOKENS for name in names]
        keys, parent = [], self.key[under]
        for its in tokens:
            parent = honest(parent, its)
            keys.append(parent)
        slots = np.arange(self.next_slot, self.next_slot + len(names))
        self.next_slot += len(names)
        answer = self.index.publish(
            HOST,
            space,
            under,
            np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16),
            np.array(tokens, np.int32),
            slots,
            slots.astype(np.uint64),
        )
        assert answer.reason is None
        assert answer.placed.all()
        rows: list[int] = answer.rows.tolist()
        self.key.update(zip(rows, keys, strict=True))
        return rows

    def evict(self, evictor: Evictor, count: int, tier: TierName = HOST) -> list[int]:
        victims = evictor.coldest(count)
        left = self.index.clear(tier, victims)
        assert left.rows.tolist() == victims.tolist()
        self.index.check_integrity()
        return victims.tolist()


def int32(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def test_a_chain_in_a_tier_of_three_blocks_goes_from_its_end_200_times() -> None:
    """Field report A24: a parent went before its children, which then could never be hit again."""
    store = Store()
    evictor = Evictor(store.index, HOST)
    for turn in range(200):
        chain = store.save(3 * turn, 3 * turn + 1, 3 * turn + 2)
        assert store.index.blocks(HOST) == 3
        assert store.evict(evictor, 1) == chain[2:]
        other = store.save(10_000 + turn)
        assert store.evict(evictor, 3) == [chain[1], chain[0], *other]


def test_half_of_a_tree_with_five_children_is_evicted_from_its_leaves() -> None:
    """Field report A24, second half."""
    store = Store()
    root = store.save(0)[0]
    children = [store.save(name, under=root)[0] for name in range(1, 6)]
    evictor = Evictor(store.index, HOST)
    assert store.evict(evictor, 3) == children[:3]
    assert store.evict(evictor, 3) == [*children[3:], root]


def test_the_blocks_of_a_touched_chain_outlive_others_and_go_deepest_first() -> None:
    store = Store()
    first, second = store.save(1, 2, 3), store.save(4, 5, 6)
    store.index.touch(int32(*first))
    evictor = Evictor(store.index, HOST)
    assert store.evict(evictor, 6) == second[::-1] + first[::-1]


def test_used_and_excluded_blocks_stay_with_all_before_them() -> None:
    store = Store()
    leased, held, excluded = store.save(1, 2), store.save(3, 4), store.save(5, 6)
    store.index.lease(int32(leased[1]))
    store.index.hold(int32(held[1]))
    evictor = Evictor(store.index, HOST)
    assert len(evictor.coldest(10, exclude=excluded[1:])) == 0
    assert evictor.coldest(10).tolist() == excluded[::-1]
    store.index.unlease(int32(leased[1]))
    store.index.unhold(int32(held[1]))
    assert sorted(store.evict(evictor, 10)) == sorted(leased + held + excluded)


def test_victims_that_were_not_taken_are_offered_again() -> None:
    store = Store()
    chain = store.save(1, 2, 3)
    evictor = Evictor(store.index, HOST)
    for _ in range(3):
        assert evictor.coldest(2).tolist() == chain[:0:-1]
    assert store.evict(evictor, 3) == chain[::-1]


def test_a_block_that_was_touched_after_it_was_chosen_is_not_the_coldest_any_more() -> None:
    store = Store()
    first, second = store.save(1), store.save(2)
    evictor = Evictor(store.index, HOST)
    assert evictor.coldest(1).tolist() == first
    store.index.touch(int32(*first))
    assert store.evict(evictor, 1) == second
    assert store.evict(evictor, 2) == first


def test_only_clean_blocks_are_chosen_when_the_disk_must_have_them() -> None:
    store = Store()
    dirty, clean = store.save(1, 2), store.save(3, 4)
    store.index.place(DISK, int32(*clean), np.array([0, 1]))
    evictor = Evictor(store.index, HOST)
    assert evictor.coldest(10, clean_only=True).tolist() == clean[::-1]
    assert evictor.coldest(10).tolist() == dirty[::-1] + clean[::-1]
    store.index.place(DISK, int32(dirty[0]), np.array([2]))
    assert evictor.coldest(10, clean_only=True).tolist() == clean[::-1]


def test_only_blocks_of_the_size_wanted_are_chosen() -> None:
    store = Store((8192, 16384))
    small, large = store.save(1, space=0), store.save(2, space=1)
    evictor = Evictor(store.index, HOST)
    assert evictor.coldest(5, slot_bytes=16384).tolist() == large
    assert evictor.coldest(5, slot_bytes=8192).tolist() == small
    assert evictor.coldest(5, slot_bytes=4096).tolist() == []


def test_each_tier_has_its_own_leaves() -> None:
    store = Store()
    chain = store.save(1, 2, 3)
    store.index.place(DISK, int32(*chain[:2]), np.array([0, 1]))
    disk = Evictor(store.index, DISK)
    assert store.evict(disk, 5, DISK) == chain[1::-1]
    assert store.index.blocks(HOST) == 3


def coldest_by_hand(index: Index, tier: int) -> list[int]:
    """All rows of a tier in the order in which they must go: one at a time, the coldest leaf."""
    rows = index.rows
    here = [row for row in range(rows.high) if rows.slots[tier][row] >= 0]
    age = {row: int(rows.age[row]) for row in here}
    parent = {row: int(rows.parent[row]) for row in here}
    children = {row: 0 for row in here}
    for row in here:
        if parent[row] >= 0:
            children[parent[row]] += 1
    used = rows.in_use(np.arange(rows.high, dtype=np.int32))
    order = []
    while leaves := [(age[r], r) for r in here if not children[r] and not used[r]]:
        row = min(leaves)[1]
        order.append(row)
        here.remove(row)
        if parent[row] >= 0:
            children[parent[row]] -= 1
            age[parent[row]] = max(age[parent[row]], age[row])
    return order


@pytest.mark.parametrize("selected", [4, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_exactly_lru_over_leaves(
    seed: int, selected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any workload; with selections of a few rows at a time as well as of all."""
    monkeypatch.setattr(eviction, "SELECTED_MIN", selected)
    random = np.random.default_rng(seed)
    store = Store()
    index = store.index
    host, disk = Evictor(index, HOST), Evictor(index, DISK)
    for step in range(300):
        rows = index.rows_of(tier=HOST)
        kind = random.random()
        if kind < 0.5 or not len(rows):
            under = int(random.choice(rows)) if len(rows) and random.random() < 0.7 else -1
            store.save(*range(10 * step, 10 * step + int(random.integers(1, 6))), under=under)
        elif kind < 0.7:
            touched = [int(random.choice(rows))]
            while (parent := int(index.rows.parent[touched[0]])) >= 0:
                touched.insert(0, parent)
            index.touch(int32(*touched))
        elif kind < 0.8:
            missing = index.missing_ancestors(random.choice(rows, 1), DISK)
            index.place(DISK, missing, np.arange(len(missing)) + 1000 * step)
        elif kind < 0.85:
            # Blocks enter the disk in no order of age, so only the rules are checked there.
            store.evict(disk, int(random.integers(1, 12)), DISK)
        else:
            count = int(random.integers(1, 12))
            expected = coldest_by_hand(index, 0)[:count]
            assert store.evict(host, count) == expected
    everything = coldest_by_hand(index, 1)
    assert store.evict(Evictor(index, DISK), 10_000, DISK) == everything
    everything = coldest_by_hand(index, 0)
    assert store.evict(host, 10_000) == everything
    assert len(index) == index.rows.used == 0


def test_a_full_tier_in_which_everything_is_used_is_scanned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Field report A23: a thousand saves that cannot be served must fail fast."""
    store = Store()
    chain = store.save(*range(50))
    store.index.lease(int32(*chain))
    evictor = Evictor(store.index, HOST)
    scans = []
    fill = evictor._fill
    monkeypatch.setattr(evictor, "_fill", lambda *args: scans.append(fill(*args)))
    for _ in range(1000):
        assert len(evictor.coldest(1)) == 0
    assert len(scans) == 1
    store.index.unlease(int32(*chain))
    assert evictor.coldest(2).tolist() == chain[:-3:-1]


# -- segments ----------------------------------------------------------------------------------


def segmented() -> tuple[Store, Slab, list[list[int]]]:
    """Three segments of four slots; each full with a chain of its own."""
    store = Store((8192, 16384))
    slab = Slab(100, 4 * 8192, 0)
    chains = []
    for name in range(3):
        slab.assign(8192)
        slots = slab.reserve(8192, 4)
        store.next_slot = int(slots[0])
        chains.append(store.save(*range(4 * name, 4 * name + 4)))
    return store, slab, chains


def test_the_coldest_segment_of_another_size_is_found() -> None:
    store, slab, chains = segmented()
    evictor = Evictor(store.index, HOST)
    assert evictor.coldest_segment(slab, 16384) == 0
    assert evictor.coldest_segment(slab, 8192) is None
    store.index.touch(int32(*chains[0]))
    assert evictor.coldest_segment(slab, 16384) == 1
    first = 1 * slab.slots_per_segment_max
    end = first + slab.slots_per_segment_max
    assert store.index.rows_in_slots(HOST, first, end).tolist() == sorted(chains[1])


def test_a_segment_with_a_used_block_or_a_used_descendant_stays() -> None:
    store, slab, chains = segmented()
    evictor = Evictor(store.index, HOST)
    store.next_slot = 100
    child = store.save(99, under=chains[0][1])
    store.index.hold(int32(*child))
    store.index.lease(int32(chains[1][2]))
    assert evictor.coldest_segment(slab, 16384) == 2
    store.index.unhold(int32(*child))
    assert evictor.coldest_segment(slab, 16384) == 0


def test_a_segment_with_slots_that_no_row_has_stays() -> None:
    """A save copies into them, or a load still reads them."""
    store, slab, chains = segmented()
    evictor = Evictor(store.index, HOST)
    store.index.hold(int32(chains[0][3]))
    store.index.drop_subtree(int32(chains[0][3]), HOST)
    assert evictor.coldest_segment(slab, 16384) == 1


def test_a_segment_with_blocks_that_only_it_has_stays_if_that_is_asked() -> None:
    store, slab, chains = segmented()
    evictor = Evictor(store.index, HOST)
    store.index.place(DISK, int32(*chains[1]), np.arange(4))
    assert evictor.coldest_segment(slab, 16384, clean_only=True) == 1
    store.next_slot = 200
    store.save(99, under=chains[1][0])
    assert evictor.coldest_segment(slab, 16384, clean_only=True) is None
