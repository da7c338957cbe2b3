"""From fidelity rows to numbers: agreement, divergence, drift, and what a filter kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from dllm_bench.running.lengths import ctx_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "COLUMNS_READ",
    "DRIFTS",
    "ERRORS",
    "TOLERANCE",
    "Summary",
    "errors",
    "first_error",
    "print_table",
    "samples_of",
    "summaries",
]

Row = Mapping[str, Any]

DRIFTS = ("key_drift_prompt", "key_drift_response", "value_drift_prompt", "value_drift_response")
"""Columns with one relative distance per layer."""

ERRORS = (*DRIFTS, "mass_kept")
"""Columns that tell, per layer, what a method has wrong: what it holds, and what it does not read."""

TOLERANCE = 0.01
"""Relative drift, or share of the attention that is not read, from which on the table says where it begins."""

_CELL = ("nominal_ctx", "subset", "method_label")
_SETTING = ("model", "model_fingerprint", "dtype", "device_type", "decode_settings", "task_options", "method_options")
COLUMNS_READ = (
    *("key", "status", "error", "step", "block_step", "task", "seed", "package_version", *_CELL, *_SETTING),
    *("tokens_compared", "tokens_agreeing", "first_divergent_step", "candidates", "kl_mean", "kl_max"),
    *(*DRIFTS, "mass_kept", "needles_kept"),
)
"""Columns of the store that the table and the figure read."""

_ABSENT = "–"


@dataclass(frozen=True)
class Summary:
    """One method at one context length.

    Attributes:
        samples: compared ones. failed: those that could not be.
        agreement: tokens that agree with the uncached trajectory, of all that were compared.
        first_divergent_step: median over samples; infinite where most never diverge.
        kl_mean, kl_max: over all candidates of all passes.
        drift_prompt, drift_response: of the deepest layer behind the last pass, the larger one of keys and values; mean
            over samples.
        drift_start, unread_start: where drift, and attention that is not read, of more than TOLERANCE begin, as (layer,
            step): the earliest of all samples.
        mass_kept, needles_kept: mean over the passes and layers that read a selection.
        rows: its rows.
    """

    label: str
    ctx: int | None
    subset: str
    samples: int
    failed: int
    agreement: float | None
    first_divergent_step: float | None
    kl_mean: float | None
    kl_max: float | None
    drift_prompt: float | None
    drift_response: float | None
    drift_start: tuple[int, int] | None
    unread_start: tuple[int, int] | None
    mass_kept: float | None
    needles_kept: float | None
    rows: tuple[Row, ...]


def samples_of(rows: Iterable[Row]) -> list[list[Row]]:
    """The passes of each sample, in order; rows of failed samples are left out."""
    by_key: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            by_key[row["key"]].append(row)
    return [sorted(passes, key=lambda row: row["step"]) for passes in by_key.values()]


def errors(row: Row, column: str) -> list[float | None]:
    """One of ERRORS, per layer: a relative drift, or the share of attention that is not read, 0 where all is."""
    values = row[column] or ()
    return [0.0 if v is None else 1.0 - v for v in values] if column == "mass_kept" else list(values)


def first_error(rows: Iterable[Row], tolerance: float, columns: Sequence[str] = ERRORS) -> tuple[int, int] | None:
    """Where errors begin: (layer, step) of the first step in which a layer's keys or values are further than
    `tolerance` from the exact ones, or more than that of its attention is not read, and of the lowest such layer:
    those above it inherit its error. `columns`: those of ERRORS that count. None: nowhere."""
    found = [
        (row["step"], layer)
        for row in rows
        if row["status"] == "ok"
        for name in columns
        for layer, value in enumerate(errors(row, name))
        if value is not None and value > tolerance
    ]
    if not found:
        return None
    step, layer = min(found)
    return layer, step


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """One per context length, subset and method; methods whose rows differ in more than that are told apart."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in (*_CELL, *_SETTING))].append(row)
    order = sorted(groups, key=lambda g: (g[0] is not None, g[0] or 0, g[1]))
    return [_summary(groups[group]) for group in order]


def _summary(rows: Sequence[Row]) -> Summary:
    samples = samples_of(rows)
    firsts = [passes[0] for passes in samples]
    compared = sum(row["tokens_compared"] for row in firsts)
    steps = [math.inf if r["first_divergent_step"] is None else r["first_divergent_step"] for r in firsts]
    passes = [row for sample in samples for row in sample]
    counted = [(row["kl_mean"], row["candidates"]) for row in passes if row["kl_mean"] is not None]
    candidates = sum(number for _, number in counted)
    return Summary(
        label=rows[0]["method_label"],
        ctx=rows[0]["nominal_ctx"],
        subset=rows[0]["subset"],
        samples=len(samples),
        failed=len({row["key"] for row in rows if row["status"] != "ok"}),
        agreement=sum(row["tokens_agreeing"] for row in firsts) / compared if compared else None,
        first_divergent_step=median(steps) if steps else None,
        kl_mean=sum(mean * number for mean, number in counted) / candidates if candidates else None,
        kl_max=max((row["kl_max"] for row in passes if row["kl_max"] is not None), default=None),
        drift_prompt=_mean(_last_drift(sample, "prompt") for sample in samples),
        drift_response=_mean(_last_drift(sample, "response") for sample in samples),
        drift_start=first_error(rows, TOLERANCE, DRIFTS),
        unread_start=first_error(rows, TOLERANCE, ("mass_kept",)),
        mass_kept=_mean(value for row in passes for value in row["mass_kept"] or ()),
        needles_kept=_mean(value for row in passes for value in row["needles_kept"] or ()),
        rows=tuple(rows),
    )


