"""Figures of stored results: score and speed against the actual context, and where needles are found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError, nearest
from dllm_bench.reporting.dots import draw_dots, is_one_length
from dllm_bench.reporting.leaderboard import BASELINE, Cell, Entry, Section
from dllm_bench.reporting.style import Look, looks, noted, spread, stacked
from dllm_bench.running.lengths import ctx_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["ENDINGS", "check_ending", "draw", "needle_grid", "save", "style", "write"]

ENDINGS = (".png", ".svg", ".pdf")
_WIDTH, _LINES_HEIGHT, _MAP_HEIGHT = 10.0, 3.5, 2.5
_HEADS_HEIGHT, _DOT_HEIGHT, _LABEL_HEIGHT, _GAP = 1.0, 0.2, 0.22, 0.3
_MAPS_PER_ROW = 4
_DEPTH_BINS = 10
_NAMED_SUBSETS = 3  # more of them are counted in a title
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.hashsalt": "dllm-bench",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class _Block:
    """The curves of one setting: method (or subset, where there is one method) -> entries by context."""

    title: str
    curves: dict[str, list[Entry]]
    notes: list[str]
    """What marks behind the labels mean."""


def check_ending(file: Path) -> None:
    """Raises UserError for a file whose ending names no picture format."""
    if file.suffix.lower() not in ENDINGS:
        near = nearest(file.suffix, ENDINGS) or ENDINGS[0]
        raise UserError(f"'{file}' must end in {', '.join(ENDINGS)}: did you mean '{file.with_suffix(near).name}'?")


def save(sections: Sequence[Section], file: Path) -> None:
    """Draws `sections` into `file`. Raises UserError for an ending that is not among ENDINGS, or without curves."""
    check_ending(file)
    with style():
        write(draw(sections), file)


def style() -> AbstractContextManager[None]:
    """The look of all figures, while they are drawn and written."""
    import matplotlib as mpl

    context: AbstractContextManager[None] = mpl.rc_context(_STYLE)
    return context


def write(figure: Figure, file: Path) -> None:
    """Writes a figure; the same results give the same file, so it has no date."""
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix.lower())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=200, metadata=metadata, facecolor="white")
    except OSError as error:
        raise UserError(f"cannot write '{file}' ({error.strerror or error}): name another --out") from error


def draw(sections: Sequence[Section]) -> Figure:
    """The figure: per setting a row with score and speed, and rows of heat maps where there are needles."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    blocks = [block for section in sections for block in _blocks(section)]
    if not blocks:
        raise UserError("there is nothing to draw: no stored sample has a context length")
    look = looks((label for block in blocks for label in block.curves), BASELINE)
    heights = [_lines_height(block) + _MAP_HEIGHT * _map_rows(block) for block in blocks]
    gap = _GAP / sum(heights)  # the engine takes a share of the whole figure, however many blocks it has
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout=ConstrainedLayoutEngine(wspace=0.04, hspace=gap))
    parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
    for part, block in zip(parts[:, 0], blocks, strict=True):
        _draw_block(part, block, look)
    return figure


def _blocks(section: Section) -> list[_Block]:
    labels = {entry.label for cell in section.cells for entry in cell.entries}
    apart = len(section.subsets) > 1 and all(cell.subset is not None for cell in section.cells)
    if apart and len(labels) == 1:
        return _block_of_subsets(section, *labels)
    by_subset: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in section.cells:
        by_subset[cell.subsets].append(cell)  # one curve never joins contexts with other subsets
    made = []
    for names, cells in by_subset.items():
        curves: dict[str, list[Entry]] = defaultdict(list)
        for cell in cells:
            for entry in cell.entries:
                curves[entry.label].append(entry)
        subsets = ", ".join(names) if len(names) <= _NAMED_SUBSETS else f"{len(names)} subsets"
        made += _block(f"{section.setting.title} · {subsets}", curves)
    return made


def _block_of_subsets(section: Section, label: str) -> list[_Block]:
    """A curve per subset, where one method ran in one way, called `label`."""
    curves: dict[str, list[Entry]] = defaultdict(list)
    for cell in section.cells:
        curves[str(cell.subset)] += cell.entries
    names, notes = noted([label])
    return _block(f"{section.setting.title} · {names[label]}", curves, notes)


def _block(title: str, curves: Mapping[str, Sequence[Entry]], notes: Sequence[str] = ()) -> list[_Block]:
    """The block of these curves, where one of them has a length to stand at. `notes`: what marks in the title mean."""
    known = {label: [entry for entry in entries if entry.actual_ctx is not None] for label, entries in curves.items()}
    known = {label: entries for label, entries in known.items() if entries}
    if not known:
        return []
    names, marks = noted(known)
    named = {names[label]: entries for label, entries in known.items()}
    return [_Block(title, named, [*notes, *marks, *_caveats(named)])]


