"""The columns of a row that come from a sample and from its decoded response."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.running.measure import percentile
from dllm_bench.running.task import Sample, Task

if TYPE_CHECKING:
    from dllm_bench.api import Generation
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.running.environment import Environment
    from dllm_bench.running.spec import RunSpec

__all__ = [
    "answer_columns",
    "begun_columns",
    "cut_at",
    "generation_columns",
    "grade_columns",
    "preparation_columns",
    "prompt_hash",
    "sample_columns",
]

_COST = ("seconds", "rows", "row_layers")


def begun_columns(spec: RunSpec, environment: Environment, index: int, decode: DecodeSettings) -> dict[str, Any]:
    """What is known when a sample is begun: what decides its answer, where it runs, and when."""
    return {
        **spec.columns(),
        **environment.columns(),
        "key": spec.key(index),
        "index": index,
        "decode_seed": decode.seed,
        "started_at": dt.datetime.now(dt.UTC),
    }


def prompt_hash(ids: Sequence[int]) -> str:
    """Hash of a prompt: equal hashes stand for equal ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:32]


def sample_columns(sample: Sample, max_positions: int) -> dict[str, Any]:
    """What was asked. A needle's depth is the task's own figure, or else its place in the prompt in percent."""
    needles = sample.spans.get("needle", ())
    length = len(sample.prompt_ids)
    depths = sample.meta.get("needle_depths")
    if depths is None and needles:
        depths = [100 * start / max(1, length - (end - start)) for start, end in needles]
    return {
        "prompt_hash": prompt_hash(sample.prompt_ids),
        "prompt_tokens": length,
        "actual_ctx": sample.actual_ctx,
        "beyond_max_positions": sample.actual_ctx > max_positions,
        "references": list(sample.references),
        "needle_depths": None if depths is None else [float(depth) for depth in depths],
        "needle_starts": [start for start, _ in needles] or None,
        "needle_ends": [end for _, end in needles] or None,
        "truncated": sample.meta.get("truncated"),
        "original_tokens": sample.meta.get("original_tokens"),
        "sample_meta": _json(sample.meta),
    }


def generation_columns(made: Generation) -> dict[str, Any]:
    """What the response cost."""
    passes = [seconds for _, seconds in made.pass_seconds]
    counters = made.counters
    return {
        "output_ids": list(made.output_ids),
        "masks_left": made.masks_left,
        "useful_tokens": made.useful_tokens,
        "canvas_tokens": made.canvas_tokens,
        "nfe": made.nfe,
        "dense_passes": made.dense_passes,
        "row_layers": made.row_layers,
        "projected_rows": counters.projected_rows,
        "attended_rows": counters.attended_rows,
        "head_rows": counters.head_rows,
        "selections": counters.selections,
        "decode_seconds": made.seconds.get("total"),
        "dense_seconds": made.seconds.get("dense"),
        "partial_seconds": made.seconds.get("partial"),
        "commit_seconds": made.seconds.get("commit"),
        "first_commit_seconds": made.first_commit_seconds,
        "first_block_seconds": made.first_block_seconds,
        "pass_seconds": passes,
        "pass_p50_seconds": percentile(passes, 50),
        "pass_p95_seconds": percentile(passes, 95),
        "cache_bytes_peak": made.cache_bytes_peak,
        "cache_bytes": _json(made.cache_bytes),
        "cache_bytes_nominal": None if made.nominal_bytes is None else float(sum(made.nominal_bytes.values())),
        **{f"probe_{name}": None if made.probe is None else made.probe[name] for name in _COST},
    }


def preparation_columns(*costs: Mapping[str, float] | None) -> dict[str, Any]:
    """What making shared state took for this sample, in all; null where none was made for it."""
    paid = [cost for cost in costs if cost is not None]
    return {f"preparation_{name}": sum(cost[name] for cost in paid) if paid else None for name in _COST}


def answer_columns(task: Task, sample: Sample, made: Generation) -> dict[str, Any]:
    """The text, its score, and the status. An answer with masks left scores 0: it is no answer."""
    text = task.codec.decode(made.output_ids[: made.useful_tokens])
    cut = cut_at(text, sample.until, sample.lead)
    if cut != text:
        stopped = "stop_string"
    else:
        stopped = "eos" if made.useful_tokens < made.canvas_tokens else "length"
    if made.masks_left:
        error = f"{made.masks_left} masks were left in the answer"
        graded = grade_columns(task, dict.fromkeys(task.metrics, 0.0))
        return {"text": cut, "stopped_by": None, **graded, "status": "masks_left", "error": error}
    return {"text": cut, "stopped_by": stopped, **grade_columns(task, task.grades(sample, cut)), "status": "ok"}


def grade_columns(task: Task | type[Task], grades: Mapping[str, float]) -> dict[str, Any]:
    """The score, all metrics, and which scorer gave them."""
    scores = {name: float(value) for name, value in grades.items()}
    return {"score": scores[task.metrics[0]], "scores": _json(scores), "scorer_version": task.scorer_version}


def cut_at(text: str, until: Sequence[str], lead: str = "") -> str:
    """The text before the first stop string that does not stand among the leading characters."""
    begin = len(text) - len(text.lstrip(lead)) if lead else 0
    places = [place for place in (text.find(stop, begin) for stop in until if stop) if place >= 0]
    return text[: min(places)] if places else text


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), sort_keys=True, ensure_ascii=False, default=list)
