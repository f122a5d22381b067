"""An index beside its model: the same calls to both, every answer compared."""

import numpy as np

from kvstore.index import Index
from kvstore.tiers.base import MissReason, TierName
from support.index_model import Block, IndexModel, KeyFunction, Tokens, honest

HOST, DISK = TierName.HOST, TierName.DISK
BLOCK_TOKENS = 4
ROOT = bytes(16)


def keys_of(chain: list[Tokens], key: KeyFunction = honest, parent: bytes = ROOT) -> list[bytes]:
    keys = []
    for tokens in chain:
        parent = key(parent, tokens)
        keys.append(parent)
    return keys


def arrays(keys: list[bytes], chain: list[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16),
        np.array(chain, np.int32).reshape(len(chain), -1),
    )


class Pair:
    """An index and its model, given the same calls; every answer is compared."""

    def __init__(self, seed: int, key: KeyFunction) -> None:
        self.random = np.random.default_rng(seed)
        self.key = key
        self.index = Index(rows_expected=4)
        self.model = IndexModel()
        sizes = ((BLOCK_TOKENS, 8192), (BLOCK_TOKENS, 12288), (2, 8192))
        self.sizes = [size for size, _ in sizes]
        self.spaces = [self.index.add_space(*size) for size in sizes]
        self.slot = {HOST: 0, DISK: 0}
        self.content = 0
        self.users: list[tuple[str, Block]] = []

    def chain(self, space: int) -> tuple[list[Tokens], list[bytes]]:
        length = int(self.random.integers(1, 9))
        size = self.sizes[space]
        chain = [(int(self.random.integers(0, 2)),) * size for _ in range(length)]
        return chain, keys_of(chain, self.key, bytes([space]) * 16)

    def some(self, count: int, tier: TierName | None = None) -> list[Block]:
        known = list(self.model.blocks.values()) if tier is None else self.model.in_tier(tier)
        if not known:
            return []
        picked = self.random.choice(len(known), min(count, len(known)), replace=False)
        return [known[i] for i in picked.tolist()]

    def new_slots(self, tier: TierName, count: int) -> list[int]:
        self.slot[tier] += count
        return list(range(self.slot[tier] - count, self.slot[tier]))

    def tier(self) -> TierName:
        return HOST if self.random.random() < 0.6 else DISK

    # -- one call each -------------------------------------------------------------------------

    def find(self) -> None:
        space = int(self.random.integers(len(self.spaces)))
        chain, keys = self.chain(space)
        start = int(self.random.integers(0, len(keys) + 1)) if self.random.random() < 0.5 else 0
        head, _ = self.model.find(space, keys[:start], chain[:start], None)
        parent = head[-1] if head and len(head) == start else None
        start = start if parent else 0
        blocks, reason = self.model.find(space, keys[start:], chain[start:], parent)
        found = (
            self.index.find(
                space, *arrays(keys[start:], chain[start:]), parent.row if parent else -1
            )
            if start < len(keys)
            else None
        )
        if found is not None:
            assert found.rows.tolist() == [block.row for block in blocks]
            assert found.reason == reason
            for tier in (HOST, DISK):
                assert found.blocks[tier] == sum(tier in block.slots for block in blocks)

    def publish(self) -> None:
        space = int(self.random.integers(len(self.spaces)))
        tier = self.tier()
        chain, keys = self.chain(space)
        skip = int(self.random.integers(0, len(keys)))
        head, _ = self.model.find(space, keys[:skip], chain[:skip], None)
        parent = head[-1] if skip and len(head) == skip else None
        skip = skip if parent else 0
        keys, chain = keys[skip:], chain[skip:]
        slots = self.new_slots(tier, len(keys))
        known, _ = self.model.find(space, keys, chain, parent)
        contents = [block.content for block in known]
        if self.random.random() < 0.1:
            contents = []  # a record of its own for a block that the other tier has already
        contents += range(self.content, self.content + len(keys) - len(contents))
        self.content += len(keys)
        blocks, placed, reason = self.model.publish(
            tier, space, parent, keys, chain, slots, contents
        )
        answer = self.index.publish(
            tier,
            space,
            parent.row if parent else -1,
            *arrays(keys, chain),
            np.array(slots, np.int64),
            np.array(contents, np.uint64),
        )
        assert answer.placed.tolist() == placed
        assert answer.reason == reason
        for block, row in zip(blocks, answer.rows.tolist(), strict=True):
            assert block.row in {-1, row}
            block.row = row

    def place(self) -> None:
        tier = self.tier()
        blocks = sorted(self.some(6), key=self.depth)
        slots = self.new_slots(tier, len(blocks))
        placed = self.model.place(tier, blocks, slots)
        assert self.index.place(tier, rows(blocks), np.array(slots, np.int64)).tolist() == placed

    def place_missing(self) -> None:
        """Write-back: what keeps some blocks from the disk, root first, always fits."""
        blocks = self.some(2, HOST)
        missing = self.index.missing_ancestors(rows(blocks), DISK)
        slots = np.array(self.new_slots(DISK, len(missing)), np.int64)
        assert self.index.place(DISK, missing, slots).all()
        by_row = {block.row: block for block in self.model.blocks.values()}
        written = [by_row[row] for row in missing.tolist()]
        assert all(self.model.place(DISK, written, slots.tolist()))
        assert all(DISK in block.slots for block in blocks)

    def clear(self) -> None:
        tier = self.tier()
        blocks = sorted(self.some(8), key=lambda block: -self.depth(block))
        slots = [block.slots.get(tier) for block in blocks]
        left = self.model.clear(tier, blocks)
        answer = self.index.clear(tier, rows(blocks))
        assert answer.rows.tolist() == [block.row for block in left]
        assert answer.slots.tolist() == [slots[blocks.index(block)] for block in left]

    def drop(self) -> None:
        tier = self.tier()
        reason = (MissReason.EVICTED, MissReason.INVALIDATED)[int(self.random.integers(2))]
        blocks = self.some(2)
        slots = {block.row: block.slots.get(tier) for block in self.model.blocks.values()}
        left = self.model.drop(tier, blocks, reason)
        answer = self.index.drop_subtree(rows(blocks), tier, reason)
        assert sorted(answer.rows.tolist()) == sorted(block.row for block in left)
        depth = {block.row: self.depth(block) for block in left}
        depths = [depth[row] for row in answer.rows.tolist()]
        assert depths == sorted(depths, reverse=True)
        used = {block.row for block in left if block.used}
        for row, slot in zip(answer.rows.tolist(), answer.slots.tolist(), strict=True):
            assert slot == (-1 if row in used else slots[row])

    def drop_space(self) -> None:
        if self.random.random() < 0.9:
            return
        space, tier = int(self.random.integers(len(self.spaces))), self.tier()
        blocks = [block for block in self.model.in_tier(tier) if block.space == space]
        left = self.model.drop(tier, blocks, MissReason.INVALIDATED)
        answer = self.index.drop_space(space, tier)
        assert sorted(answer.rows.tolist()) == sorted(block.row for block in left)

    def use(self) -> None:
        for block in self.some(3):
            kind = "lease" if self.random.random() < 0.5 else "hold"
            getattr(self.index, kind)(rows([block]))
            setattr(block, f"{kind}s", getattr(block, f"{kind}s") + 1)
            self.users.append((kind, block))

    def end_use(self) -> None:
        for _ in range(int(self.random.integers(0, 4))):
            if self.users:
                kind, block = self.users.pop(int(self.random.integers(len(self.users))))
                self.give_back(kind, block)

    def give_back(self, kind: str, block: Block) -> None:
        answer = getattr(self.index, f"un{kind}")(rows([block]))
        setattr(block, f"{kind}s", getattr(block, f"{kind}s") - 1)
        freed = sorted(self.model.release([block]))
        assert freed == sorted((tier, slot) for tier in answer for slot in answer[tier].tolist())

    def depth(self, block: Block) -> int:
        return 0 if block.parent is None else 1 + self.depth(block.parent)

    def compare(self) -> None:
        self.index.check_integrity()
        model = self.model
        assert len(self.index) == len(model.blocks)
        assert self.index.uses.leased == sum(kind == "lease" for kind, _ in self.users)
        assert self.index.uses.held == sum(kind == "hold" for kind, _ in self.users)
        for tier in (HOST, DISK):
            here = model.in_tier(tier)
            assert self.index.blocks(tier) == len(here)
            assert self.index.rows_of(tier=tier).tolist() == sorted(block.row for block in here)
            everyone = [*model.blocks.values(), *model.hidden]
            slots = [s for block in everyone for t, s in block.lingering if t == tier]
            assert sorted(self.index.lingering(tier).tolist()) == sorted(slots)
            assert self.index.slots(tier, rows(here)).tolist() == [b.slots[tier] for b in here]
        for space in self.spaces:
            there = sorted(b.row for b in model.blocks.values() if b.space == space)
            assert self.index.rows_of(space).tolist() == there


def rows(blocks: list[Block]) -> np.ndarray:
    return np.array([block.row for block in blocks], np.int32)
