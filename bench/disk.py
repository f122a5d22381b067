"""The disk tier beside plain O_DIRECT threads on the same files: `python -m bench.disk [--json]`.

Steady state: the tier is full, every group written removes one written earlier, the catalogue is
on. The plain side overwrites the payloads' bytes in the same segment files with the same threads
and calls fdatasync once a group; it keeps no catalogue. Both count payload bytes. Reads of the tier
verify the header and all runs. Pairs are interleaved; ratios are medians over pairs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.hashing.checksum import run_checksums
from kvstore.tiers.catalogue_row import rows_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_outcomes import Written
from kvstore.tiers.io import FileIo, aligned_buffer
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.record_read import RecordCheck

GROUP = 64
THREADS = 8
BUFFERS = 2  # Groups in flight: one is written while the other is committed.
NAMESPACE = bytes(32)
SIZES = {
    "360 KiB": (Layout.attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16"), 32),
    "2 MiB": (Layout.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"), 16),
}


class Rig:
    """A full tier, and plain threads on its files."""

    def __init__(self, directory: Path, layout: Layout, groups: int) -> None:
        self.layout, self.record = layout, RecordFormat.of(layout)
        self.check = RecordCheck(layout)
        self.rng = np.random.default_rng(1)
        self.pool = ThreadPoolExecutor(THREADS)
        self.callers = ThreadPoolExecutor(BUFFERS)
        self.segment_bytes = 4096 + GROUP * 4 * self.record.slot_bytes
        capacity = (groups + 12) * GROUP * self.record.slot_bytes + (64 << 20)
        self.tier = DiskTier(
            [directory],
            capacity,
            self.segment_bytes,
            FileIo(),
            store_id=bytes(16),
            submit=self.pool.submit,
            threads=THREADS,
        )
        self.tier.load()
        self.name = self.tier.namespace_number(NAMESPACE, layout.canonical(), "bench") or 0
        self.memory = aligned_buffer(BUFFERS * GROUP * self.record.slot_bytes)
        self.free_buffers = deque(range(BUFFERS))
        self.generation = 0
        self.stored: list[np.ndarray] = []
        self._fill_memory()
        self._fill_tier(groups)

    def _fill_memory(self) -> None:
        view = np.frombuffer(self.memory, np.uint8).reshape(BUFFERS * GROUP, -1)
        body = view[:, self.record.header_bytes :]
        body[:] = self.rng.integers(0, 256, body.shape[1], dtype=np.uint8)
        runs = (self.layout.run_offsets, self.layout.run_lengths)
        payload = np.ascontiguousarray(body[0, : self.layout.payload_bytes])
        self.sums = run_checksums(payload, *runs)

    def _fill_tier(self, groups: int) -> None:
        while len(self.stored) < groups:
            self.write_group(0, None)
        # What reserve() still finds is the steady state's reserve of free slots.

    def records(self, buffer: int) -> list[memoryview]:
        size = self.record.slot_bytes
        first = buffer * GROUP
        return [self.memory[(first + n) * size : (first + n + 1) * size] for n in range(GROUP)]

    def write_group(self, buffer: int, remove: np.ndarray | None) -> None:
        """One group as the store writes it: headers, rows, slots, bytes, commit."""
        record, records = self.record, self.records(buffer)
        self.generation += GROUP
        keys = self.rng.integers(0, 256, (GROUP, 16), dtype=np.uint8)
        headers = record.build(
            keys=keys,
            parents=np.roll(keys, 1, 0),
            namespace=NAMESPACE,
            first_depth=0,
            first_generation=self.generation,
            tokens=self.rng.integers(0, 50_000, (GROUP, 16), dtype=np.int32),
            created_s=int(time.time()),
        )
        record.checksums(headers)[:] = self.sums
        record.seal(headers)
        for header, place in zip(headers, records, strict=True):
            place[: record.header_bytes] = memoryview(header)
        slots = self.tier.reserve(record.slot_bytes, GROUP)
        rows = rows_of(record, headers, slots, self.name, self.tier.per)
        removed = np.zeros(0, np.int64) if remove is None else remove
        outcome = self.tier.write_group(slots, records, rows, removed)
        if not isinstance(outcome, Written):
            raise SystemExit(f"a group was not written: {outcome}")
        self.stored.append(slots)

    def tier_writes(self, groups: int) -> None:
        """Groups of the steady state, BUFFERS of them in flight."""

        def one(buffer: int) -> None:
            victim = self.stored.pop(int(self.rng.integers(len(self.stored) // 2)))
            self.write_group(buffer, victim)

        waiting = deque(self.callers.submit(one, buffer) for buffer in range(BUFFERS))
        for number in range(groups):
            waiting.popleft().result()
            if number < groups - BUFFERS:
                waiting.append(self.callers.submit(one, number % BUFFERS))

    def _places(self, slots: np.ndarray) -> list[tuple[int, int]]:
        return [(self._fd(slot), self.tier.slab.offset_of(slot)) for slot in slots.tolist()]

    def plain_writes(self, groups: int) -> None:
        """The same bytes by plain threads: they overwrite groups in the tier's files."""
        size = -(-self.layout.payload_bytes // 4096) * 4096
        memory = [record[:size] for record in self.records(0)]
        for _ in range(groups):
            slots = self.spare()
            jobs = list(zip(self._places(slots), memory, strict=True))

            def write(part: list[Any]) -> None:
                for (fd, offset), data in part:
                    os.pwritev(fd, [data], offset)

            list(self.pool.map(write, [jobs[n::THREADS] for n in range(THREADS)]))
            for fd in {fd for (fd, _), _ in jobs}:
                os.fdatasync(fd)

    def spare(self) -> np.ndarray:
        """A stored group that plain threads may overwrite: taken from the tier for the run."""
        return self.scratch[int(self.rng.integers(len(self.scratch)))]

    def take_scratch(self, groups: int) -> None:
        """Remove some groups from the tier and hold their slots, for the plain threads."""
        self.scratch = []
        for _ in range(groups):
            self.tier.remove(self.stored.pop(0))
        self.tier.flush_removals()
        for _ in range(groups):
            self.scratch.append(self.tier.reserve(self.record.slot_bytes, GROUP))

    def tier_reads(self, groups: int) -> None:
        """Stored records, each verified: header, then all runs."""

        def read(slot: int, data: memoryview) -> None:
            fault = self.tier.read_record(slot, data, self.check)
            if fault is not None:
                raise SystemExit(f"slot {slot} did not verify: {fault}")

        self._reads(groups, read)

    def plain_reads(self, groups: int) -> None:
        """The payloads' bytes by plain threads."""
        size = -(-self.layout.payload_bytes // 4096) * 4096

        def read(slot: int, data: memoryview) -> None:
            os.preadv(self._fd(slot), [data[:size]], self.tier.slab.offset_of(slot))

        self._reads(groups, read)

    def _reads(self, groups: int, read: Callable[[int, memoryview], None]) -> None:
        """Stored groups at random; each thread takes the next block there is."""
        for _ in range(groups):
            slots = self.stored[int(self.rng.integers(len(self.stored)))].tolist()
            jobs = iter(list(zip(slots, self.records(1), strict=True)))

            def take(jobs: Iterator[tuple[int, memoryview]] = jobs) -> None:
                for slot, data in jobs:
                    read(slot, data)

            for future in [self.pool.submit(take) for _ in range(THREADS)]:
                future.result()

    def _fd(self, slot: int) -> int:
        return self.tier._fd(slot // self.tier.per)


def compare(
    ours: Callable[[int], None], plain: Callable[[int], None], groups: int, size: int, pairs: int
) -> dict[str, float]:
    """Interleaved pairs, the order alternating. GB/s are medians, the ratio is one of pairs."""
    times: dict[str, list[float]] = {"tier": [], "plain": []}
    for pair in range(pairs):
        sides = [("tier", ours), ("plain", plain)]
        for name, run in sides if pair % 2 else sides[::-1]:
            begin = time.perf_counter()
            run(groups)
            times[name].append(groups * GROUP * size / (time.perf_counter() - begin) / 1e9)
    ratios = [ours / other for ours, other in zip(times["tier"], times["plain"], strict=True)]
    return {
        "tier_gb_s": statistics.median(times["tier"]),
        "plain_gb_s": statistics.median(times["plain"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    """Run all and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs (15)")
    parser.add_argument("--directory", default=".", help="a directory on the device to measure")
    parser.add_argument("--size", choices=list(SIZES), help="only this block size")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (layout, groups) in SIZES.items():
        if arguments.size in {None, name}:
            with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-") as folder:
                rig = Rig(Path(folder) / "disk0", layout, groups)
                rig.take_scratch(groups // 4)
                size = layout.payload_bytes
                many = max(4, int(6e8 / (GROUP * size)))
                rig.tier_writes(many)
                results[name] = {
                    "write": compare(
                        rig.tier_writes, rig.plain_writes, many, size, arguments.pairs
                    ),
                    "read": compare(rig.tier_reads, rig.plain_reads, many, size, arguments.pairs),
                }
                rig.tier.close()
    if arguments.json:
        json.dump(results, sys.stdout, indent=1)
        print()
        return
    for name, sides in results.items():
        for side, found in sides.items():
            print(
                f"{name:8} {side:5}  tier {found['tier_gb_s']:.2f} GB/s  plain "
                f"{found['plain_gb_s']:.2f} GB/s  ratio {found['ratio']:.2f} "
                f"({found['ratio_min']:.2f}-{found['ratio_max']:.2f})"
            )


if __name__ == "__main__":
    main()
