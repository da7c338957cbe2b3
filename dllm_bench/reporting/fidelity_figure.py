"""The figure of fidelity: how far keys and values drift, and what is not read, per layer and step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError
from dllm_bench.reporting.fidelity import ERRORS, Summary, errors, samples_of
from dllm_bench.reporting.figures import check_ending, style, write
from dllm_bench.reporting.style import noted
from dllm_bench.running.lengths import ctx_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "error_grids", "save"]

_TITLES = (
    *("keys of the prompt", "keys of the response", "values of the prompt", "values of the response"),
    "attention not read",
)
_NOTHING = (*["not held"] * 4, "reads all")
_WIDTH, _ROW_HEIGHT, _EXTRA_HEIGHT = 11.5, 1.45, 0.75
_DECADES = 3  # of the colour scale; smaller errors look like the smallest
_GREY = "#e4e4e4"

Grid = list[list[float | None]]


def save(made: Sequence[Summary], file: Path) -> None:
    """Draws the errors of every method and context into `file`. Raises UserError where there is nothing to draw."""
    check_ending(file)
    with style():
        write(draw(made), file)


def error_grids(summary: Summary) -> list[Grid]:
    """Means over samples of each of ERRORS, [layer][step], all of one shape; empty for what no sample has.

    None where none has one; samples that ended do not count. Of a method that ever leaves keys out, a pass that reads
    all counts as an error of 0.
    """
    passes = [row for sample in samples_of(summary.rows) for row in sample]
    found: list[dict[tuple[int, int], list[float]]] = []
    layers = max((len(row[column] or ()) for row in passes for column in ERRORS), default=0)
    for column in ERRORS:
        values: dict[tuple[int, int], list[float]] = defaultdict(list)
        reads = column == "mass_kept" and any(row[column] is not None for row in passes)
        for row in passes:
            for layer, value in enumerate(errors(row, column) or [0.0] * (layers if reads else 0)):
                if value is not None:
                    values[layer, row["step"]].append(value)
        found.append(values)
    steps = 1 + max((step for values in found for _, step in values), default=-1)
    return [
        [[fmean(values[at]) if (at := (y, x)) in values else None for x in range(steps)] for y in range(layers)]
        if values
        else []
        for values in found
    ]


def draw(made: Sequence[Summary]) -> Figure:
    """A row of heat maps per method and context, all on one logarithmic scale."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    grids = [(one, error_grids(one)) for one in made]
    grids = [(one, maps) for one, maps in grids if any(maps)]
    if not grids:
        raise UserError(
            "there is no error to draw: no method holds keys and values of all positions, or leaves any out"
        )
    apart = len({one.subset for one, _ in grids}) > 1
    names, notes = noted((one.label for one, _ in grids), narrow=True)
    norm = _scale([value for _, maps in grids for grid in maps for line in grid for value in line if value is not None])
    figure = Figure(
        figsize=(_WIDTH, _ROW_HEIGHT * len(grids) + _EXTRA_HEIGHT),
        layout=ConstrainedLayoutEngine(wspace=0.03, hspace=0.05),
    )
    figure.suptitle(_title([one for one, _ in grids]), x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes = figure.subplots(len(grids), len(ERRORS), squeeze=False, sharey="row", sharex="row")
    image: Any = None
    for y, (one, maps) in enumerate(grids):
        for x, grid in enumerate(maps):
            image = _map(axes[y, x], grid, norm, _NOTHING[x]) or image
            if y == 0:
                axes[y, x].set_title(_TITLES[x], fontsize=9)
            if y + 1 == len(grids):
                axes[y, x].set_xlabel("step")
        axes[y, 0].set_ylabel(f"{names[one.label]}{_where(one, apart)}\nlayer", fontsize=8)
    bar = figure.colorbar(image, ax=axes, pad=0.012, aspect=10 + 12 * len(grids), shrink=0.95, extend="min")
    bar.set_label("drift from exact, or share not read;\nmean over samples", fontsize=8)
    bar.outline.set_visible(False)
    _percents(bar.ax)
    if notes:
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8)
    return figure


def _title(made: Sequence[Summary]) -> str:
    """What all rows of the figure are about."""
    names = ("model", "task", "subset")
    values = [{row[name] for one in made for row in one.rows} for name in names]
    return " · ".join(str(one) for value in values if len(value) == 1 for one in value)


def _where(one: Summary, apart: bool) -> str:
    ctx = [] if one.ctx is None else [ctx_name(one.ctx)]
    return f"\n{' '.join([*ctx, one.subset])}" if apart else "".join(f" · {name}" for name in ctx)


def _scale(values: Sequence[float]) -> Any:
    """Logarithmic: early drift is orders of magnitude smaller than late drift."""
    from matplotlib.colors import LogNorm

    top = max(max(values), 1e-9)
    low = max(min((value for value in values if value > 0), default=top), top * 10.0**-_DECADES)
    # the smallest and the largest colour must differ
    return LogNorm(vmin=min(low, top / 10), vmax=top, clip=True)


def _map(axes: Axes, grid: Grid, norm: Any, nothing: str) -> Any:
    """`nothing`: what an empty grid says."""
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor(_GREY)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if not grid:
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="#666666")
        return None
    # no error at all is the smallest colour, not a hole
    numbers = [[math.nan if value is None else max(value, norm.vmin) for value in line] for line in grid]
    return axes.imshow(numbers, cmap="viridis", norm=norm, aspect="auto", interpolation="none", origin="lower")


def _percents(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7.5)
