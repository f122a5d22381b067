"""Starting the disk tier: catalogues that can be trusted are read, the others are rebuilt.

clean stop          the catalogue's digest is compared, then it is read
anything else       it is walked in a child process first
damaged             a new one is made from the headers in the segments
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.tiers.catalogue import Change
from kvstore.tiers.catalogue_repair import scan_volume
from kvstore.tiers.catalogue_row import Rows, keys_of, slots_of_rows
from kvstore.tiers.catalogue_tables import (
    NAMESPACES_MAX,
    Identity,
    Namespace,
    SegmentState,
    parse_namespaces,
)
from kvstore.tiers.catalogues import Catalogues, OwnedCatalogue
from kvstore.tiers.errors import ConfigError, StoreError
from kvstore.tiers.failpoints import reach
from kvstore.tiers.guard import Monotonic
from kvstore.tiers.io import FileIo
from kvstore.tiers.namespaces import Namespaces
from kvstore.tiers.open_files import OpenFiles
from kvstore.tiers.rebuild_mark import has_rebuild_mark, make_rebuild_mark, remove_rebuild_mark
from kvstore.tiers.record import ALIGN
from kvstore.tiers.segment import HEADER_BYTES, STORE_ID_BYTES, FileHeader
from kvstore.tiers.slab import Slab
from kvstore.tiers.survey import Survey, refuse_no_room, survey
from kvstore.tiers.volume import Volume
from kvstore.tiers.volume_cost import refuse_over_budget, refuse_too_small

SEGMENTS_MAX = 4096  # A start reads the header of each, and sums go over all of them.
VOLUMES_MAX = 64


@dataclass(frozen=True)
class Loaded:
    """What a start found.

    rows: by block_tokens, in the order of their slots, sealed; `slots_of_rows` says where they lie.
    rebuilt: numbers of the volumes whose catalogue was made anew. damaged: rows that were lost with
    one, or named no slot.
    """

    rows: dict[int, Rows]
    rebuilt: tuple[int, ...]
    damaged: int


@dataclass(frozen=True)
class Opened:
    """The volumes of a tier with their files open, and what was found there."""

    volumes: list[Volume]
    files: OpenFiles
    slab: Slab
    direct: bool
    found: list[Survey]
    headers: list[dict[int, FileHeader]]


def open_volumes(
    io: FileIo,
    paths: Sequence[Path],
    *,
    capacity_bytes: int,
    segment_bytes: int,
    store_id: bytes,
    direct: bool,
    released: Callable[[list[int]], None],
    monotonic: Monotonic,
    catalogues: Catalogues | None = None,
) -> Opened:
    """Look at all paths, and only if none is refused make or open the volumes.

    Raises ConfigError, StoreError or StoreBusyError. Warns when `direct` cannot be had.
    """
    _refuse_misuse(paths, segment_bytes, store_id)
    count = len(paths)
    share = capacity_bytes // count // ALIGN * ALIGN
    refuse_too_small(share, segment_bytes)
    identities = [Identity(store_id, number, count, segment_bytes) for number in range(count)]
    found = [survey(io, path, identity) for path, identity in zip(paths, identities, strict=True)]
    refuse_no_room(io, paths, found, share)
    places = [p if one.exists else p.parent for p, one in zip(paths, found, strict=True)]
    avoided = direct and all(io.supports_direct(place) for place in places)
    if direct and not avoided:
        text = f"{paths[0]} has no O_DIRECT: the disk tier goes through the page cache instead"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    slab = _slab(found, share, segment_bytes)
    volumes: list[Volume] = []
    files = OpenFiles(io, lambda segment: volumes[segment % count].open_segment(segment))
    volumes += [
        Volume(
            path,
            io,
            identity,
            budget_bytes=share,
            per=slab.slots_per_segment_max,
            direct=avoided,
            released=released,
            catalogues=catalogues,
            files=files,
            monotonic=monotonic,
        )
        for path, identity in zip(paths, identities, strict=True)
    ]
    headers: list[dict[int, FileHeader]] = []
    try:
        for volume, one in zip(volumes, found, strict=True):
            headers.append(volume.open_files(one))
            refuse_over_budget(
                volume.path, share, segment_bytes, headers[-1].values(), one.catalogue_bytes
            )
    except BaseException:
        for volume in volumes:
            volume.close()
        raise
    return Opened(volumes, files, slab, avoided, found, headers)


def load_volumes(
    io: FileIo, opened: Opened, names: Namespaces, void_below: Callable[[bytes], int]
) -> Loaded:
    """Restore the slab and return all rows. void_below: see rebuild.scan_segment.

    Raises StoreError for another's catalogue, and for a device that fails meanwhile.
    """
    try:
        return _load_volumes(io, opened, names, void_below)
    except OSError as error:
        raise StoreError(f"the disk tier cannot start: {error}; check that device") from None


def _load_volumes(
    io: FileIo, opened: Opened, names: Namespaces, void_below: Callable[[bytes], int]
) -> Loaded:
    slab, found, headers = opened.slab, opened.found, opened.headers
    sound: dict[int, OwnedCatalogue] = {}
    for number, volume in enumerate(opened.volumes):
        _restore_classes(volume, headers[number])
        catalogue = _open_if_sound(io, volume, found[number], names)
        if catalogue is not None:
            sound[number] = catalogue
    groups: dict[int, list[Rows]] = {}
    rebuilt, damaged = [], 0
    for number, volume in enumerate(opened.volumes):
        rows = None
        if number in sound:
            rows, bad = _load(volume, sound[number], headers[number], slab)
            damaged += bad
        if rows is None:
            if found[number].segments:
                rebuilt.append(number)
            rows = _rebuild(io, volume, slab, names, void_below)
        _restore_slab(volume, rows, slab)
        for part in rows:
            groups.setdefault(part.dtype["tokens"].shape[0], []).append(part)
    merged = {
        tokens: np.concatenate(parts) if len(parts) > 1 else parts[0]
        for tokens, parts in groups.items()
    }
    return Loaded(merged, tuple(rebuilt), damaged)


def _slab(found: list[Survey], share_bytes: int, segment_bytes: int) -> Slab:
    """A slab for as many segments as there may ever be: the capacity may grow."""
    last = max((segment for one in found for segment in one.segments), default=0)
    segments_max = max(share_bytes // segment_bytes, last // len(found) + 1) * len(found)
    if segments_max > SEGMENTS_MAX:
        raise ConfigError(
            f"{segments_max} segments are more than {SEGMENTS_MAX}; use larger segments"
        )
    return Slab(SEGMENTS_MAX // len(found) * len(found), segment_bytes, HEADER_BYTES)


def _restore_classes(volume: Volume, headers: dict[int, FileHeader]) -> None:
    for segment, header in headers.items():
        if header.slot_bytes:
            volume.classes[segment] = header.slot_bytes


def _open_if_sound(
    io: FileIo, volume: Volume, found: Survey, names: Namespaces
) -> OwnedCatalogue | None:
    """The volume's catalogue, with its namespaces merged; None if it has to be rebuilt."""
    if not found.catalogue_bytes:
        volume.drop_clean_mark()
        return None
    cut_short = has_rebuild_mark(io, volume.path)
    clean = volume.take_clean_mark() and not cut_short
    if not clean:
        walked = volume.catalogues.walk(volume.catalogue_directory, found.catalogue_bytes)
        if cut_short or not walked.sound:
            names.merge(parse_namespaces(walked.namespaces))
            return None
    catalogue = volume.open_catalogue(fresh=False, keep_bytes=found.catalogue_bytes)
    if not names.merge(catalogue.namespaces()):
        catalogue.close()
        return None
    return catalogue


