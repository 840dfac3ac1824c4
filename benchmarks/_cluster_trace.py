# SPDX-License-Identifier: Apache-2.0
"""Makes traces of requests with shared prefixes, and calculates their cached share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trace:
    """Prompts in the order they are sent, each after the previous answer."""

    prompts: Sequence[Sequence[int]]  # token ids
    prefixes: Sequence[int]  # the prefix of each prompt
    prefix_tokens: int

    @staticmethod
    def of(
        prefixes: int, asked: int, prefix_tokens: int, own_tokens: int, vocabulary: int, seed: int
    ) -> Trace:
        """Makes a trace that uses each prefix equally often, each time with a new suffix.

        Args:
            prefixes: number of prefixes.
            asked: uses of each.
            prefix_tokens, own_tokens: lengths in each prompt; the prefix is in full blocks.
            vocabulary: upper bound of token ids.
            seed: seed of the tokens.
        """
        rng = np.random.default_rng(seed)
        heads = rng.integers(2, vocabulary, (prefixes, prefix_tokens)).tolist()
        which = [prefix for prefix in range(prefixes) for _ in range(asked)]
        ends = rng.integers(2, vocabulary, (len(which), own_tokens)).tolist()
        prompts = [heads[prefix] + end for prefix, end in zip(which, ends, strict=True)]
        return Trace(prompts, which, prefix_tokens)

    def cached_share(self, replicas: int, shared: bool) -> float:
        """Returns the share of prompt tokens found with round robin and unlimited pools.

        Args:
            replicas: number of servers.
            shared: whether servers find each other's blocks.
        """
        known: list[set[int]] = [set() for _ in range(replicas)]
        found = 0
        for number, prefix in enumerate(self.prefixes):
            here = known[number % replicas]
            found += prefix in (set.union(*known) if shared else here)
            here.add(prefix)
        return found * self.prefix_tokens / sum(map(len, self.prompts))
