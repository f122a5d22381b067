"""The store. Read this class from the top: it is the life of a request.

lookup -> load (host memory and disk into the engine's pages) -> [the engine computes the rest]
-> save (full blocks into host memory) -> write-back to disk, in the background.
"""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvstore.clock import Clock
from kvstore.config import Config, load_config
from kvstore.control import Control
from kvstore.counters import summary
from kvstore.hashing.chain import ChainFunction, chain_function
from kvstore.healing import report_bad
from kvstore.identity import Identity
from kvstore.invalidation import Invalidated, Scope
from kvstore.labels import shown
from kvstore.loading import Load, Loader, LoadResult, refuse_parts
from kvstore.lookup import count_lookup, find_prefix
from kvstore.opening import Opened, open_parts
from kvstore.pin_outcomes import Pinned, PinRefused
from kvstore.pool import PagePool
from kvstore.repair import Dropped, Suspect, drop_bad_blocks
from kvstore.resizing import Resized, Resizer
from kvstore.saving import Save, Saver
from kvstore.sequence import Sequence
from kvstore.space import Space
from kvstore.space_rules import refuse_other_layout, refuse_other_pool, refuse_too_large
from kvstore.ticket import Lease, Ticket
from kvstore.tiers.base import MissReason, TierName
from kvstore.tiers.catalogues import Catalogues
from kvstore.tiers.errors import ClosedError, TokenError
from kvstore.tiers.failpoints import planted
from kvstore.tiers.io import FileIo
from kvstore.tiers.layout import Layout
from kvstore.writeback import Writer


