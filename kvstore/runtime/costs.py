"""What computing and copying cost on this machine: measured at start and at every step."""

import time
from collections.abc import Sequence

import torch

from kvstore.planner import Planner
from kvstore.runtime.attention import Batch
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.pages import PagePool
from kvstore.runtime.scheduler import Work
from kvstore.tiers.base import TierName

CALIBRATION_TOKENS = (16, 64)
CALIBRATION_BLOCKS = (1, 8)


def calibrate(model: LlamaModel, pool: PagePool, planner: Planner) -> None:
    """Time prefill and copies at two sizes, on pages that nobody uses, for the first prompt's plan.

    Takes about as long as 160 tokens of prefill. A pool or a context too small for a size skips it.
    A copy between pages stands for a load from host memory. The disk is not touched: its first load
    begins with a probe, see kvstore.planner.
    """
    _time_prefill(model, pool, planner)
    _time_copies(pool, planner)


def _time_prefill(model: LlamaModel, pool: PagePool, planner: Planner) -> None:
    for count in (*CALIBRATION_TOKENS, *CALIBRATION_TOKENS):  # the first round only warms up
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
        model.forward(batch, pool)
        planner.observe(count, 0, time.perf_counter() - started)
        pool.release(pages)


def _time_copies(pool: PagePool, planner: Planner) -> None:
    for count in (*CALIBRATION_BLOCKS, *CALIBRATION_BLOCKS):
        pages = pool.allocate(2 * count)
        if pages is None:
            continue
        started = time.perf_counter()
        for part in pool.arrays():
            part[pages[:count]] = part[pages[count:]]
        seconds = time.perf_counter() - started
        size = count * pool.layout.payload_bytes
        planner.observe_load({TierName.HOST: size}, {TierName.HOST: count}, seconds)
        pool.release(pages)


def observe_step(planner: Planner, works: Sequence[Work], seconds: float) -> None:
    """Teach the planner what a step cost; a batch counts as one prompt of its tokens.

    Steps that only decode are bound by memory and say nothing about prefill.
    """
    new = sum(work.length for work in works)
    if new == len(works):
        return
    pairs = sum(work.length * (work.request.computed + (work.length + 1) / 2) for work in works)
    planner.observe(new, max(0, round((pairs - new * (new + 1) / 2) / new)), seconds)
