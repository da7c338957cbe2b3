"""Scores stored rows again by the tasks' scorers of today: texts, references and facts are in the rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dllm_bench.errors import UserError
from dllm_bench.running.rows import grade_columns
from dllm_bench.running.task import TASKS, Answer, Task

__all__ = ["Outcome", "Rescored", "rescored"]

_UNVERSIONED = "none"
"""Stands for the version in rows of before scorers had one."""


@dataclass
class Outcome:
    """What scoring one subset of a task again did to its rows.

    Attributes:
        version: of the scorer. rows: how many it scored; changed: how many of them have another score now.
        before, after: sums of the first metric over the rows that had a score.
    """

    version: int
    rows: int = 0
    changed: int = 0
    compared: int = 0
    before: float = 0.0
    after: float = 0.0


@dataclass
class Rescored:
    """Attributes:
    rows: whole rows that take the place of stored ones. outcomes: by task and subset.
    current: rows that have the scorer's version already. unanswered: rows without a text.
    kept: reason -> rows that could not be scored again.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    current: int = 0
    unanswered: int = 0
    kept: Counter[str] = field(default_factory=Counter)


def rescored(rows: Iterable[Mapping[str, Any]], *, every: bool = False) -> Rescored:
    """Scores rows again whose scorer has another version now, or with `every` all that hold an answer."""
    made = Rescored()
    tasks: dict[str, type[Task] | str] = {}
    for row in rows:
        name = row["task"]
        if name not in tasks:
            tasks[name] = _task(name)
        task = tasks[name]
        if isinstance(task, str):
            made.kept[task] += 1
        elif row["text"] is None:
            made.unanswered += 1
        elif row["scorer_version"] == task.scorer_version and not every:
            made.current += 1
        else:
            _rescore(made, row, task)
    return made


def _task(name: str) -> type[Task] | str:
    """The task, or why there is none."""
    try:
        return TASKS.get(name)
    except UserError as error:
        return f"task '{name}' is unknown here" if name not in TASKS.names() else str(error)


def _rescore(made: Rescored, row: Mapping[str, Any], task: type[Task]) -> None:
    try:
        grades = _grades(row, task)
    except Exception as error:  # scorers of plug-ins may raise anything; a row that they refuse stays as it is
        made.kept[f"{row['task']}/{row['subset']} does not score it: {error or type(error).__name__}"] += 1
        return
    outcome = made.outcomes.setdefault((row["task"], row["subset"]), Outcome(task.scorer_version))
    new = {**row, **grade_columns(task, grades)}
    old_scores, version = _scores(row, task), row["scorer_version"]
    differs = old_scores != json.loads(new["scores"])
    outcome.rows += 1
    outcome.changed += differs
    if row["score"] is not None:
        outcome.compared += 1
        outcome.before += row["score"]
        outcome.after += new["score"]
    if differs or version != task.scorer_version:
        former = json.loads(row["former_scores"] or "{}")
        former.pop(str(task.scorer_version), None)
        if old_scores:
            former[_UNVERSIONED if version is None else str(version)] = old_scores
        new["former_scores"] = json.dumps(former, sort_keys=True, ensure_ascii=False) if former else None
        made.rows.append(new)


def _grades(row: Mapping[str, Any], task: type[Task]) -> dict[str, float]:
    task.check_subset(row["subset"])
    if row["status"] == "masks_left":  # no answer, as when it was made
        return dict.fromkeys(task.metrics, 0.0)
    facts = json.loads(row["sample_meta"] or "{}")
    return task.grade(row["subset"], Answer(row["text"], tuple(row["references"] or ()), facts))


def _scores(row: Mapping[str, Any], task: type[Task]) -> dict[str, float]:
    """What the row holds; older rows have nothing but the first metric."""
    if row["scores"] is not None:
        held: dict[str, float] = json.loads(row["scores"])
        return held
    return {} if row["score"] is None else {task.metrics[0]: row["score"]}
