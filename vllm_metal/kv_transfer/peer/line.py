# SPDX-License-Identifier: Apache-2.0
"""Line: what something takes, as a fixed time and a time for each unit, measured as it goes on."""

from __future__ import annotations

#: What older observations count after one more of the usual size; a smaller one fades them less.
_FADING = 0.95
#: Observations until a line says anything: the first of a kind has costs that no other has.
_LEAST = 2
#: How far beyond the largest amount seen a line is trusted; and an observation by which factor off.
_REACH = 4
#: Amounts differ enough to tell the fixed part from the rest where their variance is this part of
#: their mean square.
_LEAST_SPREAD = 0.01


class Line:
    """Seconds as `fixed + each * amount`, by least squares; older observations fade.

    Errors count by the part that they are of the whole, as noise does. So many short transfers do
    not spoil a link's rate: they show in the fixed part, which is what round trips and waits for
    steps come to. While the amounts hardly differ, all of the time counts as proportional, but
    another amount is a surprise only if no fixed part explains it.
    """

    def __init__(self, enough: float) -> None:
        """
        Args:
            enough: who has seen such an amount can tell what any larger one takes.
        """
        self._enough = enough
        self.forget()

    def forget(self) -> None:
        """Begins again."""
        self._count = self._surprises = 0
        self._largest = 0.0
        self._sum = self._squares = 0.0  # of amounts
        # Sums of 1, x, y, x * x and x * y, each divided by the square of the seconds expected.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, amount: float, seconds: float) -> None:
        """Takes in an observation; both are above 0.

        One that is far off is left out. A second one in a row says that things are not as they
        were: then all of before is forgotten.
        """
        expected = self._expected(amount, seconds)
        if max(expected, seconds) > _REACH * min(expected, seconds):
            self._surprises += 1
            if self._surprises < _LEAST:
                return
            self.forget()
            expected = seconds
        self._surprises = 0
        usual = self._squares / self._sum if self._sum else amount
        fading = 1.0 - (1.0 - _FADING) * min(1.0, amount / usual)
        self._sum = fading * self._sum + amount
        self._squares = fading * self._squares + amount * amount
        weight = 1.0 / (expected * expected)
        terms = (1.0, amount, seconds, amount * amount, amount * seconds)
        self._sums = tuple(
            fading * before + weight * new for before, new in zip(self._sums, terms, strict=True)
        )
        self._count += 1
        self._largest = max(self._largest, amount)

    def knows(self, amount: float) -> bool:
        """Whether it has seen enough to say what an amount takes."""
        return self._count >= _LEAST and self._largest >= min(amount / _REACH, self._enough)

    @property
    def each(self) -> float:
        """Seconds for each unit; 0 where nothing was observed."""
        return self._parts()[1]

    def at(self, amount: float) -> float:
        """Returns the seconds that an amount takes; 0 where nothing was observed."""
        fixed, each = self._parts()
        return fixed + each * amount

    def _expected(self, amount: float, seconds: float) -> float:
        """Returns the seconds that an amount should have taken.

        Amounts that hardly differ leave the fixed part open, from nothing to all of the time: of
        what that makes possible it is the nearest to the observed seconds.
        """
        if not self.knows(amount):
            return seconds
        mean_x, mean_y, _, _, spread = self._moments()
        if spread:
            return self.at(amount)
        least, most = sorted((mean_y, mean_y * amount / mean_x))
        return min(max(seconds, least), most)

    def _parts(self) -> tuple[float, float]:
        """Fixed seconds, and those for each unit."""
        if not self._count:
            return 0.0, 0.0
        mean_x, mean_y, mean_xx, mean_xy, spread = self._moments()
        if not spread:
            return 0.0, mean_y / mean_x
        # Where noise makes it fall, it is taken as level: too low a guess is tried, and put right.
        each = max(0.0, (mean_xy - mean_x * mean_y) / spread)
        fixed = mean_y - each * mean_x
        return (fixed, each) if fixed >= 0.0 else (0.0, mean_xy / mean_xx)

    def _moments(self) -> tuple[float, float, float, float, float]:
        """Means of x, y, x * x and x * y, and the variance of x; 0 where it tells nothing."""
        mean_x, mean_y, mean_xx, mean_xy = (each / self._sums[0] for each in self._sums[1:])
        spread = mean_xx - mean_x * mean_x
        if spread < _LEAST_SPREAD * mean_xx:
            spread = 0.0
        return mean_x, mean_y, mean_xx, mean_xy, spread
