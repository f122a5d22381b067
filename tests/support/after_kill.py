"""What is asked of a victim's store after its end: see support/victims.py."""

import math
import os
from pathlib import Path

import pytest

from kvstore.home import read_facts
from kvstore.store import Store
from kvstore.tiers.io import FileIo
from support.checks import assert_at_rest, disk_usage
from support.engine import Engine
from support.victims import (
    BLOCKS,
    CAPACITY_BYTES,
    PROMPTS,
    ROOT_BLOCKS,
    Ended,
    config_of,
    prompt_of,
    share_a_space,
    small_segments,
    space_of,
)

NEW_PROMPT = 1 << 30
SAVES = 5


def as_victims_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments in this process too; and nothing is written back, and so evicted, unasked."""
    monkeypatch.setattr("kvstore.writeback.START_AT", math.inf)
    monkeypatch.setattr("kvstore.opening.segment_bytes", None)
    small_segments()


def check(directory: Path, turn: int, ended: Ended) -> None:
    """Reopen a victim's store."""
    on_disk = ended.promised.slots.keys() | ended.promised.loaded.keys()
    must = 0
    with Store(config_of(directory, dirty_age_s=3600)) as store:
        store.check_integrity()
        numbers = range(max(0, turn * PROMPTS - 2), (turn + 1) * PROMPTS)
        for number in numbers:
            sequence = space_of(store, number).sequence(prompt_of(number))
            ticket = sequence.lookup()
            there = [key.tobytes() in on_disk for key in sequence.keys[: sequence.blocks]]
            durable = len(there) if all(there) else there.index(False)
            if ended.unsettled is None or not share_a_space(number, ended.unsettled):
                assert ticket.blocks >= durable, f"a durable block of prompt {number} was lost"
            assert not any(there[durable:]), f"a block of prompt {number} is there, its parent not"
            must += durable
            if number == ended.invalidated:
                assert ticket.blocks <= ROOT_BLOCKS, "a block that was invalidated is served"
            ticket.release()
        assert must or not on_disk
        store.flush()  # What host memory alone holds would keep it from taking what is on disk.
        for number in numbers:
            engine = Engine(space_of(store, number), 2 * BLOCKS)
            with engine.space.sequence(prompt_of(number)).lookup() as ticket:
                result = engine.load(ticket)  # asserts every byte of it
                assert result.tokens == ticket.tokens, result.reason
        # What host memory alone holds may leave no room for it at once, never for good.
        for _ in range(SAVES):
            _, saved = engine.save(prompt_of(NEW_PROMPT))
            store.flush()
            if not saved.dropped:
                break
        assert not saved.dropped
        assert_at_rest(store)
        bad = {n: c for n, c in store.counters().items() if n.startswith("bad_blocks") and c}
        assert not bad
    assert disk_usage(directory) <= CAPACITY_BYTES
    facts = read_facts(directory, FileIo())
    assert facts is not None
    left = Path("/dev/shm").glob(f"kvstore-{os.geteuid()}-{facts.store_id.hex()}*")
    assert not list(left), "a clean stop leaves no arena"