def _place(start: tuple[int, int] | None) -> str:
    return _ABSENT if start is None else f"{start[0]}, {start[1]}"


def _last_drift(sample: Sequence[Row], part: str) -> float | None:
    both = [sample[-1][f"{kind}_drift_{part}"] for kind in ("key", "value")]
    deepest = [values[-1] for values in both if values and values[-1] is not None]
    return max(deepest, default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


@dataclass(frozen=True)
class _Column:
    """A column of numbers: `rank` 0 is never left out, higher ranks are the first to go where there is no room."""

    head: str
    value: Callable[[Summary], str]
    rank: int = 0


_COLUMNS = (
    _Column("tokens\nagree %", lambda s: _percent(s.agreement)),
    _Column("differs\nat step", lambda s: _step(s.first_divergent_step), 1),
    _Column("KL\nmean", lambda s: _small(s.kl_mean)),
    _Column("KL\nmax", lambda s: _small(s.kl_max), 3),
    _Column("drift %\nprompt", lambda s: _percent(s.drift_prompt), 1),
    _Column("drift %\nresp.", lambda s: _percent(s.drift_response), 2),
    _Column("drift\nfrom", lambda s: _place(s.drift_start)),
    _Column("unread\nfrom", lambda s: _place(s.unread_start)),
    _Column("mass\nkept %", lambda s: _percent(s.mass_kept), 1),
    _Column("needles\nkept %", lambda s: _percent(s.needles_kept)),
)
_LEVELS = ((3, False), (3, True), (2, True), (1, True), (0, True))
"""What is tried until it fits: the highest rank shown, and whether names of methods are stacked."""


def print_table(made: Sequence[Summary], console: Console) -> None:
    """The closing table. Names of methods are stacked, then columns left out, until it fits the console."""
    from rich.measure import Measurement

    for highest, stacked in _LEVELS:
        built = _table(made, highest, stacked)
        wide = console.options.update(max_width=10_000)
        if (highest, stacked) == _LEVELS[-1] or Measurement.get(console, wide, built).maximum <= console.width:
            break
    console.print(built)


def _table(made: Sequence[Summary], highest: int, stacked: bool) -> Table:
    """Columns without a number are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dllm_bench.reporting.style import noted

    names, notes = noted((s.label for s in made), narrow=stacked)
    built = Table(
        box=box.SIMPLE_HEAD,
        title="Against the uncached trajectory",
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        caption=Text("\n".join([*notes, *_caption(made, highest)])),
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    cells = [(s.ctx, s.subset) for s in made]
    first = [i == 0 or cells[i] != cells[i - 1] for i in range(len(made))]
    ctxs = [_ABSENT if ctx is None else ctx_name(ctx) for ctx, _ in cells]
    lead = [("ctx", _where(ctxs, first))]
    if len({subset for _, subset in cells}) > 1:
        lead.append(("subset", _where([subset for _, subset in cells], first)))
    lead.append(("method", [names[s.label] for s in made]))
    lead.append(("n", [str(s.samples) for s in made]))
    if any(s.failed for s in made):
        lead.append(("failed", [str(s.failed) for s in made]))
    columns = [(c.head, [c.value(one) for one in made]) for c in _COLUMNS if c.rank <= highest]
    columns = [*lead, *((head, texts) for head, texts in columns if set(texts) != {_ABSENT})]
    for head, _ in columns:
        built.add_column(head, justify="left" if head in ("method", "subset") else "right", no_wrap=True)
    for i in range(len(made)):
        last = i + 1 == len(made) or first[i + 1]
        built.add_row(*(Text(texts[i]) for _, texts in columns), end_section=last)
    return built


def _where(texts: Sequence[str], first: Sequence[bool]) -> list[str]:
    """Told once where it is the same for the rows below."""
    return [text if here else "" for text, here in zip(texts, first, strict=True)]


def _caption(made: Sequence[Summary], highest: int) -> Iterator[str]:
    if highest >= 1:
        yield "differs: median over samples of the first pass with other commits, from 0"
    yield "KL of the window's distributions from the exact ones on the same canvas, in nats"
    if highest >= 1 and any(s.drift_prompt is not None or s.drift_response is not None for s in made):
        yield "drift of the deepest layer behind the last pass, the larger one of keys and values"
    if any(s.drift_start is not None or s.unread_start is not None for s in made):
        yield (
            f"from: layer, step (counted from 0) where first keys or values are more than {TOLERANCE:.0%} off, more "
            "than that of the exact attention is not read"
        )
    if any(s.mass_kept is not None for s in made):
        mass = "mass of the exact attention, " * (highest >= 1)
        yield f"kept: {mass}needles' tokens (mean over heads) that a pass reads; in passes that read a selection"
    steps = [row["block_step"] for s in made for row in s.rows if row["block_step"] is not None]
    if steps and not any(steps):
        yield "every block took one pass, so nothing was asked of a cache: --tokens-per-pass 1 makes more passes"


def _percent(share: float | None) -> str:
    return _ABSENT if share is None else f"{100 * share:.1f}"


def _step(value: float | None) -> str:
    if value is None:
        return _ABSENT
    return "never" if math.isinf(value) else f"{value:g}"


def _small(value: float | None) -> str:
    return _ABSENT if value is None else "0" if value == 0 else f"{value:.2g}"