def _load(
    volume: Volume, catalogue: OwnedCatalogue, headers: dict[int, FileHeader], slab: Slab
) -> tuple[list[Rows] | None, int]:
    """The rows whose slots exist; the others are removed from the catalogue.

    None when a row is damaged: the slots' headers know all blocks, and a row that is gone would
    cost every block after it in its chain.
    """
    table = catalogue.segments()
    for segment in sorted(volume.segments):
        slot_bytes, state = table.get(segment, (0, SegmentState.USABLE))
        if state is SegmentState.QUARANTINED:
            volume.remove_segment(segment)
        elif segment not in headers or slot_bytes not in (0, headers[segment].slot_bytes):
            # The second: a change of class that failed, or was cut short, when no block was there.
            _mend_header(volume, segment, slot_bytes, slab)
    by_tokens, bad = catalogue.load()
    if bad:
        catalogue.close()
        return None, bad
    classes = np.zeros(slab.segments_max, np.int64)
    for segment, slot_bytes in volume.classes.items():
        classes[segment] = slot_bytes
    kept, strays = [], []
    for rows in by_tokens.values():
        exists = _slot_exists(rows, classes, slab)
        lost = rows[~exists]
        strays += keys_of(lost)
        if len(lost) < len(rows):
            kept.append(rows[exists] if len(lost) else rows)
    if strays and catalogue.commit(Change(removed=strays)) is not None:
        raise StoreError(f"{volume.path} cannot be written; check that device")
    return kept, len(strays)


