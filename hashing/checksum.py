"""XXH3-64 of the runs of a payload: what a loaded byte is checked against."""

import ctypes

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.native import build
from kvstore.native.address import address_of

Payload = npt.NDArray[np.uint8]
Extents = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint64]


def run_checksums(payload: Payload, offsets: Extents, lengths: Extents) -> Checksums:
    """XXH3-64 of each run: uint64 [runs].

    payload: uint8 [bytes], C-contiguous, never changed. offsets, lengths: int64 [runs], in bytes,
    in any order. The native form releases the GIL for the whole call. Raises ValueError for a run
    that does not lie in the payload, before any byte is read.
    """
    _check(payload, offsets, lengths)
    found = np.empty(len(offsets), np.uint64)
    library = build.load()
    if library is None:
        view = payload.data
        for run, (at, size) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            found[run] = xxhash.xxh3_64_intdigest(view[at : at + size])
    else:
        library.kv_xxh3_64_many(
            ctypes.c_void_p(address_of(payload)),
            ctypes.c_void_p(address_of(offsets)),
            ctypes.c_void_p(address_of(lengths)),
            ctypes.c_int64(len(offsets)),
            ctypes.c_void_p(address_of(found)),
        )
    return found


def verify_runs(
    payload: Payload, offsets: Extents, lengths: Extents, expected: npt.NDArray[np.uint64]
) -> int:
    """Check each run of a payload against its checksum, uint64 [runs]; the rest as run_checksums.

    Returns: the index of the first bad run | -1 (all are good).
    """
    if expected.shape != offsets.shape:
        raise ValueError(f"{len(offsets)} runs have as many checksums; got {expected.shape}")
    bad = np.flatnonzero(run_checksums(payload, offsets, lengths) != expected)
    return int(bad[0]) if len(bad) else -1


def _check(payload: Payload, offsets: Extents, lengths: Extents) -> None:
    if payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous:
        raise ValueError("a payload is a C-contiguous uint8 array of one dimension")
    for name, array in (("offsets", offsets), ("lengths", lengths)):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a C-contiguous int64 array of one dimension")
    if offsets.shape != lengths.shape:
        raise ValueError(f"{len(offsets)} offsets do not fit {len(lengths)} lengths")
    # As uint64 a negative number is a huge one, so one comparison finds what is below 0 too.
    size = len(payload)
    unsigned = np.dtype(np.uint64)
    if len(offsets) and (
        int(offsets.view(unsigned).max()) > size
        or bool((lengths.view(unsigned) > (size - offsets).view(unsigned)).any())
    ):
        raise ValueError(f"a run does not lie in the payload of {size} bytes; check the layout")
