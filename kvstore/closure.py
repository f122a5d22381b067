"""What keeps a tier prefix-closed: which rows may enter it, which may leave, and what goes along.

Pure questions over the columns of `Rows`; `tier` is 0 or 1. Nothing is changed when they return.
"""

import numpy as np
import numpy.typing as npt

from kvstore.rows import NONE, Ints, Rows

Mask = npt.NDArray[np.bool_]


def each_once(rows: Ints) -> None:
    """ValueError if a row is named twice."""
    if len(rows) > 1 and len(set(rows.tolist())) < len(rows):
        raise ValueError("each row may be named only once in a call")


def may_enter(rows: Rows, tier: int, these: Ints) -> Mask:
    """Which rows may enter the tier together: bool [n].

    Not those that are in it, or in no tier at all, or whose parent neither is in it nor enters.
    """
    column, parents = rows.slots[tier], rows.parent[these]
    known = (rows.slots[0][these] >= 0) | (rows.slots[1][these] >= 0)
    enter: Mask = known & (column[these] < 0)
    wanted = these[enter]
    column[wanted] = 0  # As if they were there, so that a child sees its parent.
    while (orphans := enter & (parents >= 0) & (column[parents] < 0)).any():
        column[these[orphans]] = NONE
        enter &= ~orphans
    column[wanted] = NONE
    return enter


def may_leave(rows: Rows, tier: int, these: Ints) -> Mask:
    """Which rows may leave the tier together: bool [n].

    Not those that are not in it, are leased or held, or have a child in it that stays.
    """
    children, parents = rows.children[tier], rows.parent[these]
    leave: Mask = (children[these] >= 0) & ~rows.in_use(these)
    below = parents >= 0
    np.subtract.at(children, parents[leave & below], 1)  # As if all had left.
    while (stays := leave & (children[these] > 0)).any():
        np.add.at(children, parents[stays & below], 1)
        leave &= ~stays
    np.add.at(children, parents[leave & below], 1)
    return leave


def descendants(rows: Rows, tier: int, these: Ints) -> Ints:
    """Rows and all below them that are in the tier, deepest first, each once."""
    children = rows.children[tier].data
    first, following = rows.first_child.data, rows.next_sibling.data
    seen: set[int] = set()
    stack = [row for row in these.tolist() if children[row] >= 0]
    while stack:
        row = stack.pop()
        if row in seen:
            continue
        seen.add(row)
        if children[row] > 0:
            child = first[row]
            while child >= 0:
                if children[child] >= 0:
                    stack.append(child)
                child = following[child]
    return by_depth(rows, np.fromiter(seen, np.int32, len(seen)))[::-1]


def missing_ancestors(rows: Rows, tier: int, these: Ints) -> Ints:
    """Rows and their ancestors that are not in the tier, root first, each once."""
    slots, parents = rows.slots[tier].data, rows.parent.data
    seen: set[int] = set()
    for row in these.tolist():
        at = row
        while at >= 0 and slots[at] < 0 and at not in seen:
            seen.add(at)
            at = parents[at]
    return by_depth(rows, np.fromiter(seen, np.int32, len(seen)))


def by_depth(rows: Rows, these: Ints) -> Ints:
    """Rows, the nearest to the root first."""
    return these[np.argsort(rows.depth[these], kind="stable")]
