"""What a store may return: a plain table of prompts, their bytes, and when each prefix was saved.

The bytes of a block follow from its namespace, its place and all tokens and media up to it, by a
hash that shares nothing with the store's keys. Two namespaces hold equal tokens, and some prompts
differ in their media alone, so that whatever mixes them up serves wrong bytes.
"""

import hashlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.tiers.layout import CacheGroup, Layout

BLOCK_TOKENS = 4
BLOCKS_MAX = 10
TRUNKS = 3
SMALL = Layout(BLOCK_TOKENS, (CacheGroup("full", 2, (3000, 1111), "uint8"),))  # slots of 16 KiB
LARGE = Layout(BLOCK_TOKENS, (CacheGroup("full", 3, (5000, 13), "uint8"),))  # of 20 KiB
Bytes = npt.NDArray[np.uint8]
Moments = npt.NDArray[np.float64]  # on the monotonic clock
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """nodes: a number for each prefix of whole blocks; equal prefixes have one number.

    payloads: uint8 [blocks, payload_bytes].
    """

    number: int
    tokens: npt.NDArray[np.int32]
    media: dict[int, bytes]
    nodes: Longs
    payloads: Bytes


class Tenant:
    """One namespace: its prompts, and which of their prefixes a store may have."""

    def __init__(self, name: str, layout: Layout, prompts: int, seed: int) -> None:
        self.name = name
        self.layout = layout
        self._payloads: dict[bytes, tuple[int, Bytes]] = {}
        self.prompts = [self._prompt(number, seed) for number in range(prompts)]
        below: dict[int, set[int]] = {}
        for prompt in self.prompts:
            for block, node in enumerate(prompt.nodes.tolist()):
                below.setdefault(node, set()).update(prompt.nodes[block:].tolist())
        self._below = {node: np.array(sorted(nodes)) for node, nodes in below.items()}
        self._lock = threading.Lock()
        self._begun = np.full(len(self._payloads), -1.0)  # when its latest save began; -1: never
        self._gone = np.full(len(self._payloads), 0.0)  # of what was saved before, nothing is left

    def begin_save(self, nodes: Longs) -> None:
        """From now on these prefixes may be found. Their sequence was made before."""
        with self._lock:
            self._begun[nodes] = time.monotonic()

    def end_all(self, began_s: float) -> None:
        """An invalidation of the whole namespace, which began then, has returned."""
        with self._lock:
            np.maximum(self._gone, began_s, out=self._gone)

    def end_below(self, node: int, began_s: float) -> None:
        """Likewise, of a block and all that follow it in any prompt."""
        with self._lock:
            nodes = self._below[node]
            self._gone[nodes] = np.maximum(self._gone[nodes], began_s)

    def gone(self, nodes: Longs) -> Moments:
        """Ask this before the store is asked; see may_be_found."""
        with self._lock:
            return self._gone[nodes]

    def may_be_found(self, nodes: Longs, gone: Moments) -> bool:
        """Whether a save of each of them began after that moment."""
        with self._lock:
            return bool((self._begun[nodes] > gone).all())

    def _prompt(self, number: int, seed: int) -> Prompt:
        """A trunk that many share, a branch that some share, and a tail of its own."""
        base = number - 1 if number % 6 == 1 else number  # equal in tokens to the one before it
        trunk, branch = base % TRUNKS, (base % TRUNKS, base % 17)
        parts = []
        for blocks, name in ((3, (trunk,)), (3, branch), (BLOCKS_MAX - 6, (*branch, base))):
            random = np.random.default_rng((seed, *name))
            parts.append(random.integers(0, 1000, blocks * BLOCK_TOKENS, dtype=np.int32))
        tokens = np.concatenate([*parts, np.zeros(1, np.int32)])
        media = {7: bytes([number % 2]) * 32} if number % 6 < 2 else {}
        nodes, payloads = [], []
        for block in range(BLOCKS_MAX):
            node, payload = self._node(tokens[: (block + 1) * BLOCK_TOKENS], media, block)
            nodes.append(node)
            payloads.append(payload)
        return Prompt(number, tokens, media, np.array(nodes), np.stack(payloads))

    def _node(self, tokens: Any, media: dict[int, bytes], block: int) -> tuple[int, Bytes]:
        seen = b"".join(media[at] for at in sorted(media) if at <= block)
        name = hashlib.blake2b(
            b"%s|%d|%s|%s" % (self.name.encode(), block, tokens.tobytes(), seen), digest_size=16
        ).digest()
        if name not in self._payloads:
            random = np.random.default_rng(int.from_bytes(name, "little"))
            payload = random.integers(0, 256, self.layout.payload_bytes, np.uint8)
            self._payloads[name] = len(self._payloads), payload
        return self._payloads[name]
