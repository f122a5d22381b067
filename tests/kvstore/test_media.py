"""Blocks with media (images): told apart by digest, in every tier and after a restart (A05)."""

from pathlib import Path

import numpy as np

import kvstore
from kvstore.tiers.layout import Layout

LAYOUT = Layout.attention(layers=2, kv_heads=1, head_dim=64, dtype="bfloat16")
TOKENS = np.arange(65, dtype=np.int32)
IMAGE, OTHER = bytes([1]) * 32, bytes([2]) * 32


def tokens_loaded(space: kvstore.Space, media: dict[int, bytes] | None) -> int:
    pool = space.pool([np.zeros((4, size), np.uint8) for size in LAYOUT.run_lengths.tolist()])
    ticket = space.sequence(TOKENS, media).lookup()
    return ticket.load(pool, [0, 1, 2, 3]).result().tokens


def test_media_decides_before_and_after_a_restart(tmp_path: Path) -> None:
    for restarted in (False, True):
        with kvstore.open(tmp_path / "s", host="8MiB", disk_capacity="32MiB") as store:
            space = store.namespace(LAYOUT, model="m")
            if not restarted:
                arrays = [np.ones((4, size), np.uint8) for size in LAYOUT.run_lengths.tolist()]
                space.sequence(TOKENS, {1: IMAGE}).save(space.pool(arrays), [0, 1, 2, 3]).result()
            assert tokens_loaded(space, {1: IMAGE}) == 64
            # The text before the image is shared; what depends on the image is not.
            assert tokens_loaded(space, {1: OTHER}) == 16
            assert tokens_loaded(space, None) == 16
            store.check_integrity()
