# SPDX-License-Identifier: Apache-2.0
"""Finds which requests of a step begin with the same blocks."""

from collections.abc import Iterator

import numpy as np


def common_prefixes(tables: np.ndarray, usable: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Groups of requests that begin alike; a request is in one group at most.

    Of those that share their first block, the one with the most blocks is compared with the others,
    and a group is as long as pays best: its length times the copies that it saves. Those left over
    are compared anew.

    Args:
        tables: [R, W] int32, blocks of each request in order.
        usable: [R] int, how many of them a group may hold of each; 0: none.

    Yields:
        Indices of two requests or more in ascending order, and the number of blocks they share.
    """
    firsts = np.where(usable > 0, tables[:, 0], -1)
    alike, counts = np.unique(firsts, return_counts=True)
    for first in alike[(counts > 1) & (alike >= 0)]:
        members = np.flatnonzero(firsts == first)
        while len(members) > 1:
            anchor = members[np.argmax(usable[members])]
            width = int(usable[anchor])
            same = tables[members, :width] == tables[anchor, :width]
            same &= np.arange(width) < usable[members, None]
            lengths = np.where(same.all(axis=1), width, same.argmin(axis=1))
            falling = np.sort(lengths)[::-1]
            length = int(falling[np.argmax(falling * np.arange(len(falling)))])
            grouped = lengths >= length
            yield members[grouped], length
            members = members[~grouped]
