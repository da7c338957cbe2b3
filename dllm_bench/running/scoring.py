"""Scores of answers that exist already: nothing here needs a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dllm_bench.errors import UserError
from dllm_bench.running.task import Answer, Task

__all__ = ["Scored", "answer_of", "score_answers"]


@dataclass(frozen=True)
class Scored:
    """Answers of one subset with their scores.

    Attributes:
        lines: line of each answer. grades: each metric of each answer, in 0..1.
        aggregate: over all of them, on the data set's official scale (percent).
    """

    lines: tuple[int, ...]
    grades: tuple[dict[str, float], ...]
    aggregate: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """{"values": […], "aggregate": x} for JSON: bare numbers where there is one metric, objects where there are
        several; null for a part without answers."""
        values = [_bare(grades, grades) for grades in self.grades]
        return {"values": values, "aggregate": _finite(_bare(self.aggregate, self.grades[0]))}


def score_answers(task: type[Task], subset: str, stored: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> Scored:
    """Scores stored predictions: pairs of a line's number and its fields (see `answer_of`).

    Raises UserError naming the line where one cannot be scored, and where there is none.
    """
    lines, answers, grades = [], [], []
    for line, fields in stored:
        where = f"{name}, line {line}"
        answer = answer_of(task, fields, where)
        lines.append(line)
        answers.append(answer)
        grades.append(_graded(task, subset, answer, where))
    if not answers:
        raise UserError(f"{name} holds no predictions: give a JSON object with prediction and references on each line")
    return Scored(tuple(lines), tuple(grades), task.aggregate(subset, answers, grades))


def answer_of(task: type[Task], fields: Mapping[str, Any], where: str) -> Answer:
    """The answer that an object tells of: `prediction`, `references` (one or a list), or the task's aliases of them.

    All other fields are facts. Raises UserError.
    """
    told = dict(fields)
    for alias, field in task.aliases.items():
        if alias in told and field not in told:
            told[field] = told.pop(alias)
    for field in ("prediction", "references"):
        if field not in told:
            names = [field, *(alias for alias, meant in task.aliases.items() if meant == field)]
            quoted = " or ".join(f"'{name}'" for name in names)
            raise UserError(f"{where} has no field {quoted}: it has {', '.join(fields) or 'none'}")
    prediction, references = told.pop("prediction"), told.pop("references")
    if not isinstance(prediction, str):
        raise UserError(f"{where}: the prediction must be a text, got {prediction!r:.60}")
    listed = [references] if isinstance(references, str) else references
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise UserError(f"{where}: the references must be a text or a list of texts, got {references!r:.60}")
    if not any(one.strip() for one in listed):
        raise UserError(f"{where}: the references are empty")
    return Answer(prediction, tuple(listed), told)


def _graded(task: type[Task], subset: str, answer: Answer, where: str) -> dict[str, float]:
    try:
        return task.grade(subset, answer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except KeyError as error:
        raise UserError(f"{where} has no field {error}, by which {task.name}/{subset} is scored") from None


def _bare(values: Mapping[str, Any], metrics: Sequence[str] | Mapping[str, Any]) -> Any:
    """The number itself where a single metric is all there is."""
    return next(iter(values.values())) if len(metrics) == 1 and [*values] == [*metrics] else dict(values)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and value != value else value
