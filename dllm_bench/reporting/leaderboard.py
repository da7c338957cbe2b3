"""From rows to the numbers of the leaderboard: who is compared with whom, and the ratios of sums."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dllm_bench.reporting.statistics import Interval, mean_interval, ratio, ratio_interval
from dllm_bench.running.measure import percentile
from dllm_bench.running.schema import FAILED

__all__ = ["BASELINE", "COLUMNS_READ", "RULES", "Cell", "Entry", "Section", "Setting", "leaderboard"]

Row = Mapping[str, Any]

BASELINE = "baseline"
"""The method that speed-ups refer to."""

RULES = ("threshold", "factor", "tokens_per_pass")
"""Decode settings of commit rules beside which the number of steps rules nothing."""

_SHOWN = ("model", "task", "dtype", "device_type", "device_name", "threads")
_HIDDEN = (
    "model_revision",
    "model_fingerprint",
    "rope_scaling",
    "codec",
    "task_version",
    "task_options",
    "package_version",
    "task_data",
)
_PARTS = ("tokenisation", "dense", "partial", "commit")
_MEASURES = (
    *("status", "score", "scores", "scorer_version"),
    *("useful_tokens", "canvas_tokens", "decode_seconds", "nfe", "dense_passes", "row_layers"),
    *("first_commit_seconds", "first_block_seconds", "pass_seconds", "cache_bytes_peak", "memory_peak_bytes"),
    *("actual_ctx", "beyond_max_positions", "needle_depths", "cache_bytes_nominal", "shared_bytes", "shared_requests"),
    *("preparation_seconds", "preparation_row_layers", "probe_seconds", "probe_row_layers"),
    *(f"{part}_seconds" for part in _PARTS),
)
_IDENTITY = ("method", "method_options", "decode_settings")
_SAMPLE = ("subset", "seed", "index", "prompt_hash")

COLUMNS_READ = (*_SHOWN, *_HIDDEN, *_IDENTITY, "method_label", *_SAMPLE, "nominal_ctx", *_MEASURES)
"""Columns of the store that the leaderboard and the figures read."""


@dataclass(frozen=True)
class Setting:
    """What has to be equal for results to stand in one table: model, task, data type, hardware and versions.

    `marks` names what else tells this setting from others that look the same, such as the model's fingerprint.
    """

    model: str
    task: str
    dtype: str
    hardware: str
    marks: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return " · ".join((self.model, self.task, self.dtype, self.hardware, *self.marks))


@dataclass(frozen=True)
class Entry:
    """One method in one cell. Rates are ratios of sums; a number that nothing was measured for is None.

    Attributes:
        n: samples with a score; `failed`: samples that ran out of memory, raised, or kept masks (these score 0).
        accuracy: mean score in 0..1 with its 95 % interval.
        metrics: mean of each metric in 0..1, where the task has several; the first of them is the score.
        scorers: versions of the scorer that gave these scores; None stands for rows of before there were versions.
        speedup: decode seconds of the baseline over those of this method, both summed over the `speedup_samples`
            samples that both of them ran.
        speedup_same_decode: whether that baseline ran with the same decode settings.
        seconds: means per sample of the parts "tokenisation" (outside of decoding), "dense", "partial" and "commit".
        nfe, dense_passes, row_layers: means per sample; first_commit_seconds, first_block_seconds: medians.
        pass_p50_seconds, pass_p95_seconds: percentiles over all passes of all samples.
        cache_bytes_peak, cache_bytes_nominal, shared_bytes, memory_peak_bytes: largest of all samples.
        preparation_seconds, preparation_row_layers: means over the times that state which samples share was made,
            outside of all decode seconds; samples_per_preparation: how many it served each time.
        amortised_tokens_per_second: useful tokens over decode seconds and all preparations together; None where there
            were none.
        probe_seconds, probe_row_layers: means per sample that ran a probe, parts of its decode seconds and row-layers.
    """

    label: str
    method: str
    options: Mapping[str, Any]
    decode: Mapping[str, Any]
    rows: tuple[Row, ...]
    n: int
    failed: int
    accuracy: float | None
    accuracy_interval: Interval | None
    metrics: Mapping[str, float]
    scorers: frozenset[int | None]
    actual_ctx: float | None
    useful_tokens_per_second: float | None
    useful_tokens_per_second_interval: Interval | None
    canvas_tokens_per_second: float | None
    speedup: float | None
    speedup_samples: int
    speedup_same_decode: bool
    nfe: float | None
    dense_passes: float | None
    row_layers: float | None
    seconds: Mapping[str, float | None]
    first_commit_seconds: float | None
    first_block_seconds: float | None
    pass_p50_seconds: float | None
    pass_p95_seconds: float | None
    cache_bytes_peak: int | None
    cache_bytes_nominal: float | None
    shared_bytes: int | None
    memory_peak_bytes: int | None
    preparation_seconds: float | None
    preparation_row_layers: float | None
    samples_per_preparation: float | None
    amortised_tokens_per_second: float | None
    probe_seconds: float | None
    probe_row_layers: float | None
    beyond_max_positions: bool


@dataclass(frozen=True)
class Cell:
    """The entries of one context length; `subset` is None where all subsets are taken together."""

    ctx: int | None
    subset: str | None
    entries: tuple[Entry, ...]

    @property
    def subsets(self) -> tuple[str, ...]:
        """The subsets that its samples are from."""
        return tuple(sorted({row["subset"] for entry in self.entries for row in entry.rows}))


@dataclass(frozen=True)
class Section:
    """All cells of one setting, by context length and subset."""

    setting: Setting
    cells: tuple[Cell, ...]
    subsets: tuple[str, ...]


def leaderboard(rows: Iterable[Row], *, by_subset: bool = False, lone_apart: bool = False) -> list[Section]:
    """The sections of `rows`, which hold COLUMNS_READ.

    Subsets are taken together where at each context all methods of a section ran the same ones, else (and with
    `by_subset`) apart. With `lone_apart` also where one method ran in one way: subsets are all there is to compare.
    """
    groups = _by_setting(rows)
    order = sorted(groups, key=lambda key: tuple(str(part) for part in key))
    return [_section(key, groups[key], order, by_subset, lone_apart) for key in order]


def _by_setting(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by setting. Subsets with a data file each are of one setting, unless one of them ran on two files."""
    alike: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        alike[_setting_key(row)].append(row)
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for key, members in alike.items():
        files = {(row["subset"], row["task_data"]) for row in members}
        mixed = len(files) > len({subset for subset, _ in files})
        joint = " + ".join(sorted({name for _, name in files if name})) or None
        for row in members:
            groups[*key, row["task_data"] if mixed else joint].append(row)
    return groups


