"""Sizing a haystack to the token: as many whole units as fit, and a part of one more where that is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

__all__ = ["FILL", "Asked", "fit", "fit_part", "fit_units"]

FILL = 0.98
"""Share of the context length that a sample has to fill: prompt ids and generation budget."""


@dataclass(frozen=True)
class Asked:
    """The sample that is asked for."""

    subset: str
    index: int
    ctx: int
    gen_length: int
    seed: int

    @property
    def limit(self) -> int:
        """Most ids that a prompt may have."""
        return self.ctx - self.gen_length

    @property
    def least(self) -> int:
        """Fewest ids that a prompt should have."""
        return ceil(FILL * self.ctx) - self.gen_length


def fit(
    size: Callable[[int, str], int], spare: Callable[[int, int], str], *, guess: int, limit: int, least: int
) -> tuple[int, str] | None:
    """Number of units and the part of a further unit with which the size lies in [least, limit].

    Whole units alone are preferred; the further unit is cut between words, and inside a word only where words are too
    coarse. The size never exceeds `limit`; it falls below `least` only where a single character is too coarse.

    Args:
        size: tokens of the prompt with n units and a cut unit ("" for none).
        spare: text to cut, given n and the tokens left.
        guess: where the search for n begins.
    Returns:
        None where not even an empty haystack fits.
    """
    n = fit_units(lambda count: size(count, ""), guess=guess, limit=limit, close=(limit - least) // 4)
    reached = size(n, "")
    if reached > limit:
        return None
    if reached >= least:
        return n, ""
    return n, fit_part(lambda text: size(n, text), spare(n, limit - reached), limit, least)


def fit_units(size: Callable[[int], int], *, guess: int, limit: int, close: int) -> int:
    """Largest n with size(n) <= limit, or one that comes as close as `close` tokens; 0 where none fits.

    Interpolates inside a bracket that shrinks with each try, so it ends even where sizes do not grow steadily.
    """
    fits, over = 0, None
    n, previous = max(0, guess), None
    while True:
        reached = size(n)
        if reached <= limit:
            fits = n
            # a unit has at least one token, so more units than tokens mean a count that does not grow
            if limit - reached <= close or n > limit:
                return n
        else:
            over = n
        if over is not None and over <= fits + 1:
            return fits
        slope = 1.0
        if previous is not None and previous[0] != n:
            slope = max(1.0, (reached - previous[1]) / (n - previous[0]))
        elif n:
            slope = max(1.0, reached / n)
        previous = (n, reached)
        step = int((limit - reached) / slope) if reached <= limit else -int((reached - limit) / slope) - 1
        n = max(fits + 1, n + step)
        if over is not None:
            n = min(n, over - 1)


def fit_part(size: Callable[[str], int], text: str, limit: int, least: int) -> str:
    """The longest beginning of a text with size <= limit, cut between words; inside a word where that is below `least`.

    The empty text has to fit.
    """
    words = text.split(" ")
    count = _largest(len(words), lambda k: size(" ".join(words[:k])) <= limit)
    part = " ".join(words[:count])
    if count == len(words) or size(part) >= least:
        return part
    longer = part + " " * (count > 0) + words[count]
    shortest = len(longer) - len(words[count])
    letters = _largest(len(words[count]), lambda k: size(longer[: shortest + k]) <= limit)
    return longer[: shortest + letters] if letters else part


def _largest(count: int, fits: Callable[[int], bool]) -> int:
    """Largest k in 0..count that fits, where 0 is known to."""
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
