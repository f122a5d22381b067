"""Reading the disk tier's catalogue at start: `python -m bench.disk_restart [--json]`.

A catalogue of the smallest blocks (8 KiB slots), rows only: what their slots hold is not written,
since a start reads none of it. Clean: after a clean stop. Killed: without its mark, so that the
catalogue is walked in a child process first.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.tiers.catalogue_row import place, row_dtype
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.io import FileIo
from kvstore.tiers.survey import CLEAN_FILE

SLOT_BYTES = 8192
SEGMENT_BYTES = 256 << 20
CATALOGUE_ROWS = 16_384  # Rows committed at a time while it is made.
RUNS = 5


def _tier(directory: Path, blocks: int) -> DiskTier:
    capacity = blocks * SLOT_BYTES * 5 // 4 + (1 << 30)
    return DiskTier([directory], capacity, SEGMENT_BYTES, FileIo(), store_id=bytes(16))


def make(directory: Path, blocks: int) -> None:
    """A tier with `blocks` rows of 16 tokens."""
    rng = np.random.default_rng(3)
    tier = _tier(directory, blocks)
    tier.load()
    number = tier.namespace_number(bytes(32), b"", "bench") or 0
    for first in range(0, blocks, CATALOGUE_ROWS):
        count = min(CATALOGUE_ROWS, blocks - first)
        slots = tier.reserve(SLOT_BYTES, count)
        if len(slots) < count:
            raise SystemExit("the tier is too small for this many blocks")
        rows = np.zeros(count, row_dtype(16))
        rows["key"] = np.frombuffer(rng.bytes(16 * count), "V16")
        rows["parent"] = rows["key"]
        rows["generation"] = np.arange(first, first + count)
        rows["namespace"] = number
        rows["tokens"] = rng.integers(0, 128_000, (count, 16))
        place(rows, slots, SLOT_BYTES, tier.per)
        volume = tier._volumes[0]
        volume.journal.set_namespace(number, tier.namespaces()[number])
        if volume.journal.commit(rows) is not None:
            raise SystemExit("the catalogue took no more rows")
    tier.close()


def load_seconds(directory: Path, blocks: int, killed: bool) -> float:
    """Seconds from nothing to all rows in memory."""
    if killed:
        (directory / CLEAN_FILE).unlink()
    begin = time.perf_counter()
    tier = _tier(directory, blocks)
    loaded = tier.load()
    seconds = time.perf_counter() - begin
    found = sum(map(len, loaded.rows.values()))
    tier.close()
    if found != blocks:
        raise SystemExit(f"{found} of {blocks} rows came back")
    return seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="rows (1,000,000)")
    parser.add_argument("--directory", default=".", help="a directory on the device to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-") as folder:
        directory = Path(folder) / "disk0"
        make(directory, arguments.blocks)
        results = {
            name: statistics.median(
                load_seconds(directory, arguments.blocks, killed) for _ in range(RUNS)
            )
            for name, killed in (("clean_s", False), ("killed_s", True))
        }
    if arguments.json:
        print(json.dumps({"blocks": arguments.blocks, **results}))
    else:
        print(f"{arguments.blocks} rows: clean {results['clean_s']:.2f} s, ", end="")
        print(f"after a kill {results['killed_s']:.2f} s")


if __name__ == "__main__":
    main()