def open(
    source: str | Path | None = None,
    *,
    wait: bool = True,
    io: FileIo | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> "Store":
    """Open a store, making it where there is none; this process owns it until `close`.

    source: a TOML file, or the directory of a store, or nothing where `disk=` or `host=` say all.
    settings: host="4GiB", disk=["/var/cache/kv"], disk_capacity="100GiB", persist=False, ...: see
      kvstore.config.Config. Without any disk path the store is host memory alone.
    wait: return when everything stored before can be found; else at once, and lookups answer
      Miss(starting) meanwhile.
    io, clock: file calls and time, for tests that bring their own.
    Raises ConfigError, StoreError or StoreBusyError, each with one sentence that says what to do.
    """
    return Store(load_config(source, **settings), io=io, clock=clock, wait=wait)


class Store:
    """A tiered store of KV blocks: host memory and disk. Thread-safe; sequences are not."""

    def __init__(
        self,
        config: Config,
        *,
        io: FileIo | None = None,
        clock: Clock | None = None,
        wait: bool = True,
        threads: bool = True,
        catalogues: Catalogues | None = None,
    ) -> None:
        """As `open`. Without threads nothing happens but in calls, and in steps of the parts."""
        parts: Opened = open_parts(
            config, io or FileIo(), clock or Clock(), threads=threads, catalogues=catalogues
        )
        self.config = parts.config
        self._parts = parts
        self._placement = parts.placement
        self._counters = parts.counters
        self._spaces: dict[bytes, Space] = {}
        self._closed = False
        placement = parts.placement
        self._saver = Saver(placement, config.save_queue_blocks, threads=threads)
        self._loader = Loader(placement, parts.disks, config.load_queue, threads=threads)
        self._writer = Writer(placement, self.config, threads=threads) if parts.disk else None
        self._resizer = Resizer(parts, self._writer, threads=threads)
        self._control: Control | None = None
        self._starter = threading.Thread(target=parts.start, name="kvstore-start", daemon=True)
        if threads:
            self._starter.start()
        else:
            parts.start()
        if wait:
            self._join_starter()
            if parts.starter.failure is not None:
                self.close()
                raise parts.starter.failure
        if threads and parts.home is not None:
            self._control = Control(self, parts.home)

    # --- a namespace

    def namespace(
        self,
        layout: Layout,
        *,
        model: str,
        tenant: str = "",
        salt: bytes = b"",
        adapter: str = "",
        shards: int = 1,
        attributes: Mapping[str, str] | None = None,
        mixed: bool = False,
        chain: ChainFunction | None = None,
    ) -> Space:
        """Blocks of one model in one layout for one tenant: see kvstore.identity.Identity.

        mixed: keep this layout beside another that the store holds of the same model and tenant.
        Without it that is an error: an engine that was reconfigured by mistake would never hit.
        chain: another way to make keys, for tests that force collisions.
        Raises LayoutError for what cannot be stored, or is too large for a tier's segments.
        """
        self._refuse_closed()
        layout.refuse_unstorable()
        identity = Identity(
            model=model,
            layout=layout,
            hash=self.config.hash,
            tenant=tenant,
            salt=salt,
            adapter=adapter,
            shards=shards,
            attributes=dict(attributes or {}),
        )
        with self._placement.lock:
            digest = identity.digest()
            if digest in self._spaces and chain is None:
                return self._spaces[digest]
            space = Space(self, identity, -1, chain or chain_function(self.config.hash))
            refuse_too_large(self._placement, space.record.slot_bytes)
            if not mixed:
                refuse_other_layout(self._placement, space)
            space.number = self._parts.starter.space_number(digest, layout, space.record.slot_bytes)
            self._placement.spaces[space.number] = space.facts()
            self._spaces[digest] = space
            return space

    def labels(self) -> list[str]:
        """Model and tenant of every namespace that has blocks on disk, or had; sorted."""
        disk = self._placement.disk
        known = disk.namespaces().values() if disk is not None else ()
        return sorted({shown(namespace.label) for namespace in known})

    # --- the life of a request

    def lookup(self, sequence: Sequence, skip_tokens: int = 0) -> Ticket:
        """Find the longest stored prefix and lease it. Copies nothing. Next: load.

        It stops one token short of the sequence: the last token is always computed.
        """
        self._refuse_closed()
        placement = self._placement
        block_tokens = sequence.space.layout.block_tokens
        usable = max(0, (sequence.length - 1) // block_tokens)
        if skip_tokens < 0:
            raise TokenError(f"skip_tokens={skip_tokens} is negative; give 0 for nothing")
        with placement.lock:
            placement.expire_leases()
            rows, in_host, reason = find_prefix(placement, sequence, usable)
            leased = rows[[in_host - 1, -1]] if 0 < in_host < len(rows) else rows[-1:]
            placement.index.lease(leased)
            lease = placement.leases.add(leased) if len(rows) else Lease(leased, live=False)
            generations = placement.index.generations(rows)
        misses = count_lookup(placement, sequence, len(rows), usable, skip_tokens, reason)
        by_tier = {
            TierName.HOST: in_host * block_tokens,
            TierName.DISK: (len(rows) - in_host) * block_tokens,
        }
        return Ticket(self, sequence, rows, generations, by_tier, misses, skip_tokens, lease)

    def load(
        self,
        ticket: Ticket,
        pool: PagePool,
        page_ids: Any,
        skip_tokens: int | None = None,
        stop_tokens: int | None = None,
        probe: bool = False,
    ) -> Load:
        """Copy a ticket's blocks into the engine's pages. Leases become holds. Next: save."""
        self._refuse_closed()
        placement, sequence = self._placement, ticket.sequence
        refuse_other_pool(sequence, pool)
        size = sequence.space.layout.block_tokens
        skip = ticket.skip_tokens if skip_tokens is None else skip_tokens
        stop = ticket.tokens if stop_tokens is None else min(stop_tokens, ticket.tokens)
        refuse_parts(skip, stop, size, pool.page_tokens)
        first, last = min(skip, stop) // size, stop // size
        pages = pool.block_pages(page_ids, last)[first:]
        partial = skip % size if skip < stop else 0
        with placement.lock:
            placement.expire_leases()
            expired = ticket.blocks > 0 and not ticket.lease.live
            rows = ticket.rows[first:last]
            alive = placement.index.alive(rows, ticket.generations[first:last])
            good = 0 if expired else len(rows) if alive.all() else int(alive.argmin())
            load = Load(ticket, pool, pages[:good], rows[:good], first, partial)
            load.asked = len(rows)
            if good < len(rows):
                load.reason = MissReason.EXPIRED if expired else MissReason.INVALIDATED
            load.started_s = placement.clock.monotonic()
            load.epoch = placement.epochs[sequence.space.number]
            load.held = not planted("hold_by_timer")
            if load.held:
                placement.index.hold(load.rows)
            self._end_lease(ticket.lease)
            if not probe:
                self._placement.count_misses(
                    sequence, max(first, last), ticket.blocks, MissReason.DECLINED
                )
        if not self._loader.submit(load):
            load.cancel()
            load.cut(0, MissReason.TIMEOUT)
            self._loader.finish(load)
        return load

    def release(self, ticket: Ticket) -> None:
        """Give a ticket's leases back."""
        with self._placement.lock:
            if ticket.lease.live:
                size = ticket.sequence.space.layout.block_tokens
                first = ticket.skip_tokens // size
                self._placement.count_misses(
                    ticket.sequence, first, ticket.blocks, MissReason.DECLINED
                )
            self._end_lease(ticket.lease)

    def save(self, sequence: Sequence, pool: PagePool, page_ids: Any) -> Save:
        """Copy new full blocks from the engine's pages into host memory, asynchronously.

        A table shorter than the sequence, as in the middle of a chunked prefill, saves what it has.
        """
        self._refuse_closed()
        refuse_other_pool(sequence, pool)
        blocks = min(sequence.blocks, pool.blocks_of(page_ids))
        return self._saver.submit(sequence, pool, pool.block_pages(page_ids, blocks))

    # --- pins

    def pin(
        self, prefix: Sequence | str | bytes, *, ttl_s: float, namespace: Space | None = None
    ) -> Pinned | PinRefused:
        """Keep a prefix from eviction until ttl_s after its last hit, within the pins' budget.

        prefix: a sequence (its full blocks, also those that are saved later), or a stored block's
        key, 16 bytes or hex, for it and all before it. A pin that ends with the same block is
        renewed. namespace: refuse a key of another one.
        """
        self._refuse_closed()
        return self._placement.pins.pin(prefix, ttl_s, namespace)

    def unpin(self, pin_id: int) -> bool:
        """End a pin. Returns whether there was one."""
        self._refuse_closed()
        return self._placement.pins.unpin(pin_id)

    def pins(self) -> list[Pinned]:
        """The pins there are, the oldest first, each with how much of it is stored."""
        self._refuse_closed()
        return self._placement.pins.pins()

    # --- the store itself

    def flush(self) -> None:
        """Wait until what was saved so far is durable on disk, as far as the disk tier takes it."""
        self._refuse_closed()
        self._saver.drain()
        if self._writer is not None:
            self._writer.flush()

    def invalidate(self, scope: Scope) -> Invalidated:
        """Drop all blocks of a scope from every tier: when this returns, none is served again.

        That holds for loads under way (they end as a miss), for saves and engines' requests that
        began before (nothing of theirs is saved), after a restart and after a kill. See
        kvstore.invalidation. Raises ConfigError.
        """
        self._refuse_closed()
        self._join_starter()
        if self._parts.starter.failure is not None:
            raise self._parts.starter.failure
        return self._parts.invalidator.invalidate(scope)

    def report_bad(self, sequence: Sequence, block: int) -> int:
        """An engine found block number `block` of a sequence bad, by a check of its own.

        The block and all that were computed from it leave every tier, those before it stay. Compute
        the sequence from that block on and save it: it is written anew. Requests of others that
        began before save nothing more, because they may have used the bad block.

        Returns: how many blocks were dropped; 0 where the store did not have it.
        """
        self._refuse_closed()
        return report_bad(self._placement, sequence, block)

    def space_epoch(self, space: Space) -> int:
        """See Space.epoch."""
        return self._placement.epochs[space.number]

    def resize(self, *, host_bytes: int | None = None, disk_bytes: int | None = None) -> Resized:
        """Give the tiers other capacities, in bytes, while the store is in use. None: as it is.

        Blocks until it is done: to shrink, the coldest segments are emptied, and what keeps them
        from it is waited for resizing.WAIT_S. Saves and loads go on. The disk's capacity is kept
        for later owners, host memory's is not. Raises ConfigError, and nothing has changed, for
        what cannot be: too little, more than is free, or host memory beyond what was reserved.

        Returns: a Resized; with a reason it reached less than was asked for, and works with that.
        """
        self._refuse_closed()
        return self._resizer.resize(host_bytes, disk_bytes)

    def stats(self) -> dict[str, Any]:
        """Hits, misses and occupancy: the shape of `kvstore stats --json`."""
        self._refuse_closed()
        with self._placement.lock:
            self._placement.write_gauges()
        return summary(self._counters.all())

    def counters(self) -> dict[str, int]:
        """Every counter by name: see kvstore.counters.NAMES."""
        self._refuse_closed()
        return self._counters.all()

    def check_integrity(self) -> None:
        """AssertionError if an invariant is broken. Reads everything; for tests and doubts."""
        self._refuse_closed()
        with self._placement.lock:
            self._placement.expire_leases()
            self._parts.check_integrity()

    def drop_bad_blocks(self, suspects: Iterable[Suspect]) -> Dropped:
        """Read blocks on disk again and drop those that are bad: see kvstore.repair."""
        self._refuse_closed()
        return drop_bad_blocks(self._placement, self._parts.starter.numbers, list(suspects))

    def pin_memory(self, device: Any) -> Any:
        """Page-lock host memory for a device, in the background: see Space.pool."""
        return self._placement.host.pin(device, self._placement.clock.monotonic).covers

    def leaks(self) -> dict[str, int]:
        """Leases and holds that are out now; all zero when nothing is under way."""
        self._refuse_closed()
        with self._placement.lock:
            self._placement.expire_leases()
            return {
                "leases": self._placement.index.uses.leased,
                "holds": self._placement.index.uses.held,
            }

    def close(self) -> None:
        """Finish saves, write back what is dirty, and give the store up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._control is not None:
            self._control.close()
        self._resizer.close()
        self._join_starter()
        self._saver.close()
        self._loader.close()
        if self._writer is not None:
            self._writer.close()
        self._parts.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_lease(self, lease: Lease) -> None:
        if lease.live:
            lease.live = False
            self._placement.unlease(lease.rows)

    def _join_starter(self) -> None:
        if self._starter.ident is not None:
            self._starter.join()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed; open it again")


__all__ = ["LoadResult", "Store", "open"]