def _setting_key(row: Row) -> tuple[Any, ...]:
    """All of a setting but its data, which stands last."""
    # the number of threads belongs to a CPU; for an accelerator it only feeds the device
    threads = row["threads"] if row["device_type"] == "cpu" else None
    return (*(row[name] for name in _SHOWN[:-1]), threads, *(row[name] for name in _HIDDEN[:-1]))


def _section(
    key: tuple[Any, ...], rows: Sequence[Row], keys: Sequence[tuple[Any, ...]], by_subset: bool, lone_apart: bool
) -> Section:
    labels = _labels(rows)
    lone = len(set(labels.values())) == 1
    apart = by_subset or (lone_apart and lone) or not _same_subsets(rows)
    cells: dict[tuple[int | None, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row["nominal_ctx"], row["subset"] if apart else None].append(row)
    order = sorted(cells, key=lambda cell: (cell[0] or 0, cell[1] or ""))
    made = tuple(Cell(ctx, subset, _entries(cells[ctx, subset], labels)) for ctx, subset in order)
    return Section(_setting(key, keys), made, tuple(sorted({row["subset"] for row in rows})))


def _same_subsets(rows: Iterable[Row]) -> bool:
    """Whether at each context all methods, with all their settings, ran the same subsets."""
    ran: dict[int | None, dict[tuple[Any, ...], set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        ran[row["nominal_ctx"]][_identity(row)].add(row["subset"])
    return all(len({frozenset(subsets) for subsets in of_ctx.values()}) == 1 for of_ctx in ran.values())


def _setting(key: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]) -> Setting:
    model, task, dtype, device_type, device_name, threads = key[: len(_SHOWN)]
    hardware = device_name or device_type
    if threads:
        hardware += f", {threads} thread{'s' if threads > 1 else ''}"
    alike = [other for other in keys if other[: len(_SHOWN)] == key[: len(_SHOWN)]]
    marks = []
    for place, name in enumerate(_HIDDEN, start=len(_SHOWN)):
        if len({other[place] for other in alike}) > 1 or (name == "rope_scaling" and key[place]):
            value = str(key[place])
            marks.append(f"{name} {value[:10] if name in ('model_fingerprint', 'codec') else value}")
    return Setting(model, task, dtype, hardware, tuple(marks))


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _IDENTITY)


def _labels(rows: Iterable[Row]) -> dict[tuple[Any, ...], str]:
    """A label per method and settings; in brackets what tells equal labels apart, and decode settings not all share."""
    groups: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = defaultdict(dict)
    decodes: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for label, subset, identity in dict.fromkeys((row["method_label"], row["subset"], _identity(row)) for row in rows):
        _, options, decode = identity
        groups[label][identity] = {**json.loads(options), **decodes[subset].setdefault(decode, json.loads(decode))}
    plain = _budgets([list(of_subset.values()) for of_subset in decodes.values()])
    differing = _differing([decode for of_subset in decodes.values() for decode in of_subset.values()])
    labels: dict[tuple[Any, ...], str] = {}
    for label, members in groups.items():
        telling = sorted((differing | _differing(members.values())) - plain)
        full = {identity: _told(facts, telling) for identity, facts in members.items()}
        brief = {identity: _told(facts, _ruling(facts, identity[2], telling)) for identity, facts in members.items()}
        chosen = full if len(set(brief.values())) < len(set(full.values())) else brief
        labels |= {identity: f"{label} [{told}]" if told else label for identity, told in chosen.items()}
    return labels


def _told(facts: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={facts.get(name)}" for name in names)


def _ruling(facts: Mapping[str, Any], decode_settings: str, names: Collection[str]) -> list[str]:
    """Those of `names` that are set and rule something; the number of steps does where no other rule is set."""
    decode = json.loads(decode_settings)
    ruled = any(decode.get(rule) is not None for rule in RULES)
    ruling = [name for name in names if facts.get(name) is not None and not (name == "steps" and ruled)]
    by_steps = not ruled and decode.get("steps") is not None and not {*RULES}.isdisjoint(names)
    return ruling or (["steps"] if by_steps else [])


def _budgets(by_subset: Sequence[Sequence[Mapping[str, Any]]]) -> set[str]:
    """Decode settings that follow from the subset alone: the length of its answers, and what goes with that."""
    follows = {
        name
        for name in ("gen_length", "block_length")
        if all(len({one.get(name) for one in settings}) == 1 for settings in by_subset)
    }
    every = [one for settings in by_subset for one in settings]
    paces = {one["gen_length"] / one["steps"] if one.get("steps") else None for one in every}
    return follows | {"steps"} if "gen_length" in follows and len(paces) == 1 else follows


def _differing(settings: Collection[Mapping[str, Any]]) -> set[str]:
    """The names whose values are not the same in all `settings`."""
    names = {name for one in settings for name in one}
    return {name for name in names if len({json.dumps(one.get(name)) for one in settings}) > 1}


def _entries(rows: Sequence[Row], labels: Mapping[tuple[Any, ...], str]) -> tuple[Entry, ...]:
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[_identity(row)].append(row)
    baselines = {identity: members for identity, members in groups.items() if identity[0] == BASELINE}
    entries = [_entry(identity, members, baselines, labels[identity]) for identity, members in groups.items()]
    return tuple(sorted(entries, key=_rank))


def _rank(entry: Entry) -> tuple[Any, ...]:
    """The baseline first, then by accuracy, then by speed."""
    speed = entry.useful_tokens_per_second
    return entry.method != BASELINE, -(entry.accuracy or 0), -(speed or 0), entry.label


def _entry(identity: tuple[Any, ...], rows: list[Row], baselines: Mapping[Any, list[Row]], label: str) -> Entry:
    scores = _known(rows, "score")
    useful, canvas = _timed(rows, "useful_tokens"), _timed(rows, "canvas_tokens")
    speedup, shared, same = _speedup(identity, rows, baselines)
    passes = [seconds for row in rows for seconds in row["pass_seconds"] or ()]
    contexts = _known(rows, "actual_ctx")
    return Entry(
        label=label,
        method=identity[0],
        options=json.loads(identity[1]),
        decode=json.loads(identity[2]),
        rows=tuple(rows),
        n=len(scores),
        failed=sum(row["status"] in FAILED for row in rows),
        accuracy=_mean(scores),
        accuracy_interval=mean_interval(scores),
        metrics=_metrics(rows),
        scorers=frozenset(row["scorer_version"] for row in rows if row["score"] is not None),
        actual_ctx=_mean(contexts),
        useful_tokens_per_second=ratio(*useful),
        useful_tokens_per_second_interval=ratio_interval(*useful),
        canvas_tokens_per_second=ratio(*canvas),
        speedup=speedup,
        speedup_samples=shared,
        speedup_same_decode=same,
        nfe=_mean(_known(rows, "nfe")),
        dense_passes=_mean(_known(rows, "dense_passes")),
        row_layers=_mean(_known(rows, "row_layers")),
        seconds={part: _mean(_known(rows, f"{part}_seconds")) for part in _PARTS},
        first_commit_seconds=percentile(_known(rows, "first_commit_seconds"), 50),
        first_block_seconds=percentile(_known(rows, "first_block_seconds"), 50),
        pass_p50_seconds=percentile(passes, 50),
        pass_p95_seconds=percentile(passes, 95),
        cache_bytes_peak=max(_known(rows, "cache_bytes_peak"), default=None),
        cache_bytes_nominal=max(_known(rows, "cache_bytes_nominal"), default=None),
        shared_bytes=max(_known(rows, "shared_bytes"), default=None),
        memory_peak_bytes=max(_known(rows, "memory_peak_bytes"), default=None),
        beyond_max_positions=any(row["beyond_max_positions"] for row in rows),
        **_sharing(rows, useful),
    )


def _sharing(rows: Sequence[Row], useful: tuple[list[float], list[float]]) -> dict[str, float | None]:
    """What shared state cost, and the rate that bears it: a sum over all samples spreads it over those it served."""
    made = _known(rows, "preparation_seconds")
    served = sum(row["shared_requests"] is not None or row["preparation_seconds"] is not None for row in rows)
    tokens, seconds = useful
    return {
        "preparation_seconds": _mean(made),
        "preparation_row_layers": _mean(_known(rows, "preparation_row_layers")),
        "samples_per_preparation": served / len(made) if made else None,
        "amortised_tokens_per_second": ratio(tokens, [*seconds, *made]) if made and tokens else None,
        "probe_seconds": _mean(_known(rows, "probe_seconds")),
        "probe_row_layers": _mean(_known(rows, "probe_row_layers")),
    }


def _metrics(rows: Iterable[Row]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in json.loads(row["scores"] or "{}").items():
            values[name].append(value)
    return {name: fmean(given) for name, given in sorted(values.items())} if len(values) > 1 else {}


def _known(rows: Iterable[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row[name] is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _timed(rows: Iterable[Row], name: str) -> tuple[list[float], list[float]]:
    """Values of `name` and the decode seconds of the samples that have both."""
    both = [r for r in rows if r[name] is not None and r["decode_seconds"] is not None]
    return [r[name] for r in both], [r["decode_seconds"] for r in both]


def _speedup(
    identity: tuple[Any, ...], rows: Sequence[Row], baselines: Mapping[Any, list[Row]]
) -> tuple[float | None, int, bool]:
    """(speed-up, shared samples, whether the baseline has the same decode settings).

    The baseline with the same decode settings if there is one with common samples, else the one with most of them.
    """
    mine = _seconds(rows)
    best: tuple[bool, int, float | None] = (True, 0, None)
    found = False
    for other, members in baselines.items():
        theirs = _seconds(members)
        shared = sorted(mine.keys() & theirs.keys(), key=str)
        same = other[2] == identity[2]
        value = ratio([theirs[s] for s in shared], [mine[s] for s in shared])
        if value is not None and (not found or (same, len(shared)) > best[:2]):
            best, found = (same, len(shared), value), True
    return best[2], best[1], best[0]


def _seconds(rows: Iterable[Row]) -> dict[tuple[Any, ...], float]:
    return {tuple(r[n] for n in _SAMPLE): r["decode_seconds"] for r in rows if r["decode_seconds"] is not None}
