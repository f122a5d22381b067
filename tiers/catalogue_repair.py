"""A catalogue made anew while the tier is in use, and rows from the headers in the slots.

After a fault of its device a catalogue is never written again, even if it can be read: pages that
did not reach the device may look as if they had. What it says is copied into a new one.
"""

import threading
from collections.abc import Callable, Mapping

import numpy as np

from kvstore.tiers.catalogue import Change
from kvstore.tiers.catalogue_row import Rows, slots_of_rows
from kvstore.tiers.catalogue_tables import NAMESPACES_MAX, Namespace, SegmentState
from kvstore.tiers.disk_outcomes import Slots
from kvstore.tiers.errors import StoreError
from kvstore.tiers.io import FileIo
from kvstore.tiers.namespaces import Namespaces
from kvstore.tiers.rebuild import NamespaceNumber, newest, scan_segment
from kvstore.tiers.rebuild_mark import has_rebuild_mark, make_rebuild_mark, remove_rebuild_mark
from kvstore.tiers.record import ALIGN
from kvstore.tiers.slab import Slab
from kvstore.tiers.survey import catalogue_files
from kvstore.tiers.unlisted import Unlisted
from kvstore.tiers.volume import Volume


def scan_volume(
    io: FileIo,
    volume: Volume,
    slab: Slab,
    segments: Mapping[int, int],
    number_of: NamespaceNumber,
    void_below: Callable[[bytes], int],
) -> list[Rows]:
    """Rows from the headers in the slots of these segments (number -> slot_bytes), each block once.

    One array for each block_tokens. void_below: see scan_segment.
    Raises OSError where a file cannot be opened.
    """
    per = slab.slots_per_segment_max
    groups: list[Rows] = []
    for segment, slot_bytes in sorted(segments.items()):
        with volume.files.use(segment) as fd:
            groups += scan_segment(
                io,
                fd,
                segment=segment,
                slot_bytes=slot_bytes,
                slots=slab.slots_in_segment(slot_bytes),
                per=per,
                namespace_number=number_of,
                void_below=void_below,
            )
    kept, _ = newest(groups, per)
    merged: dict[int, list[Rows]] = {}
    for rows in kept:
        tokens = rows.dtype["tokens"].shape[0]
        merged.setdefault(tokens, []).append(rows)
        slot_bytes = int(rows["slot_pages"][0]) * ALIGN
        volume.row_tokens[slot_bytes] = max(volume.row_tokens.get(slot_bytes, 0), tokens)
    return [np.concatenate(parts) for parts in merged.values()]


def reopen(
    volume: Volume,
    *,
    io: FileIo,
    slab: Slab,
    names: Namespaces,
    lock: threading.RLock,
    uncommitted: set[int],
    unlisted: Unlisted,
) -> Slots:
    """Give a volume whose catalogue failed a new one, while the tier is in use.

    Blocks that are on disk as far as the slab knows get their rows again; rows of no such block are
    left out. lock: guards slab, names and `uncommitted`. Raises StoreError or OSError: then the
    volume still has no catalogue, and another try may follow.

    Returns: slots of committed blocks whose row is lost; drop them from the index.
    """
    volume.journal.detach()
    if volume.catalogue is not None:
        volume.catalogue.close()
    with lock:
        usable = {s: c for s, c in volume.classes.items() if not slab.is_quarantined(s)}
        table = {s: (c, SegmentState.USABLE) for s, c in usable.items()}
        for segment in volume.classes.keys() - usable.keys():
            table[segment] = (volume.classes[segment], SegmentState.QUARANTINED)
        namespaces = dict(volume.journal.namespaces)
    found = _old_rows(io, volume)
    scanned = found is None
    if found is None:

        def number_of(digest: bytes) -> int | None:
            with lock:
                return names.number(Namespace(digest, b"", ""), NAMESPACES_MAX)

        found = scan_volume(io, volume, slab, usable, number_of, lambda digest: 0)
        with lock:
            used = {int(n) for rows in found for n in np.unique(rows["namespace"])}
            namespaces.update({n: names.by_number[n] for n in used if n not in namespaces})
    with lock:
        gone = volume.journal.removing() | unlisted.slots()
        slots = [slab.slots_of(segment) for segment in usable]
        held = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        held = np.setdiff1d(held, np.fromiter(gone, np.int64, len(gone)))
        certain = np.setdiff1d(held, np.fromiter(uncommitted, np.int64, len(uncommitted)))
    # A header may be there of a block that is being written. A row was committed, and is either
    # about to be told of or, if its commit ended with the fault, about to be removed.
    wanted, per = certain if scanned else held, slab.slots_per_segment_max
    kept = [rows[np.isin(slots_of_rows(rows, per), wanted)] for rows in found]
    make_rebuild_mark(io, volume.path)
    catalogue = volume.make_catalogue(fresh=True)
    try:
        change = Change([rows for rows in kept if len(rows)], [], table, namespaces)
        if catalogue.commit(change) is not None:
            raise StoreError(f"the catalogue of {volume.path} cannot be written; check that device")
        remove_rebuild_mark(io, volume.path)
    except BaseException:
        catalogue.close()
        raise
    volume.use_catalogue(catalogue)
    there = [slots_of_rows(rows, per) for rows in kept]
    return np.setdiff1d(certain, np.concatenate(there)) if there else certain


def _old_rows(io: FileIo, volume: Volume) -> list[Rows] | None:
    """What the failed catalogue's file says; None where it cannot be trusted."""
    data, _ = catalogue_files(volume.path)
    size = io.status(data).st_size if io.exists(data) else 0
    if not size or has_rebuild_mark(io, volume.path):
        return None
    if not volume.catalogues.walk(data.parent, size).sound:
        return None
    try:
        old = volume.catalogues.own(data.parent, io, identity=volume.identity, size_bytes=size)
    except StoreError:
        return None
    try:
        by_tokens, bad = old.load()
        return None if bad else list(by_tokens.values())
    finally:
        old.close()