def _caveats(curves: Mapping[str, Sequence[Entry]]) -> list[str]:
    """What the panels do not show: unequal numbers of samples, and work outside of decoding."""
    sizes: dict[int, int] = {}
    for entry in chain.from_iterable(curves.values()):
        ctx = entry.rows[0]["nominal_ctx"] or 0
        sizes[ctx] = max(sizes.get(ctx, 0), entry.n)
    told = []
    if len(set(sizes.values())) > 1:
        told.append("samples: " + ", ".join(f"{n} at {ctx_name(ctx)}" for ctx, n in sorted(sizes.items())))
    shared = [name for name, entries in curves.items() if any(e.preparation_seconds is not None for e in entries)]
    if shared:
        told.append(f"speed leaves out making the state that samples share: {', '.join(sorted(shared))}")
    return told


def _draw_block(part: SubFigure, block: _Block, look: dict[str, Look]) -> None:
    part.suptitle(block.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    if block.notes:
        part.supxlabel("\n".join(block.notes), x=0.01, ha="left", fontsize=8)
    maps = _maps(block)
    if not maps:
        _draw_lines(part, block, look)
        return
    halves = part.subfigures(2, 1, height_ratios=[_lines_height(block), _MAP_HEIGHT * _map_rows(block)], squeeze=False)
    _draw_lines(halves[0, 0], block, look)
    _draw_maps(halves[1, 0], maps)


def _lines_height(block: _Block) -> float:
    """Many rows of dots, or many names behind lines, need more than a pair of panels has."""
    each = _DOT_HEIGHT if is_one_length(block.curves) else _LABEL_HEIGHT
    return max(_LINES_HEIGHT, _HEADS_HEIGHT + each * sum(stacked(name).count("\n") + 1 for name in block.curves))


def _draw_lines(part: SubFigure, block: _Block, look: dict[str, Look]) -> None:
    if is_one_length(block.curves):
        draw_dots(part, block.curves, look)
        return
    left, right = part.subplots(1, 2)
    alpha = min(0.15, 0.4 / len(block.curves))
    for label in look:
        if label in block.curves:
            entries = block.curves[label]
            _line(left, look[label], [(e.actual_ctx, _percent(e.accuracy), _percents(e)) for e in entries], alpha)
            speeds = [(e.actual_ctx, e.useful_tokens_per_second, e.useful_tokens_per_second_interval) for e in entries]
            _line(right, look[label], speeds, alpha)
    left.set(title="Score, with 95 % interval", ylabel="score in %", ylim=(-4, 104))
    right.set(title="Speed, with 95 % interval", ylabel="useful tokens per second")
    _speed_axis(right, [e for entries in block.curves.values() for e in entries])
    contexts = [e.actual_ctx for entries in block.curves.values() for e in entries if e.actual_ctx]
    for axes in (left, right):
        _context_axis(axes, contexts)
    _labels(left, {name: [(e.actual_ctx, _percent(e.accuracy)) for e in es] for name, es in block.curves.items()}, look)
    speed = {name: [(e.actual_ctx, e.useful_tokens_per_second) for e in es] for name, es in block.curves.items()}
    _labels(right, speed, look)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _percents(entry: Entry) -> tuple[float, float] | None:
    interval = entry.accuracy_interval
    return None if interval is None else (100 * interval[0], 100 * interval[1])


def _line(axes: Axes, look: Look, points: Sequence[tuple[Any, Any, Any]], alpha: float) -> None:
    """A line through (x, y, interval); a point without y is left out, one without an interval has no band."""
    known = [point for point in points if point[1] is not None]
    if not known:
        return
    xs, ys = [p[0] for p in known], [p[1] for p in known]
    axes.plot(
        xs, ys, look.line, color=look.colour, marker=look.marker, markersize=look.size, markeredgecolor="white",
        markeredgewidth=0.7, linewidth=1.6, zorder=3,
    )  # fmt: skip
    bands = [(x, *interval) for x, _, interval in known if interval is not None]
    if len(bands) > 1:
        x, low, high = zip(*bands, strict=True)
        axes.fill_between(x, low, high, color=look.colour, alpha=alpha, linewidth=0)
    elif bands:
        x, low, high = bands[0]
        axes.vlines([x], [low], [high], color=look.colour, alpha=0.4, linewidth=2)


def _context_axis(axes: Axes, contexts: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    low, high = math.log2(min(contexts)), math.log2(max(contexts))
    pad = max(0.25, 0.04 * (high - low))
    ticks = [2**power for power in range(math.floor(low - pad), math.ceil(high + pad) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [ctx_name(tick) for tick in ticks])
    axes.set_xlim(2 ** (low - pad), 2 ** (high + pad))
    axes.set_xlabel("actual context in tokens")


def _speed_axis(axes: Axes, entries: Sequence[Entry]) -> None:
    """Linear from zero, or logarithmic where speeds differ more than tenfold."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    speeds = [e.useful_tokens_per_second for e in entries if e.useful_tokens_per_second]
    if not speeds or max(speeds) <= 10 * min(speeds):
        axes.set_ylim(bottom=0, top=1.15 * max(speeds, default=1.0))
        return
    axes.set_yscale("log")
    axes.set_ylim(min(speeds) / 1.5, max(speeds) * 1.5)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _labels(axes: Axes, curves: dict[str, list[tuple[Any, Any]]], look: dict[str, Look]) -> None:
    """Names at the right of the lines, moved apart, with a thin thread to each line's last point."""
    ends = {}
    for name, points in curves.items():
        known = [point for point in points if point[1] is not None]
        if known:
            ends[name] = known[-1]
    names = list(ends)
    texts = [stacked(name) for name in names]
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [min(1.0, max(0.0, float(to_axes.transform(ends[name])[1]))) for name in names]
    places = spread(wanted, [0.05 * (text.count("\n") + 1) + 0.012 for text in texts])
    for name, text, place in zip(names, texts, places, strict=True):
        colour = look[name].colour
        axes.annotate(
            text, ends[name], (1.04, place), textcoords=axes.transAxes, va="center", ha="left", fontsize=8,
            color=colour, annotation_clip=False, linespacing=0.95,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 4,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


@dataclass(frozen=True)
class NeedleGrid:
    """Mean score in percent by depth bin (top to bottom) and context (left to right); None without samples."""

    contexts: tuple[int, ...]
    edges: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


def needle_grid(entries: Sequence[Entry]) -> NeedleGrid | None:
    """The grid of one method's entries; a sample with several needles counts in the bin of each. None without any."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in (row for entry in entries for row in entry.rows):
        if row["score"] is not None and row["nominal_ctx"] is not None:
            for depth in row["needle_depths"] or ():
                bin_ = min(_DEPTH_BINS - 1, max(0, int(depth * _DEPTH_BINS / 100)))
                found[bin_, row["nominal_ctx"]].append(100 * row["score"])
    if not found:
        return None
    contexts = tuple(sorted({ctx for _, ctx in found}))
    values = tuple(
        tuple(fmean(found[b, ctx]) if (b, ctx) in found else None for ctx in contexts) for b in range(_DEPTH_BINS)
    )
    return NeedleGrid(contexts, tuple(100 * b / _DEPTH_BINS for b in range(_DEPTH_BINS + 1)), values)


def _maps(block: _Block) -> dict[str, NeedleGrid]:
    order = sorted(block.curves, key=lambda label: (block.curves[label][0].method != BASELINE, label))
    grids = {label: needle_grid(block.curves[label]) for label in order}
    return {label: grid for label, grid in grids.items() if grid is not None}


def _map_rows(block: _Block) -> int:
    return math.ceil(len(_maps(block)) / _MAPS_PER_ROW)


def _draw_maps(part: SubFigure, maps: dict[str, NeedleGrid]) -> None:
    columns = min(_MAPS_PER_ROW, max(2, len(maps)))
    rows = math.ceil(len(maps) / columns)
    grid = part.subplots(rows, columns, squeeze=False, sharey=True)
    image: Any = None
    contexts = tuple(sorted({ctx for one in maps.values() for ctx in one.contexts}))
    for place, axes in enumerate(grid.flat):
        if place >= len(maps):
            axes.set_axis_off()
            continue
        label = list(maps)[place]
        image = _draw_map(axes, maps[label], contexts)
        axes.set_title(stacked(label, 26), fontsize=8.5)
        if place % columns == 0:
            axes.set_ylabel("needle depth in %")
    bar = part.colorbar(image, ax=grid, shrink=0.9, pad=0.01, aspect=25)
    bar.set_label("score in %, grey: no sample")
    bar.outline.set_visible(False)


def _draw_map(axes: Axes, grid: NeedleGrid, contexts: Sequence[int]) -> Any:
    values = [
        [row[grid.contexts.index(ctx)] if ctx in grid.contexts else None for ctx in contexts] for row in grid.values
    ]
    numbers = [[math.nan if value is None else value for value in row] for row in values]
    image = axes.imshow(numbers, cmap="viridis", vmin=0, vmax=100, aspect="auto", interpolation="none")
    axes.set_facecolor("#d9d9d9")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5)
    axes.set_xticks(range(len(contexts)), [ctx_name(ctx) for ctx in contexts])
    axes.set_yticks([i - 0.5 for i in range(0, len(grid.edges), 2)], [f"{e:.0f}" for e in grid.edges[::2]])
    if len(contexts) <= 8:
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if value is not None:
                    colour = "black" if value > 60 else "white"
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    return image
