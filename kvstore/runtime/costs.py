"""What computing and copying cost on this machine: measured at start and at every step."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.planner import Planner
from kvstore.pool import PagePool as StorePool
from kvstore.runtime.attention import Batch
from kvstore.runtime.models.model import Model
from kvstore.runtime.pages import PagePool
from kvstore.runtime.sampler import Sampling
from kvstore.runtime.scheduler import Work
from kvstore.tiers.base import TierName

CALIBRATION_TOKENS = (16, 64)
DEVICE_CALIBRATION_TOKENS = (128, 2048)  # Fewer take a device as long as one.
CALIBRATION_BLOCKS = (1, 8)


def calibrate(model: Model, pool: PagePool, store_pool: StorePool, planner: Planner) -> None:
    """Time prefill and copies at two sizes, on pages that nobody uses, for the first prompt's plan.

    Takes about as long as 160 tokens of prefill, and 4,352 on a device. A pool or a context too
    small for a size skips it. A copy between pages stands for a load from host memory; on a device
    it is a real one, from pinned memory. The disk is not touched: its first load begins with a
    probe, see kvstore.planner.
    """
    _time_prefill(model, pool, planner)
    _time_copies(pool, store_pool, planner)


def _time_prefill(model: Model, pool: PagePool, planner: Planner) -> None:
    sizes = CALIBRATION_TOKENS if pool.compute is None else DEVICE_CALIBRATION_TOKENS
    for count in (*sizes, *sizes):  # the first round only warms up
        if count > model.config.context_length:
            continue
        pages = pool.allocate(-(-count // pool.page_tokens))
        if pages is None:
            continue
        batch = Batch(
            tokens=torch.arange(count) % model.config.vocab_size,
            starts=[0],
            lengths=[count],
            tables=torch.tensor([pages]),
            wants_logits=[True],
        )
        started = time.perf_counter()
        model.sample(model.forward(batch, pool), [Sampling()], [0])
        planner.observe(count, 0, time.perf_counter() - started)
        pool.release(pages)


def _time_copies(pool: PagePool, store_pool: StorePool, planner: Planner) -> None:
    for count in (*CALIBRATION_BLOCKS, *CALIBRATION_BLOCKS):
        pages = pool.allocate(2 * count)
        if pages is None:
            continue
        size = count * pool.layout.payload_bytes
        if pool.compute is None:
            started = time.perf_counter()
            for part in pool.arrays():
                part[pages[:count]] = part[pages[count:]]
            seconds = time.perf_counter() - started
        else:
            seconds = _time_fill(store_pool, pages[:count], size)
        planner.observe_load({TierName.HOST: size}, {TierName.HOST: count}, seconds)
        pool.release(pages)


def _time_fill(store_pool: StorePool, pages: list[int], size_bytes: int) -> float:
    """Seconds of one copy from pinned memory into pages, until the device has it."""
    with store_pool.copies.buffers(1, size_bytes) as (source,):
        step = size_bytes // len(pages)
        payloads = source.ctypes.data + step * np.arange(len(pages), dtype=np.uint64)
        ready = store_pool.copies.ready()
        started = time.perf_counter()
        filled = store_pool.fill(
            np.array(pages, np.int64)[:, None], payloads.astype(np.uint64), ready=ready
        )
        if filled is not None:
            filled.wait()
        return time.perf_counter() - started


def observe_step(planner: Planner, works: Sequence[Work], seconds: float) -> None:
    """Teach the planner what a step cost; a batch counts as one prompt of its tokens.

    Steps that only decode are bound by memory and say nothing about prefill.
    """
    new = sum(work.length for work in works)
    if new == len(works):
        return
    pairs = sum(work.length * (work.request.computed + (work.length + 1) / 2) for work in works)
    planner.observe(new, max(0, round((pairs - new * (new + 1) / 2) / new)), seconds)
