"""Score and speed at one context length: a row of dots per method (or subset), where there is no curve to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dllm_bench.reporting.leaderboard import Entry
from dllm_bench.reporting.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

__all__ = ["draw_dots", "is_one_length"]


def is_one_length(curves: Mapping[str, Sequence[Entry]]) -> bool:
    """Whether several curves are one point each, at one length: names beside them would have to be moved far apart."""
    lengths = {row["nominal_ctx"] for entries in curves.values() for entry in entries for row in entry.rows}
    return len(curves) > 1 and len(lengths) == 1 and all(len(entries) == 1 for entries in curves.values())


def draw_dots(part: SubFigure, curves: Mapping[str, Sequence[Entry]], look: Mapping[str, Look]) -> None:
    """Two panels with one row per method, in the order of `look`, the first on top; lines are 95 % intervals."""
    left, right = part.subplots(1, 2, sharey=True)
    names = [name for name in look if name in curves]
    for row, name in enumerate(names):
        (entry,) = curves[name]
        score = None if entry.accuracy is None else 100 * entry.accuracy
        low_high = entry.accuracy_interval
        percents = None if low_high is None else (100 * low_high[0], 100 * low_high[1])
        _dot(left, look[name], row, score, percents)
        _dot(right, look[name], row, entry.useful_tokens_per_second, entry.useful_tokens_per_second_interval)
    left.set_yticks(range(len(names)), [name.replace(" [", "\n[") for name in names], fontsize=7, linespacing=0.95)
    left.set(title="Score, with 95 % interval", xlabel="score in %", xlim=(-4, 104))
    left.set_ylim(len(names) - 0.4, -0.6)
    right.set(title="Speed, with 95 % interval", xlabel="useful tokens per second")
    right.set_xlim(left=0)
    right.tick_params(labelleft=False)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)


def _dot(axes: Axes, look: Look, row: int, value: float | None, interval: tuple[float, float] | None) -> None:
    if value is None:
        return
    if interval is not None:
        axes.hlines([row], [interval[0]], [interval[1]], color=look.colour, alpha=0.4, linewidth=2)
    axes.plot([value], [row], color=look.colour, marker=look.marker, markersize=look.size, markeredgecolor="white",
              markeredgewidth=0.7, zorder=3)  # fmt: skip
