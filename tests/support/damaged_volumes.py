"""Damages the files of a volume at random and opens it; what is found must be right.

    python -m support.damaged_volumes ROOT FIRST IMAGES

Prints one line before each image, number and what was done to it, and one line of JSON at the end.
A process that dies is blamed on the last line. Image N is damaged in the same way in every run.
"""

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvstore.tiers.disk_outcomes import Written
from kvstore.tiers.errors import KvstoreError
from support.disk_blocks import LARGE, LONGER, SMALL, Rig, found_blocks, open_rig
from support.walkers import Walkers

LAYOUTS = {SMALL: range(0, 40), LONGER: range(100, 111), LARGE: range(200, 205)}
PAGE = 4096
USED_PAGES = 40  # of the catalogue; beyond are pages that LMDB has not used yet
WORDS = (0, 1, 2, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 2**63 - 1, 2**64 - 1)
DATA, LOCK = "catalogue/data.mdb", "catalogue/lock.mdb"
Files = dict[str, bytes]
Damage = Callable[[random.Random, bytearray], bytes]


def flip_bits(rng: random.Random, data: bytearray) -> bytes:
    for _ in range(rng.choice([1, 1, 2, 8, 40])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def zero_page(rng: random.Random, data: bytearray) -> bytes:
    at = rng.randrange(-(-len(data) // PAGE)) * PAGE
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    return bytes(data)


def cut(rng: random.Random, data: bytearray) -> bytes:
    return bytes(data[: rng.choice([0, rng.randrange(len(data)), len(data) // PAGE // 2 * PAGE])])


def swap_pages(rng: random.Random, data: bytearray) -> bytes:
    one, other = (rng.randrange(max(1, len(data) // PAGE)) * PAGE for _ in range(2))
    kept = data[one : one + PAGE]
    data[one : one + PAGE] = data[other : other + PAGE]
    data[other : other + PAGE] = kept
    return bytes(data)


def noise(rng: random.Random, data: bytearray) -> bytes:
    at = rng.randrange(-(-len(data) // PAGE)) * PAGE
    data[at : at + PAGE] = rng.randbytes(len(data[at : at + PAGE]))
    return bytes(data)


def bend_word(rng: random.Random, data: bytearray) -> bytes:
    """A field of a page's header, of its list of nodes, or of a meta page, gets a bad value."""
    size = rng.choice([2, 4, 8])
    page = rng.randrange(max(1, len(data) // PAGE)) * PAGE
    at = page + rng.randrange(0, 160 if rng.random() < 0.7 else PAGE - 8, 2)
    value = rng.choice(WORDS) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, "little")[: max(0, len(data) - at)]
    return bytes(data)


DAMAGES: tuple[Damage, ...] = (flip_bits, zero_page, cut, swap_pages, noise, bend_word)
TARGETS = (*([DATA] * 6), LOCK, "clean", "volume", "segment")


def damage(rng: random.Random, files: Files) -> tuple[Files, list[str]]:
    """One or two of the files are damaged. Returns: what differs now, and what was done."""
    changed: Files = {}
    done = []
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(TARGETS)
        if name == "segment":
            name = rng.choice([n for n in files if n.endswith(".seg")])
        kind = rng.choice(DAMAGES)
        whole = changed.get(name, files[name])
        used = {DATA: USED_PAGES * PAGE, LOCK: len(whole), "clean": len(whole)}.get(name, PAGE)
        # Of a segment the header: what its slots hold is the matter of test_04_flips.
        head = kind(rng, bytearray(whole[:used])) if whole else b""
        changed[name] = head if kind is cut and name != "volume" else head + whole[used:]
        done.append(f"{kind.__name__} {name}")
    return changed, done


def read_files(volume: Path) -> Files:
    return {str(p.relative_to(volume)): p.read_bytes() for p in volume.rglob("*") if p.is_file()}


def make_volume(volume: Path) -> dict[int, int]:
    """A closed tier with blocks of all layouts. Returns: number -> slot."""
    rig = open_rig(volume, direct=False)
    slots: dict[int, int] = {}
    for layout, numbers in LAYOUTS.items():
        taken, outcome = rig.write(list(numbers), layout)
        assert isinstance(outcome, Written)
        slots.update(zip(numbers, taken.tolist(), strict=True))
    rig.tier.close()
    return slots


def layout_of(number: int) -> object:
    return next(layout for layout, numbers in LAYOUTS.items() if number in numbers)


def look(volume: Path, walkers: Walkers, blocks: dict[int, int], cut_short: bool) -> str:
    """Open a damaged volume. AssertionError if anything is wrong. Returns: what came of it."""
    try:
        rig = open_rig(volume, catalogues=walkers, direct=False)
    except KvstoreError as refused:
        assert "\n" not in str(refused) and len(str(refused)) > 20, refused
        return "refused"
    found = found_blocks(rig)
    assert found.items() <= blocks.items(), "a block is found where it never was"
    wrong = [n for n, slot in found.items() if not rig.good(slot, n, layout_of(n))]  # type: ignore[arg-type]
    assert cut_short or not wrong, f"found and bad: {wrong}"
    go_on(rig)
    rebuilt = bool(rig.loaded.rebuilt)
    rig.tier.check_integrity()
    rig.tier.close()
    if len(found) == len(blocks):
        return "rebuilt, all found" if rebuilt else "all found"
    return "rebuilt, some found" if rebuilt else "some found"


def go_on(rig: Rig) -> None:
    """It is a tier like any other: it takes a group, or says that it does not."""
    slots = rig.reserve(4)
    if len(slots) == 4:
        numbers = range(500, 504)
        from support.disk_blocks import block  # noqa: PLC0415

        outcome = rig.put(slots, [block(n) for n in numbers])
        if isinstance(outcome, Written):
            assert all(rig.good(s, n) for s, n in zip(slots.tolist(), numbers, strict=True))
            rig.tier.remove(slots)
            rig.tier.flush_removals()


def main(root: Path, first: int, images: int) -> None:
    volume = root / "volume"
    blocks = make_volume(volume)
    files = read_files(volume)
    outcomes: Counter[str] = Counter()
    walkers = Walkers()
    for number in range(first, first + images):
        rng = random.Random(number)
        changed, done = damage(rng, files)
        print(f"{number} {done}", flush=True)
        shutil.rmtree(volume)
        (volume / "catalogue").mkdir(parents=True, mode=0o700)
        volume.chmod(0o700)
        for name, data in (files | changed).items():
            (volume / name).write_bytes(data)
        if rng.random() < 0.7:
            (volume / "clean").unlink()  # As after a kill; else the mark tells of the damage.
        cut_short = any(name.endswith(".seg") for name in changed)
        outcomes[look(volume, walkers, blocks, cut_short)] += 1
    walkers.close()
    print(json.dumps({"outcomes": dict(outcomes), "deaths of walks": len(walkers.deaths)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
