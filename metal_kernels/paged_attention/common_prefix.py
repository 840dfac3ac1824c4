# SPDX-License-Identifier: Apache-2.0
"""Finds requests of a step that share their first blocks."""

import numpy as np

#: Keys that the kernels must save by reading a shared prefix once: its length times the reads. This
#: many pay for a dispatch, and for joining its results.
LEAST_SAVED = 4096


def any_shared(tables: np.ndarray) -> bool:
    """Returns whether any requests share their first block; fast, and enough in most steps."""
    firsts = tables[:, 0].copy()
    firsts.sort()
    return bool(np.count_nonzero(firsts[1:] == firsts[:-1]))


def common_prefixes(tables: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups requests that share a prefix; each is in at most one group.

    Args:
        tables: [R, W] int32, blocks of each request in order.
        usable: [R] int, number of leading blocks of each request that may be shared.

    Returns:
        [R] int, each request's group, -1: none; and [G] int, number of blocks each group shares.
    """
    # Greedy, as a request joins one group: among requests with the same first block, the group that
    # saves most (its length times its copies) comes first, then the others are compared again.
    group = np.full(len(tables), -1)
    lengths: list[np.ndarray] = []
    num_common = empty = np.zeros(0, np.int64)
    if any_shared(tables) and usable.max() > 0:
        members, num_common = _sort_by_blocks(tables, usable)
    num_groups = 0
    while num_common.any():
        if (num_common == num_common[0]).all():  # for example one system prompt for all
            group[members] = num_groups
            lengths.append(num_common[:1])
            break
        first, last = _widest(num_common)
        # The best of each run of requests with any common blocks.
        run, saved = (num_common == 0).cumsum(), num_common * (last - first)
        order = np.lexsort((-saved, run))
        runs = run[order]
        starts = np.ones(len(runs), bool)
        starts[1:] = runs[1:] != runs[:-1]
        best = order[starts]
        best = best[saved[best] > 0]
        # From the first member of each group to its last.
        numbers = np.arange(1, len(best) + 1)
        into = np.zeros(len(members) + 1, np.int64)
        into[first[best]] = numbers
        into[last[best] + 1] -= numbers
        number = into[:-1].cumsum()
        grouped = number > 0
        group[members[grouped]] = number[grouped] + num_groups - 1
        num_groups += len(best)
        lengths.append(num_common[best])
        left = np.flatnonzero(~grouped)
        # Blocks in common with the next remaining request.
        num_common = (
            np.minimum.reduceat(num_common[: left[-1]], left[:-1]) if len(left) > 1 else empty
        )
        members = members[left]
    return group, np.concatenate(lengths) if lengths else empty


def _sort_by_blocks(tables: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts R requests by blocks; returns the order, and the blocks each shares with the next."""
    width = int(usable.max())
    # Blocks that may not be shared get unique values.
    own = -1 - np.arange(len(tables), dtype=np.int32)[:, None]
    blocks = np.where(np.arange(width) < usable[:, None], tables[:, :width], own)
    order = blocks.view(f"V{blocks.itemsize * width}").ravel().argsort()
    blocks = blocks[order]
    differ = np.ones((len(blocks) - 1, width + 1), bool)
    np.not_equal(blocks[1:], blocks[:-1], out=differ[:, :width])
    return order, differ.argmax(axis=1)


def _widest(num_common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns first and last member of the widest group that shares `num_common[i]`, for each i."""
    n = len(num_common)
    positions = np.arange(n)
    less = num_common < num_common[:, None]
    previous = np.where(less & (positions < positions[:, None]), positions, -1).max(axis=1)
    following = np.where(less & (positions > positions[:, None]), positions, n).min(axis=1)
    return previous + 1, following
