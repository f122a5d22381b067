"""Media digests of blocks: they tell two images apart whose placeholder tokens are the same."""

from collections.abc import Mapping

import numpy as np

from kvstore.rows import MEDIA, MEDIA_UNSEEN, Ints, Rows
from kvstore.sequence import Sequence


def same_media(rows: Rows, found: Ints, media: Mapping[int, bytes]) -> int:
    """How many leading rows of `found` have exactly the media digests given, by their place.

    Of a row whose digest was not seen yet the key vouches for it, and the header at load.
    """
    with_media = set(np.flatnonzero(rows.flags[found] & MEDIA).tolist())
    for at in sorted(with_media | {at for at in media if at < len(found)}):
        if rows.flags[found[at]] & MEDIA_UNSEEN:
            continue
        if rows.media.get(int(found[at])) != media.get(at):
            return at
    return len(found)


def media_of(sequence: Sequence, first: int, last: int) -> dict[int, bytes] | None:
    """Media digests of blocks first..last-1, by their place from `first`; None for none."""
    if not sequence.media:
        return None
    return {b - first: digest for b, digest in sequence.media.items() if first <= b < last}
