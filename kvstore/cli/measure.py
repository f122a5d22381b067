"""The measurements behind `kvstore bench`: each makes a store, times it, and removes it.

They show what this machine can do; bench/ at the root of the repository holds the published ones.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.cli.output import ProgressCall
from kvstore.tiers.errors import ConfigError

ROUNDS = 5
LAYERS = 30
BLOCK_TOKENS = 16
PAGES = 64
VOCABULARY = 50_000
LOOKUP_TOKENS = 100_000
LOOKUP_PROMPTS = 2
SLOT_MIN_BYTES = 8192
SMALLEST_BYTES, LARGEST_BYTES = 4 << 20, 64 << 30
DISK_HOST_BYTES = 128 << 20


def measure_lookup(advance: ProgressCall) -> dict[str, float]:
    """Milliseconds to hash and look up prompts that are wholly stored, and ones that are not."""
    layout = kvstore.Layout(BLOCK_TOKENS, (kvstore.CacheGroup("full", 1, (32, 32), "uint8"),))
    blocks = LOOKUP_TOKENS // BLOCK_TOKENS
    capacity = LOOKUP_PROMPTS * blocks * SLOT_MIN_BYTES * 5 // 4 + (8 << 20)
    hits, misses = [], []
    with kvstore.open(host=capacity) as store:
        space = store.namespace(layout, model="bench")
        pool = space.pool(_pages(layout))
        stored = _prompts(LOOKUP_PROMPTS, LOOKUP_TOKENS, seed=1)
        for prompt in stored:
            space.sequence(prompt).save(pool, _table(blocks)).result()
        for done in range(ROUNDS):
            advance(done, ROUNDS)
            for prompt in stored:
                hits.append(_lookup_s(space, prompt, blocks - 1))
            for prompt in _prompts(LOOKUP_PROMPTS, LOOKUP_TOKENS, seed=2 + done):
                misses.append(_lookup_s(space, prompt, 0))
    return {
        "tokens": LOOKUP_TOKENS,
        "hit_ms": 1000 * statistics.median(hits),
        "miss_ms": 1000 * statistics.median(misses),
    }


def measure_host(block_bytes: int, total_bytes: int, advance: ProgressCall) -> dict[str, float]:
    """Bytes a second of saving into and loading from host memory, and of a plain copy."""
    layout, blocks = _layout(block_bytes, total_bytes)
    prompt_tokens = blocks * BLOCK_TOKENS + 1
    saves, loads, copies = [], [], []
    payload = blocks * layout.payload_bytes
    source = np.ones(min(payload, 64 << 20), np.uint8)
    target = np.zeros_like(source)
    with kvstore.open(host=total_bytes * 5 // 4 + (16 << 20)) as store:
        space = store.namespace(layout, model="bench")
        pool = space.pool(_pages(layout))
        # One round more, and first: it makes the memory's pages. Later ones evict what is there.
        for done, prompt in enumerate(_prompts(ROUNDS + 1, prompt_tokens, seed=1)):
            advance(done * payload, (ROUNDS + 1) * payload)
            saves.append(_save_s(space, pool, prompt, blocks))
            loads.append(_load_s(space, pool, prompt, blocks))
            began = time.perf_counter()
            np.copyto(target, source)
            copies.append((time.perf_counter() - began) * payload / len(source))
    saves, loads, copies = saves[1:], loads[1:], copies[1:]
    return _rates(payload, save=saves, load=loads, memcpy=copies)


def measure_disk(
    directory: Path, block_bytes: int, total_bytes: int, advance: ProgressCall
) -> dict[str, float]:
    """Bytes a second of writing to a store in `directory`, and of reading it after a restart."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name one on the disk to measure")
    layout, blocks = _layout(block_bytes, min(total_bytes, DISK_HOST_BYTES // 4))
    prompts = _prompts(max(1, total_bytes // (blocks * layout.payload_bytes)), blocks * 16 + 1, 1)
    payload = len(prompts) * blocks * layout.payload_bytes
    settings: dict[str, Any] = {
        "host": DISK_HOST_BYTES,
        "disk_capacity": 2 * total_bytes + (128 << 20),
    }
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvstore-bench-") as home:
        began = time.perf_counter()
        with kvstore.open(disk=[home], **settings) as store:
            space = store.namespace(layout, model="bench")
            pool = space.pool(_pages(layout))
            for done, prompt in enumerate(prompts):
                advance(done * payload // len(prompts), 2 * payload)
                _save_s(space, pool, prompt, blocks)
                store.flush()
        write_s = time.perf_counter() - began
        read_s = 0.0
        with kvstore.open(disk=[home], **settings) as store:
            space = store.namespace(layout, model="bench")
            pool = space.pool(_pages(layout))
            for done, prompt in enumerate(prompts):
                advance(payload + done * payload // len(prompts), 2 * payload)
                read_s += _load_s(space, pool, prompt, blocks)
    return _rates(payload, write=[write_s], read=[read_s])


def _layout(block_bytes: int, total_bytes: int) -> tuple[kvstore.Layout, int]:
    """A layout of LAYERS layers with about `block_bytes` a block, and how many blocks it takes."""
    run = block_bytes // (2 * LAYERS)
    if run < 1 or not SMALLEST_BYTES <= total_bytes <= LARGEST_BYTES or block_bytes > total_bytes:
        raise ConfigError(
            f"--block {block_bytes} and --size {total_bytes} do not fit; "
            f"a size lies in {SMALLEST_BYTES}..{LARGEST_BYTES}, a block between {2 * LAYERS} and it"
        )
    group = kvstore.CacheGroup("full", LAYERS, (run, run), "uint8")
    layout = kvstore.Layout(BLOCK_TOKENS, (group,))
    return layout, total_bytes // layout.payload_bytes


def _pages(layout: kvstore.Layout) -> list[npt.NDArray[np.uint8]]:
    return [np.ones((PAGES, int(length)), np.uint8) for length in layout.run_lengths]


def _table(blocks: int) -> npt.NDArray[np.int64]:
    """A block table that uses the few pages again and again: the bytes do not matter here."""
    return np.arange(blocks, dtype=np.int64) % PAGES


def _prompts(count: int, tokens: int, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, tokens), dtype=np.int32)


def _lookup_s(space: Any, prompt: npt.NDArray[np.int32], blocks_at_least: int) -> float:
    began = time.perf_counter()
    with space.sequence(prompt).lookup() as ticket:
        seconds = time.perf_counter() - began
        if ticket.blocks < blocks_at_least:
            raise RuntimeError(f"found {ticket.blocks} of {blocks_at_least} blocks saved before")
    return seconds


def _save_s(space: Any, pool: Any, prompt: npt.NDArray[np.int32], blocks: int) -> float:
    sequence = space.sequence(prompt)
    began = time.perf_counter()
    saved = sequence.save(pool, _table(blocks)).result()
    seconds = time.perf_counter() - began
    if saved.saved != blocks:
        raise RuntimeError(f"saved {saved.saved} of {blocks} blocks: {saved.dropped}")
    return seconds


def _load_s(space: Any, pool: Any, prompt: npt.NDArray[np.int32], blocks: int) -> float:
    with space.sequence(prompt).lookup() as ticket:
        began = time.perf_counter()
        loaded = ticket.load(pool, _table(blocks)).result()
        seconds = time.perf_counter() - began
    if loaded.tokens != blocks * BLOCK_TOKENS:
        raise RuntimeError(f"loaded {loaded.tokens} of {blocks * BLOCK_TOKENS} tokens")
    return seconds


def _rates(payload_bytes: int, **seconds: list[float]) -> dict[str, float]:
    return {
        f"{name}_bytes_per_s": payload_bytes / statistics.median(taken)
        for name, taken in seconds.items()
    }