def _mend_header(volume: Volume, segment: int, slot_bytes: int, slab: Slab) -> None:
    """A segment file whose header is not what it was: the catalogue knows its class, or it goes."""
    try:
        if slot_bytes and slab.fits(slot_bytes):
            volume.rewrite_header(segment, slot_bytes)
            volume.classes[segment] = slot_bytes
            return
    except OSError:
        pass  # It cannot be written: as good as lost.
    volume.remove_segment(segment)


def _slot_exists(rows: Rows, classes: npt.NDArray[np.int64], slab: Slab) -> npt.NDArray[np.bool_]:
    """Whether the slot of each row lies in a segment of its class: bool [n]."""
    inside = rows["segment"] < slab.segments_max
    segments = np.where(inside, rows["segment"], 0).astype(np.int64)
    sizes = rows["slot_pages"].astype(np.int64) * ALIGN
    room = slab.segment_bytes - slab.first_slot_at
    fits = (rows["index"].astype(np.int64) + 1) * sizes <= room
    return np.asarray(inside & (sizes > 0) & (classes[segments] == sizes) & fits)


def _rebuild(
    io: FileIo, volume: Volume, slab: Slab, names: Namespaces, void_below: Callable[[bytes], int]
) -> list[Rows]:
    """A new catalogue from the headers in the volume's slots."""

    def number_of(digest: bytes) -> int | None:
        return names.number(Namespace(digest, b"", ""), NAMESPACES_MAX)

    for segment in sorted(volume.segments):
        if segment not in volume.classes or not slab.fits(volume.classes[segment]):
            volume.remove_segment(segment)
    whole = scan_volume(io, volume, slab, volume.classes, number_of, void_below)
    reach("start.rebuild")
    if whole:
        make_rebuild_mark(io, volume.path)
    catalogue = volume.open_catalogue(fresh=True)
    used = {int(n) for rows in whole for n in np.unique(rows["namespace"])}
    change = Change(
        whole,
        [],
        {segment: (size, SegmentState.USABLE) for segment, size in volume.classes.items()},
        {number: names.by_number[number] for number in used},
    )
    if catalogue.commit(change) is not None:
        raise StoreError(f"the catalogue of {volume.path} cannot be rebuilt; check that device")
    remove_rebuild_mark(io, volume.path)
    volume.journal.open(catalogue)
    return whole


def _restore_slab(volume: Volume, groups: list[Rows], slab: Slab) -> None:
    per = slab.slots_per_segment_max
    slots = [slots_of_rows(rows, per) for rows in groups]
    occupied = np.sort(np.concatenate(slots)) if slots else np.zeros(0, np.int64)
    for rows in groups:
        tokens = rows.dtype["tokens"].shape[0]
        for pages in np.unique(rows["slot_pages"]).tolist():
            size = pages * ALIGN
            volume.row_tokens[size] = max(volume.row_tokens.get(size, 0), tokens)
    for segment, slot_bytes in sorted(volume.classes.items()):
        first, last = np.searchsorted(occupied, [segment * per, (segment + 1) * per])
        volume.restore_segment(segment, slot_bytes)
        slab.restore(segment, slot_bytes, occupied[first:last])


def _refuse_misuse(paths: Sequence[Path], segment_bytes: int, store_id: bytes) -> None:
    if not 1 <= len(paths) <= VOLUMES_MAX:
        raise ConfigError(f"a disk tier has 1 to {VOLUMES_MAX} paths; got {len(paths)}")
    if segment_bytes % ALIGN or segment_bytes < HEADER_BYTES + 2 * ALIGN:
        raise ConfigError(f"a segment is a multiple of {ALIGN} bytes; got {segment_bytes}")
    if len(store_id) != STORE_ID_BYTES:
        raise ConfigError(f"a store id has {STORE_ID_BYTES} bytes")
