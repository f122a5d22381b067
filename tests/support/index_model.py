"""The index again, as plain dictionaries and loops: what tests/kvstore/test_index.py compares with.

Every rule is written out for one block at a time and knows nothing of rows, tables or columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvstore.tiers.base import MissReason, SaveDrop, TierName

Tokens = tuple[int, ...]
KeyFunction = Callable[[bytes, Tokens], bytes]


def honest(parent: bytes, tokens: Tokens) -> bytes:
    """Keys as they are."""
    return xxhash.xxh3_128_digest(parent + np.array(tokens, "<i4").tobytes())


def clashing(parent: bytes, tokens: Tokens) -> bytes:
    """Different keys, but few first halves: full buckets, and fingerprints that say nothing."""
    digest = honest(parent, tokens)
    return bytes([digest[0] % 2, 0, 0, 0, digest[1] % 2, 0, 0, 0]) + digest[8:]


def colliding(parent: bytes, tokens: Tokens) -> bytes:
    """Few keys at all: other tokens and other parents under the same key."""
    return honest(b"", (honest(parent, tokens)[0] % 24,))


@dataclass(eq=False)
class Block:
    """One stored block."""

    key: bytes
    space: int
    parent: "Block | None"
    tokens: Tokens
    content: int
    row: int
    slots: dict[TierName, int] = field(default_factory=dict)
    leases: int = 0
    holds: int = 0
    lingering: list[tuple[TierName, int]] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return self.leases + self.holds > 0


class IndexModel:
    """Blocks by key, and the rules."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.hidden: list[Block] = []
        self.gone: dict[bytes, MissReason] = {}

    def in_tier(self, tier: TierName) -> list[Block]:
        return [block for block in self.blocks.values() if tier in block.slots]

    def children(self, block: Block, tier: TierName) -> list[Block]:
        return [child for child in self.in_tier(tier) if child.parent is block]

    def find(
        self, space: int, keys: list[bytes], tokens: list[Tokens], parent: Block | None
    ) -> tuple[list[Block], MissReason | None]:
        found: list[Block] = []
        for key, its in zip(keys, tokens, strict=True):
            block = self.blocks.get(key)
            if block is None:
                return found, self.gone.get(key, MissReason.ABSENT)
            if block.space != space or block.parent is not parent or block.tokens != its:
                return found, MissReason.COLLISION
            found.append(block)
            parent = block
        return found, None

    def publish(
        self,
        tier: TierName,
        space: int,
        parent: Block | None,
        keys: list[bytes],
        tokens: list[Tokens],
        slots: list[int],
        contents: list[int],
    ) -> tuple[list[Block], list[bool], SaveDrop | None]:
        taken: list[Block] = []
        placed: list[bool] = []
        if parent is not None and tier not in parent.slots:
            return taken, placed, SaveDrop.PARENT_GONE
        for at, key in enumerate(keys):
            block = self.blocks.get(key)
            if block is None:
                block = Block(key, space, parent, tokens[at], contents[at], -1)
                self.blocks[key] = block
            elif (block.space, block.parent, block.tokens) != (space, parent, tokens[at]):
                return taken, placed, SaveDrop.COLLISION
            elif tier not in block.slots and block.content != contents[at]:
                return taken, placed, SaveDrop.PARENT_GONE
            placed.append(tier not in block.slots)
            block.slots.setdefault(tier, slots[at])
            taken.append(block)
            parent = block
        return taken, placed, None

    def place(self, tier: TierName, blocks: list[Block], slots: list[int]) -> list[bool]:
        placed = []
        for block, slot in zip(blocks, slots, strict=True):
            orphan = block.parent is not None and tier not in block.parent.slots
            good = bool(block.slots) and tier not in block.slots and not orphan
            if good:
                block.slots[tier] = slot
            placed.append(good)
        return placed

    def clear(self, tier: TierName, blocks: list[Block]) -> list[Block]:
        """Deepest first, so that one pass decides."""
        left = []
        for block in blocks:
            if tier in block.slots and not block.used and not self.children(block, tier):
                self._leave(tier, block, MissReason.EVICTED)
                left.append(block)
        return left

    def drop(self, tier: TierName, blocks: list[Block], reason: MissReason) -> list[Block]:
        left: list[Block] = []
        for block in blocks:
            if tier in block.slots:
                for child in self.children(block, tier):
                    left += self.drop(tier, [child], reason)
                self._leave(tier, block, reason)
                left.append(block)
        return left

    def _leave(self, tier: TierName, block: Block, reason: MissReason) -> None:
        slot = block.slots.pop(tier)
        if block.used:
            block.lingering.append((tier, slot))
        if not block.slots:
            del self.blocks[block.key]
            self.gone[block.key] = reason
            if block.used:
                self.hidden.append(block)

    def release(self, blocks: list[Block]) -> list[tuple[TierName, int]]:
        """After uses have ended: the slots that nobody uses any more."""
        freed: list[tuple[TierName, int]] = []
        for block in blocks:
            if not block.used:
                freed += block.lingering
                block.lingering = []
                if block in self.hidden:
                    self.hidden.remove(block)
        return freed
