# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes, who gets which, and what of them is cached by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trace:
    """Prompts in the order in which they are asked, each after the one before was answered."""

    prompts: Sequence[Sequence[int]]  # of token ids
    prefixes: Sequence[int]  # of each, which beginning it has
    prefix_tokens: int

    @staticmethod
    def of(
        prefixes: int, asked: int, prefix_tokens: int, own_tokens: int, vocabulary: int, seed: int
    ) -> Trace:
        """Each prefix as often, one after another, each time with an end of its own.

        Args:
            prefixes: how many.
            asked: how often each.
            prefix_tokens, own_tokens: of each prompt; the first in full blocks.
            vocabulary: token ids are below it.
            seed: of the tokens.
        """
        rng = np.random.default_rng(seed)
        heads = rng.integers(2, vocabulary, (prefixes, prefix_tokens)).tolist()
        which = [prefix for prefix in range(prefixes) for _ in range(asked)]
        ends = rng.integers(2, vocabulary, (len(which), own_tokens)).tolist()
        prompts = [heads[prefix] + end for prefix, end in zip(which, ends, strict=True)]
        return Trace(prompts, which, prefix_tokens)

    def cached_share(self, replicas: int, shared: bool) -> float:
        """Share of prompt tokens that are found, by round robin, in pools that hold all.

        Args:
            replicas: how many servers there are.
            shared: whether one finds what another has.
        """
        known: list[set[int]] = [set() for _ in range(replicas)]
        found = 0
        for number, prefix in enumerate(self.prefixes):
            here = known[number % replicas]
            found += prefix in (set.union(*known) if shared else here)
            here.add(prefix)
        return found * self.prefix_tokens / sum(map(len, self.prompts))
