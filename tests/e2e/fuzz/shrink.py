# SPDX-License-Identifier: Apache-2.0
"""Reduces a failing run to a small part that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from e2e.fuzz.traffic import SIMPLER, Run, cut

MOST_REPLAYS = 40


@dataclass(frozen=True)
class Part:
    """A part of a run: requests `only`, by index, `without` the features named in SIMPLER."""

    seed: int
    only: tuple[int, ...]
    without: tuple[str, ...] = ()

    def of(self, run: Run) -> Run:
        """Returns this part of the run."""
        return cut(run, self.only, self.without)


def shrink(
    run: Run,
    fails: Callable[[Run], bool],
    suspect: int | None = None,
    most_replays: int = MOST_REPLAYS,
) -> Part:
    """Returns the smallest failing part found with `most_replays` replays.

    First removes large groups of requests, then features of all remaining ones, then single
    requests (Zeller, Hildebrandt: Simplifying and isolating failure-inducing input,
    2002, complement steps).

    Args:
        run: a failing run.
        fails: returns whether a part fails in the same way.
        suspect: the request that was wrong.
    """
    search = _Search(run, fails, most_replays)
    if suspect is not None:
        # alone, or with earlier requests
        _ = search.keep([suspect]) or search.keep([i for i in search.part.only if i <= suspect])
    search.fewer_requests(coarsest=2, finest=4)
    search.simpler(list(SIMPLER))
    search.fewer_requests(coarsest=2, finest=len(run.requests))
    return search.part


class _Search:
    """The smallest failing part so far, and the remaining replays."""

    def __init__(self, run: Run, fails: Callable[[Run], bool], replays: int) -> None:
        self.part = Part(run.seed, tuple(request.index for request in run.requests))
        self._run, self._fails, self._replays = run, fails, replays
        self._tried: set[Part] = set()

    def keep(self, only: Sequence[int]) -> bool:
        """Returns whether these requests alone fail."""
        return len(only) < len(self.part.only) and self._try(replace(self.part, only=tuple(only)))

    def simpler(self, names: list[str]) -> None:
        """Removes as many of these features as possible: all, or either half."""
        without = (*self.part.without, *names)
        if self._try(replace(self.part, without=without)) or len(names) == 1:
            return
        half = len(names) // 2
        self.simpler(names[:half])
        self.simpler(names[half:])

    def fewer_requests(self, coarsest: int, finest: int) -> None:
        """Removes requests in groups, from a `coarsest` to a `finest` fraction."""
        parts = coarsest
        while len(self.part.only) > 1:
            size = -(-len(self.part.only) // parts)
            for portion in _portions(self.part.only, size):
                self.keep([index for index in self.part.only if index not in portion])
            if size == 1 or parts >= finest:
                return
            parts *= 2

    def _try(self, part: Part) -> bool:
        if self._replays == 0 or not part.only or part in self._tried:
            return False
        self._replays -= 1
        self._tried.add(part)
        if self._fails(part.of(self._run)):
            self.part = part
            return True
        return False


def _portions(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
