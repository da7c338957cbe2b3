"""Intervals and ratios of the tables and figures, written by hand: the formulas are short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, variance

__all__ = ["mean_interval", "ratio", "ratio_interval", "t_quantile", "wilson"]

Interval = tuple[float, float]


def wilson(mean: float, n: int, level: float = 0.95) -> Interval:
    """Wilson's interval of a share `mean` among `n` trials. Raises ValueError without trials."""
    if n < 1 or not 0 <= mean <= 1:
        raise ValueError(f"no share: {mean} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half))


@lru_cache(maxsize=1024)
def t_quantile(level: float, df: int) -> float:
    """The t for which Student's distribution of `df` degrees of freedom lies within ±t with probability `level`."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _within(angle: float, df: int) -> float:
    """P(|T| < sqrt(df) * tan(angle)): the finite sums for whole df (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_interval(scores: Sequence[float], level: float = 0.95) -> Interval | None:
    """Interval of the mean of scores in 0..1: Wilson's for right-or-wrong scores, Student's t otherwise.

    Scores that are all equal have no spread to learn from: Wilson's, which is wide enough for any scores in 0..1.
    None without scores.
    """
    n = len(scores)
    if not n:
        return None
    mean = fmean(scores)
    if len(set(scores)) == 1 or all(score in (0, 1) for score in scores):
        return wilson(mean, n, level)
    half = t_quantile(level, n - 1) * math.sqrt(variance(scores) / n)
    return max(0.0, mean - half), min(1.0, mean + half)


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> float | None:
    """Sum over sum; None where there is nothing to divide by."""
    total = math.fsum(bottoms)
    return math.fsum(tops) / total if total > 0 else None


def ratio_interval(tops: Sequence[float], bottoms: Sequence[float], level: float = 0.95) -> Interval | None:
    """Interval of a ratio of sums over paired values, by linearisation; None for fewer than two pairs."""
    n, value = len(tops), ratio(tops, bottoms)
    if value is None or n < 2:
        return None
    rest = [top - value * bottom for top, bottom in zip(tops, bottoms, strict=True)]
    error = math.sqrt(math.fsum(r * r for r in rest) / (n - 1) / n) / fmean(bottoms)
    half = t_quantile(level, n - 1) * error
    return max(0.0, value - half), value + half
