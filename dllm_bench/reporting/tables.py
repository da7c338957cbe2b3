"""The leaderboard as text: rich tables that fit the console, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dllm_bench.reporting.leaderboard import RULES, Cell, Entry, Section
from dllm_bench.reporting.style import noted
from dllm_bench.reporting.style import stacked as stacked_name
from dllm_bench.running.lengths import ctx_name

__all__ = ["describe_decode", "print_sections", "records", "to_csv", "to_json", "to_markdown"]

_ABSENT = "–"
_NAMED_SUBSETS = 2  # more of them are counted in a row, and named below
_USUAL = {
    "remasking": "low_confidence",
    "confidence_dtype": "auto",
    "eos_stop": True,
    "temperature": 0,
    "alg_temp": 0,
    "cfg_scale": 0,
}


@dataclass(frozen=True)
class _Column:
    """A column of numbers: `head` may be stacked; `rank` 0 is never dropped, higher ranks are dropped first."""

    head: str
    value: Callable[[Entry], float | None]
    rank: int = 0
    suffix: str = ""
    most: int = 1


_COLUMNS = (
    _Column("useful\ntok/s", lambda e: e.useful_tokens_per_second, most=2),
    _Column("tok/s w.\nprep.", lambda e: e.amortised_tokens_per_second, 1, most=2),
    _Column("canvas\ntok/s", lambda e: e.canvas_tokens_per_second, 2, most=2),
    _Column("speed-\nup", lambda e: e.speedup, suffix="×", most=2),
    _Column("NFE", lambda e: e.nfe),
    _Column("dense\npasses", lambda e: e.dense_passes, 3),
    _Column("1e3 row-\nlayers", lambda e: _scaled(e.row_layers, 1e-3), 7),
    _Column("pass p50\nms", lambda e: _scaled(e.pass_p50_seconds, 1e3), 4),
    _Column("pass p95\nms", lambda e: _scaled(e.pass_p95_seconds, 1e3), 4),
    _Column("first\ncommit s", lambda e: e.first_commit_seconds, 5, most=3),
    _Column("first\nblock s", lambda e: e.first_block_seconds, 6, most=3),
    _Column("tokeni-\nsation s", lambda e: e.seconds["tokenisation"], 8, most=3),
    _Column("dense\ns", lambda e: e.seconds["dense"], 8, most=3),
    _Column("partial\ns", lambda e: e.seconds["partial"], 8, most=3),
    _Column("commit\ns", lambda e: e.seconds["commit"], 8, most=3),
    _Column("prep.\ns", lambda e: e.preparation_seconds, 1, most=3),
    _Column("samples\n/ prep.", lambda e: e.samples_per_preparation, 1),
    _Column("probe\ns", lambda e: e.probe_seconds, 1, most=3),
    _Column("cache\nMB", lambda e: _scaled(e.cache_bytes_peak, 1e-6), most=2),
    _Column("nominal\nMB", lambda e: _scaled(e.cache_bytes_nominal, 1e-6), 2, most=2),
    _Column("memory\nMB", lambda e: _scaled(e.memory_peak_bytes, 1e-6), 5),
)


def _metric_columns(section: Section) -> list[_Column]:
    """A column per metric of a task that has several. Wide tables only: narrow ones tell them below."""
    names = sorted({name for cell in section.cells for entry in cell.entries for name in entry.metrics})
    return [_Column(f"{name}\n%", partial(_metric, name), 1) for name in names]


def _metric(name: str, entry: Entry) -> float | None:
    return _scaled(entry.metrics.get(name), 100)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def print_sections(sections: Iterable[Section], console: Console) -> None:
    """One table per section; secondary columns are left out, then method names stacked, until it fits the console."""
    for section in sections:
        console.print(_fitting(section, console))
        console.print()


def _fitting(section: Section, console: Console) -> Table:
    ranks = sorted({column.rank for column in _COLUMNS}, reverse=True)
    for highest in ranks:
        for stacked in (False, True) if highest == 0 else (False,):
            table = _table(section, highest, stacked)
            if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
                return table
    return table


def _table(section: Section, highest: int, stacked: bool) -> Table:
    every = [*_metric_columns(section), *_COLUMNS]
    columns = [c for c in every if c.rank <= highest and (c.rank == 0 or _any(section, c.value))]
    failed = any(entry.failed for cell in section.cells for entry in cell.entries)
    apart = len({cell.subsets for cell in section.cells}) > 1
    names, notes = noted((entry.label for cell in section.cells for entry in cell.entries), narrow=stacked)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(section.setting.title),  # no markup: labels hold brackets
        caption=Text("\n".join([*notes, _caption(section, all_shown=highest >= 1)])),
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        header_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("ctx", justify="right", no_wrap=True, vertical="top")
    if apart and not stacked:
        table.add_column("subset", no_wrap=True)
    table.add_column("method", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    if failed:
        table.add_column("failed", justify="right", style="red", no_wrap=True)
    table.add_column("score\n%", justify="right", no_wrap=True)
    table.add_column("95 %\nCI", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    numbers = _numbers(section, columns)
    for cell in section.cells:
        lead = [_ctx(cell), *([_subset(section, cell)] if apart and not stacked else [])]
        if apart and stacked:  # a line of its own costs no width
            table.add_row(Text(lead[0]), Text(stacked_name(_subset(section, cell)), style="bold"))
            lead[0] = ""
        for entry in cell.entries:
            middle = [str(entry.n), *([str(entry.failed) if entry.failed else ""] if failed else [])]
            score = [_percent(entry.accuracy), _interval(entry)]
            cells = [*lead, names[entry.label], *middle, *score, *numbers[id(entry)]]
            style = "dim" if entry.n == 0 else None
            table.add_row(*(Text(text) for text in cells), style=style, end_section=entry is cell.entries[-1])
            lead = [""] * len(lead)
    return table


def _subset(section: Section, cell: Cell) -> str:
    """The subsets of a cell: by name, "all" for all of several in the section, or how many, told in the caption."""
    names = cell.subsets
    if len(names) > 1 and names == section.subsets:
        return "all"
    return "+".join(names) if len(names) <= _NAMED_SUBSETS else f"{len(names)} subsets"


def _any(section: Section, value: Callable[[Entry], float | None]) -> bool:
    return any(value(entry) is not None for cell in section.cells for entry in cell.entries)


def _numbers(section: Section, columns: Sequence[_Column]) -> dict[int, list[str]]:
    """Texts of each entry: one number of decimals per column, so that the points stand below each other."""
    entries = [entry for cell in section.cells for entry in cell.entries]
    texts: dict[int, list[str]] = {id(entry): [] for entry in entries}
    for column in columns:
        values = [column.value(entry) for entry in entries]
        decimals = _decimals([value for value in values if value], column.most)
        for entry, value in zip(entries, values, strict=True):
            mark = ""
            if column.suffix and value is not None:
                mark = column.suffix + ("" if entry.speedup_same_decode else "*")
                mark = mark.ljust(2) if any(not e.speedup_same_decode for e in entries) else mark
            texts[id(entry)].append(_ABSENT if value is None else f"{value:.{decimals}f}{mark}")
    return texts


def _decimals(values: Sequence[float], most: int) -> int:
    """As many as the smallest value needs, few where all are large."""
    if not values or min(values) < 1 or max(values) < 100:
        return most
    return min(most, 1) if max(values) < 1000 else 0


def _percent(share: float | None) -> str:
    return _ABSENT if share is None else f"{100 * share:.1f}"


def _interval(entry: Entry) -> str:
    if entry.accuracy_interval is None:
        return _ABSENT
    low, high = entry.accuracy_interval
    return f"{100 * low:.0f}–{100 * high:.0f}".rjust(6)


def _caption(section: Section, all_shown: bool = True) -> str:
    entries = [entry for cell in section.cells for entry in cell.entries]
    lines = [f"decoded with {describe_decode(entries)}"]
    lines.append(f"subsets: {', '.join(section.subsets)}")
    many = [cell for cell in section.cells if _NAMED_SUBSETS < len(cell.subsets) < len(section.subsets)]
    lines += [f"{'own length' if cell.ctx is None else _ctx(cell)}: {', '.join(cell.subsets)}" for cell in many]
    if any(len(set(Counter(row["subset"] for row in e.rows).values())) > 1 for e in entries):
        lines.append("score: mean over samples; some subsets have more than others")
    short = sorted({e.speedup_samples for e in entries if e.speedup is not None and e.speedup_samples < len(e.rows)})
    if short:
        lines.append(f"speed-up: on the samples that the baseline ran too (as few as {short[0]})")
    if any(not entry.speedup_same_decode for entry in entries):
        lines.append("* the baseline ran with other decode settings")
    if any(entry.beyond_max_positions for entry in entries):
        lines.append("some contexts are longer than the model's largest position")
    if any(entry.failed for entry in entries):
        lines.append("failed: masks left (scored 0), out of memory or an error (not scored)")
    if len({version for entry in entries for version in entry.scorers}) > 1:
        lines.append("scored by several versions of the scorer: 'dllm-bench rescore' makes them alike")
    return "\n".join([*lines, *([] if all_shown else _metric_lines(section)), *_sharing_lines(section, all_shown)])


def _metric_lines(section: Section) -> list[str]:
    """The metrics of each entry where the table has no room for them, and they are not all the same."""
    pairs = [(cell, entry) for cell in section.cells for entry in cell.entries if entry.metrics]
    differing = [(cell, entry) for cell, entry in pairs if len(set(entry.metrics.values())) > 1]
    lines = [
        f"{_where(cell, entry)}: {', '.join(f'{name} {_percent(value)} %' for name, value in entry.metrics.items())}"
        for cell, entry in differing
    ]
    if len(differing) < len(pairs):
        names = list(dict.fromkeys(name for _, entry in pairs for name in entry.metrics))
        lines.append(f"{', '.join(names)}: the same{' for the others' if differing else ''}")
    return lines


def _where(cell: Cell, entry: Entry) -> str:
    return " ".join([entry.label, *([] if cell.ctx is None else [_ctx(cell)]), *([cell.subset or ""])]).strip()


def _sharing_lines(section: Section, shown: bool) -> list[str]:
    """What the columns on shared state mean, or their numbers where the table has no room for them."""
    pairs = [(c, e) for c in section.cells for e in c.entries if e.preparation_seconds is not None]
    if not pairs:
        return []
    lines = ["prep.: state that samples share is made outside of decoding; tok/s and speed-up leave it out"]
    if shown:
        return lines
    for cell, entry in pairs:
        assert entry.preparation_seconds is not None and entry.samples_per_preparation is not None
        rate, probe = entry.amortised_tokens_per_second, entry.probe_seconds
        told = [f"{entry.preparation_seconds:.3f} s for {entry.samples_per_preparation:.1f} samples each"]
        told += [] if rate is None else [f"{rate:.2f} useful tok/s with it"]
        told += [] if probe is None else [f"probe {probe:.3f} s"]
        lines.append(f"{_where(cell, entry)}: {', '.join(told)}")
    return lines


def describe_decode(entries: Sequence[Entry]) -> str:
    """The decode settings that all entries share, without those that are off."""
    settings = [entry.decode for entry in entries]
    shared = {
        name: value
        for name, value in (settings[0] if settings else {}).items()
        if all(other.get(name) == value for other in settings)
    }
    order = ["gen_length", "block_length", *sorted(shared.keys() - {"gen_length", "block_length"})]
    told = [
        f"{name} {_plain(shared[name])}"
        for name in order
        if name in shared and not _is_off(name, shared[name], settings)
    ]
    return ", ".join(told) or "settings that differ by method"


def _is_off(name: str, value: Any, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting is unset or at its usual value, or rules nothing beside the rule that is set."""
    if value is None or (name in _USUAL and value == _USUAL[name]):
        return True
    if name == "steps":
        return all(any(one.get(rule) is not None for rule in RULES) for one in settings)
    return name == "eps" and all(one.get("alg") is None for one in settings)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def records(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """One flat record per entry; units are in the names, a missing number is None, scores are in 0..1."""
    return [_record(section, cell, entry) for section in sections for cell in section.cells for entry in cell.entries]


def _record(section: Section, cell: Cell, entry: Entry) -> dict[str, Any]:
    low, high = entry.accuracy_interval or (None, None)
    return {
        "model": section.setting.model,
        "task": section.setting.task,
        "dtype": section.setting.dtype,
        "hardware": section.setting.hardware,
        "marks": "; ".join(section.setting.marks),
        "ctx": cell.ctx,
        "actual_ctx": entry.actual_ctx,
        "subset": cell.subset or "+".join(sorted({row["subset"] for row in entry.rows})),
        "method": entry.method,
        "label": entry.label,
        "n": entry.n,
        "failed": entry.failed,
        "accuracy": entry.accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "metrics": dict(entry.metrics),
        "useful_tokens_per_second": entry.useful_tokens_per_second,
        "canvas_tokens_per_second": entry.canvas_tokens_per_second,
        "amortised_tokens_per_second": entry.amortised_tokens_per_second,
        "speedup": entry.speedup,
        "speedup_samples": entry.speedup_samples,
        "speedup_same_decode": entry.speedup_same_decode if entry.speedup is not None else None,
        "nfe": entry.nfe,
        "dense_passes": entry.dense_passes,
        "row_layers": entry.row_layers,
        **{f"{part}_seconds": seconds for part, seconds in entry.seconds.items()},
        "first_commit_seconds": entry.first_commit_seconds,
        "first_block_seconds": entry.first_block_seconds,
        "pass_p50_seconds": entry.pass_p50_seconds,
        "pass_p95_seconds": entry.pass_p95_seconds,
        "cache_bytes_peak": entry.cache_bytes_peak,
        "cache_bytes_nominal": entry.cache_bytes_nominal,
        "shared_bytes": entry.shared_bytes,
        "memory_peak_bytes": entry.memory_peak_bytes,
        "preparation_seconds": entry.preparation_seconds,
        "preparation_row_layers": entry.preparation_row_layers,
        "samples_per_preparation": entry.samples_per_preparation,
        "probe_seconds": entry.probe_seconds,
        "probe_row_layers": entry.probe_row_layers,
        "beyond_max_positions": entry.beyond_max_positions,
        "method_options": dict(entry.options),
        "decode_settings": dict(entry.decode),
    }


def to_json(sections: Iterable[Section]) -> str:
    """A JSON list of records."""
    return json.dumps(records(sections), indent=2, ensure_ascii=False)


def to_csv(sections: Iterable[Section]) -> str:
    """Records as CSV with a header; a missing number is an empty field."""
    made = [{k: _flat(v) for k, v in record.items()} for record in records(sections)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(made[0]) if made else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(made)
    return out.getvalue().rstrip("\n")


def _flat(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value


def to_markdown(sections: Iterable[Section]) -> str:
    """A heading and a table per section, with every column that has a number."""
    parts = []
    for section in sections:
        every = [*_metric_columns(section), *_COLUMNS]
        columns = [column for column in every if _any(section, column.value)]
        numbers = _numbers(section, columns)
        heads = [
            column.head.replace("tokeni-\n", "tokeni").replace("-\n", "-").replace("\n", " ") for column in columns
        ]
        header = ["ctx", "subset", "method", "n", "failed", "score %", "95 % CI", *heads]
        lines = [
            f"### {section.setting.title}",
            "",
            _line(header),
            _line(["--:", "---", "---", *["--:"] * (len(header) - 3)]),
        ]
        for cell in section.cells:
            for entry in cell.entries:
                lead = [_ctx(cell), _subset(section, cell), entry.label, str(entry.n), str(entry.failed)]
                lines.append(_line([*lead, _percent(entry.accuracy), _interval(entry).strip(), *numbers[id(entry)]]))
        parts.append("\n".join([*lines, "", *(f"{line}  " for line in _caption(section).splitlines())]))
    return "\n\n".join(parts)


def _ctx(cell: Cell) -> str:
    return _ABSENT if cell.ctx is None else ctx_name(cell.ctx)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"
