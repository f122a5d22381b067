"""One thread of the model check: random operations, each answer compared with the table.

An operation is one call to the store: a lookup, a load, a cancel, a release, a save, a report of a
bad block, an invalidation, a pin; or a bit that turns over on disk.
"""

import os
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvstore.invalidation import Scope
from kvstore.loading import Load
from kvstore.pin_outcomes import Pinned
from kvstore.pool import PagePool
from kvstore.saving import Save
from kvstore.sequence import Sequence
from kvstore.space import Space
from kvstore.store import Store
from kvstore.ticket import Ticket
from support.model_world import BLOCK_TOKENS, BLOCKS_MAX, Bytes, Moments, Prompt, Tenant

GROUPS = 4  # requests of one thread and tenant that may be under way
WAIT_S = 60.0
POISON = 0xEE
PAGE = 4096
PINS = 3  # of one thread at a time
USED_BYTES = 4000  # of a payload, at least
Note = tuple[int, int, str, str]  # order, prompt, tenant, what


class Violation(AssertionError):
    """The store returned what the table does not allow."""


@dataclass
class Pending:
    """What still uses a group of pages."""

    prompt: Prompt
    gone: Moments
    saves: list[Save] = field(default_factory=list)
    load: Load | None = None
    skip: int = 0
    blocks: int = 0


@dataclass
class Desk:
    """A tenant's space in an open store, and one thread's pages of it."""

    tenant: Tenant
    space: Space
    arrays: list[Bytes] = field(default_factory=list)
    pending: list[Pending | None] = field(default_factory=lambda: [None] * GROUPS)
    next_group: int = 0

    def __post_init__(self) -> None:
        lengths = self.tenant.layout.run_lengths.tolist()
        self.arrays = [np.full((GROUPS * BLOCKS_MAX, n), POISON, np.uint8) for n in lengths]
        self.pool = PagePool(self.tenant.layout, self.arrays, BLOCK_TOKENS)

    def runs(self) -> Iterator[tuple[Bytes, slice]]:
        """Each run's pages, and where it lies in a payload."""
        layout = self.tenant.layout
        for array, at, size in zip(
            self.arrays, layout.run_offsets.tolist(), layout.run_lengths.tolist(), strict=True
        ):
            yield array, slice(at, at + size)


