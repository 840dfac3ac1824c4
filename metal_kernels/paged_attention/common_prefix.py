# SPDX-License-Identifier: Apache-2.0
"""Finds which requests of a step begin with the same blocks."""

import numpy as np

#: Keys that the kernels must be spared, at least, by reading a common beginning once: its length
#: times the reads. So many pay for a dispatch, and for joining what it leaves.
LEAST_SAVED = 4096


def any_alike(tables: np.ndarray) -> bool:
    """Whether any requests share their first block, in the time that most steps have for it.

    Args:
        tables: [R, W] int32, blocks of each request in order.
    """
    firsts = tables[:, 0].copy()
    firsts.sort()
    return bool(np.count_nonzero(firsts[1:] == firsts[:-1]))


def common_prefixes(tables: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of two requests or more that begin alike; a request is in one group at most.

    Of those that share their first block, the group comes first that saves most: its length times
    its copies. Those left over are compared anew.

    Args:
        tables: [R, W] int32, blocks of each request in order.
        usable: [R] int, how many of them a group may hold of each; 0: none.

    Returns:
        [R] int, each request's group, -1: none; and [G] int, blocks that each group shares.
    """
    group = np.full(len(tables), -1)
    lengths: list[np.ndarray] = []
    alike = nothing = np.zeros(0, np.int64)
    if any_alike(tables) and usable.max() > 0:
        members, alike = _in_order(tables, usable)
    num_groups = 0
    while alike.any():
        if (alike == alike[0]).all():  # as where all have one system prompt
            group[members] = num_groups
            lengths.append(alike[:1])
            break
        first, last = _widest(alike)
        # The best of each run of requests that begin alike at all.
        run, saved = (alike == 0).cumsum(), alike * (last - first)
        order = np.lexsort((-saved, run))
        runs = run[order]
        starts = np.ones(len(runs), bool)
        starts[1:] = runs[1:] != runs[:-1]
        best = order[starts]
        best = best[saved[best] > 0]
        # Past the first member of each group, and back behind its last.
        numbers = np.arange(1, len(best) + 1)
        into = np.zeros(len(members) + 1, np.int64)
        into[first[best]] = numbers
        into[last[best] + 1] -= numbers
        number = into[:-1].cumsum()
        grouped = number > 0
        group[members[grouped]] = number[grouped] + num_groups - 1
        num_groups += len(best)
        lengths.append(alike[best])
        left = np.flatnonzero(~grouped)
        # In common with the next that is left.
        alike = np.minimum.reduceat(alike[: left[-1]], left[:-1]) if len(left) > 1 else nothing
        members = members[left]
    return group, np.concatenate(lengths) if lengths else nothing


def _in_order(tables: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R] requests so that those which begin alike follow each other, and [R - 1] blocks that each
    has in common with the next."""
    width = int(usable.max())
    # What may not be used is like nobody's.
    own = -1 - np.arange(len(tables), dtype=np.int32)[:, None]
    blocks = np.where(np.arange(width) < usable[:, None], tables[:, :width], own)
    order = blocks.view(f"V{blocks.itemsize * width}").ravel().argsort()
    blocks = blocks[order]
    differ = np.ones((len(blocks) - 1, width + 1), bool)
    np.not_equal(blocks[1:], blocks[:-1], out=differ[:, :width])
    return order, differ.argmax(axis=1)


def _widest(alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last member that have as much in common as a member has with the next."""
    n = len(alike)
    places = np.arange(n)
    less = alike < alike[:, None]
    before = np.where(less & (places < places[:, None]), places, -1).max(axis=1)
    after = np.where(less & (places > places[:, None]), places, n).min(axis=1)
    return before + 1, after