class Worker:
    """One thread's requests to an open store; `failure` is what it met."""

    def __init__(
        self, store: Store, tenants: list[Tenant], seed: int, weights: tuple[float, ...]
    ) -> None:
        self.store = store
        self.weights = weights
        self.random = random.Random(seed)
        self.desks = [Desk(t, store.namespace(t.layout, model="m", tenant=t.name)) for t in tenants]
        self.operations = 0
        self.hits = 0
        self.notes: deque[Note] = deque(maxlen=4000)
        self.failure: BaseException | None = None
        self._kept: deque[Ticket] = deque(maxlen=8)
        self._pins: deque[int] = deque()

    def run(self, operations: int) -> None:
        """So many more operations, and the end of all of them."""
        end = self.operations + operations
        try:
            while self.operations < end:
                self.step()
            self.settle_all()
        except BaseException as failure:
            self.failure = failure

    def step(self) -> None:
        """One request of a random kind."""
        desk = self.random.choice(self.desks)
        # Skewed, as requests are: a few prompts often, most of them rarely.
        at = int(self.random.random() ** 2 * len(desk.tenant.prompts))
        prompt = desk.tenant.prompts[at]
        (kind,) = self.random.choices(KINDS, self.weights)
        kind(self, desk, prompt)

    # --- kinds of requests

    def look(self, desk: Desk, prompt: Prompt) -> None:
        self._release(self._lookup(desk, prompt), prompt)

    def look_and_leave(self, desk: Desk, prompt: Prompt) -> None:
        """A lookup that is never followed: its leases end by themselves."""
        self._kept.append(self._lookup(desk, prompt))

    def load(self, desk: Desk, prompt: Prompt) -> None:
        self._load(desk, prompt, self._lookup(desk, prompt))

    def load_and_cancel(self, desk: Desk, prompt: Prompt) -> None:
        pending = self._load(desk, prompt, self._lookup(desk, prompt), wait=False)
        assert pending.load is not None
        pending.load.cancel()
        self._note(prompt, desk, "cancel")

    def load_late(self, desk: Desk, prompt: Prompt) -> None:
        """A ticket of an earlier request, whose leases may be over and whose blocks gone."""
        if self._kept:
            ticket = self._kept.popleft()
            at = next(n for n, d in enumerate(self.desks) if d.space is ticket.sequence.space)
            theirs = self.desks[at].tenant.prompts
            tokens = ticket.sequence.tokens[: ticket.tokens]
            same = [
                p
                for p in theirs
                if np.array_equal(p.tokens[: len(tokens)], tokens)
                and p.media.items() == ticket.sequence.media.items()
            ]
            self._load(self.desks[at], same[0], ticket)

    def save(self, desk: Desk, prompt: Prompt) -> None:
        """Save a prompt; in two steps, as a chunked prefill does, or in one."""
        blocks = self.random.randint(1, BLOCKS_MAX)
        pages = self._pages(desk)
        for array, run in desk.runs():
            array[pages[:blocks]] = prompt.payloads[:blocks, run]
        sequence = self._sequence(desk, prompt, blocks * BLOCK_TOKENS)
        desk.tenant.begin_save(prompt.nodes[:blocks])
        saves: list[Save] = []
        if blocks > 2 and self.random.random() < 0.3:
            saves.append(sequence.save(desk.pool, pages[: blocks // 2]))
            self._note(prompt, desk, f"save {blocks // 2}")
        saves.append(sequence.save(desk.pool, pages[:blocks]))
        self._note(prompt, desk, f"save {blocks}")
        self._take_group(
            desk, Pending(prompt, desk.tenant.gone(prompt.nodes), saves=saves, blocks=blocks)
        )

    def report(self, desk: Desk, prompt: Prompt) -> None:
        """A block that an engine found bad: it and all that follow it are gone."""
        ticket = self._lookup(desk, prompt)
        if ticket.blocks:
            # Rather a deep one: all below it leave too.
            block = int(self.random.random() ** 0.3 * ticket.blocks)
            began_s = time.monotonic()
            if self.store.report_bad(ticket.sequence, block):
                desk.tenant.end_below(int(prompt.nodes[block]), began_s)
            self._note(prompt, desk, f"report {block}")
        self._release(ticket, prompt)

    def invalidate(self, desk: Desk, prompt: Prompt) -> None:
        """A tenant, or a prompt from some block on."""
        began_s = time.monotonic()
        if self.random.random() < 0.2:
            self.store.invalidate(Scope(tenant=desk.tenant.name))
            desk.tenant.end_all(began_s)
            self._note(prompt, desk, "invalidate all")
            return
        block = self.random.randrange(BLOCKS_MAX)
        keys = self._sequence(desk, prompt, BLOCKS_MAX * BLOCK_TOKENS).keys
        self.store.invalidate(Scope(prefix=keys[block].tobytes().hex()))
        desk.tenant.end_below(int(prompt.nodes[block]), began_s)
        self._note(prompt, desk, f"invalidate {block}")

    def pin(self, desk: Desk, prompt: Prompt) -> None:
        """Pin a prompt, and end an older pin."""
        sequence = self._sequence(desk, prompt, self.random.randint(1, 4) * BLOCK_TOKENS)
        pinned = self.store.pin(sequence, ttl_s=self.random.choice([1.0, 60.0]))
        self._note(prompt, desk, "pin")
        if isinstance(pinned, Pinned):
            self._pins.append(pinned.pin_id)
        if len(self._pins) > PINS:
            self.store.unpin(self._pins.popleft())
            self.operations += 1

    def damage(self, desk: Desk, prompt: Prompt) -> None:
        """A bit of some record on disk turns over, whoever is using it."""
        home = self.store.config.home
        files = sorted((home / "disk0").glob("*.seg")) if home is not None else []
        if files:
            size = desk.space.record.slot_bytes
            with self.random.choice(files).open("r+b", buffering=0) as file:
                slots = (file.seek(0, 2) - PAGE) // size
                slot = self.random.randrange(max(1, slots))
                at = PAGE + slot * size + self.random.randrange(PAGE + USED_BYTES)
                byte = bytearray(os.pread(file.fileno(), 1, at))
                byte[0] ^= 1 << self.random.randrange(8)
                os.pwrite(file.fileno(), byte, at)
            self._note(prompt, desk, f"damage {slot}")

    def ask(self, desk: Desk, prompt: Prompt) -> None:
        """What readers of figures ask for."""
        self.store.stats()
        self._note(prompt, desk, "stats")

    # --- single calls

    def _sequence(self, desk: Desk, prompt: Prompt, tokens: int) -> Sequence:
        return desk.space.sequence(prompt.tokens[:tokens], prompt.media)

    def _lookup(self, desk: Desk, prompt: Prompt) -> Ticket:
        gone = desk.tenant.gone(prompt.nodes)
        blocks = self.random.randint(1, BLOCKS_MAX)
        sequence = self._sequence(desk, prompt, blocks * BLOCK_TOKENS + 1)
        ticket = sequence.lookup()
        self._note(prompt, desk, f"lookup {blocks} found {ticket.blocks}")
        if ticket.blocks > blocks:
            raise Violation(f"{ticket.blocks} of {blocks} blocks were found")
        if not desk.tenant.may_be_found(prompt.nodes[: ticket.blocks], gone[: ticket.blocks]):
            raise Violation(f"{desk.tenant.name} prompt {prompt.number}: found, but not saved")
        return ticket

    def _release(self, ticket: Ticket, prompt: Prompt) -> None:
        ticket.release()
        self.operations += 1

    def _load(
        self, desk: Desk, prompt: Prompt, ticket: Ticket, wait: bool | None = None
    ) -> Pending:
        skip = self.random.randint(0, ticket.blocks) if self.random.random() < 0.2 else 0
        pages = self._pages(desk)
        for array, _ in desk.runs():
            array[pages[:BLOCKS_MAX]] = POISON
        gone = desk.tenant.gone(prompt.nodes)
        load = ticket.load(desk.pool, pages[: ticket.blocks], skip_tokens=skip * BLOCK_TOKENS)
        self._note(prompt, desk, f"load {skip}..{ticket.blocks}")
        pending = Pending(prompt, gone, load=load, skip=skip, blocks=ticket.blocks)
        group = self._take_group(desk, pending)
        if self.random.random() < 0.7 if wait is None else wait:
            self._settle(desk, group)
        return pending

    # --- pages and answers

    def _pages(self, desk: Desk) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Pages that nobody uses: the next group's, once its last request is done."""
        self._settle(desk, desk.next_group)
        first = desk.next_group * BLOCKS_MAX
        return np.arange(first, first + BLOCKS_MAX)

    def _take_group(self, desk: Desk, pending: Pending) -> int:
        group = desk.next_group
        desk.pending[group] = pending
        desk.next_group = (group + 1) % GROUPS
        return group

    def settle_all(self) -> None:
        """Wait for all that is under way, and check it."""
        for desk in self.desks:
            for group in range(GROUPS):
                self._settle(desk, group)
        for ticket in self._kept:
            ticket.release()
        self._kept.clear()
        while self._pins:
            self.store.unpin(self._pins.popleft())

    def _settle(self, desk: Desk, group: int) -> None:
        pending, desk.pending[group] = desk.pending[group], None
        if pending is None:
            return
        for save in pending.saves:  # One that found the queue full is done before one before it.
            result = save.result(WAIT_S)
            total = result.saved + result.present + sum(result.dropped.values())
            if total > pending.blocks:
                raise Violation(f"a save of {pending.blocks} blocks accounts for {total}")
        if pending.load is None:
            return
        tokens = pending.load.result(WAIT_S).tokens
        good = tokens // BLOCK_TOKENS
        self.hits += good - pending.skip
        nodes, part = pending.prompt.nodes, slice(pending.skip, good)
        if not desk.tenant.may_be_found(nodes[part], pending.gone[part]):
            raise Violation(f"{desk.tenant.name} prompt {pending.prompt.number}: loaded, but gone")
        first = group * BLOCKS_MAX
        for array, run in desk.runs():
            loaded = array[first + pending.skip : first + good]
            held = array[first : first + pending.skip]
            same = np.array_equal(loaded, pending.prompt.payloads[pending.skip : good, run])
            if not same or (held != POISON).any():
                self._note(pending.prompt, desk, f"WRONG {pending.skip}..{good}")
                raise Violation(
                    f"{desk.tenant.name} prompt {pending.prompt.number}: blocks "
                    f"{pending.skip}..{good} hold other bytes than were saved"
                )

    def _note(self, prompt: Prompt, desk: Desk, what: str) -> None:
        self.operations += 1
        self.notes.append((time.monotonic_ns(), prompt.number, desk.tenant.name, what))


KINDS = (
    *(Worker.look, Worker.look_and_leave, Worker.load, Worker.load_and_cancel, Worker.load_late),
    *(Worker.save, Worker.report, Worker.invalidate, Worker.pin, Worker.damage, Worker.ask),
)
WEIGHTS = (110, 6, 20, 5, 2, 14, 1, 0.1, 1, 1, 1)
GIVING_UP = (20, 30, 10, 30, 10, 10, 1, 0.25, 1, 1, 1)  # Cancels, and lookups without a load.
