"""The problems of GSM8K: from the hub, from the official jsonl files, or the built-in mini set."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from dllm_bench.errors import UserError, nearest
from dllm_bench.hub_access import hub_rows
from dllm_bench.jsonl import file_objects, text_field
from dllm_bench.tasks.gsm8k_scoring import FINAL

__all__ = ["HUB_DATASET", "MINI", "Problem", "ProblemSet", "check_path", "from_file", "load"]

HUB_DATASET = "openai/gsm8k"
_HUB_CONFIG = "main"
MINI = Path(str(files("dllm_bench.tasks.data"))) / "mini_gsm8k.jsonl.gz"
"""Problems made for this package: jsonl with the data set's fields."""


@dataclass(frozen=True)
class Problem:
    """A question and its solution, as the data set has them: calculator marks, and "#### N" in the last line."""

    question: str
    answer: str


@dataclass(frozen=True)
class ProblemSet:
    """Problems in the order of their source."""

    source: str
    problems: tuple[Problem, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each question occurs."""
        return Counter(problem.question for problem in self.problems)

    def named(self) -> str:
        """The last part of the source's name, and a hash of the content."""
        told = json.dumps([[problem.question, problem.answer] for problem in self.problems])
        return f"{Path(self.source).name}:{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def check_path(path: str) -> None:
    """Raises UserError where the file or folder is missing; names the nearest one beside it."""
    place = Path(path)
    if place.exists():
        return
    siblings = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
    near = nearest(place.name, siblings)
    hint = f"did you mean '{place.parent / near}'?" if near else "give a folder with test.jsonl and train.jsonl"
    raise UserError(f"gsm8k data '{path}' does not exist: {hint}")


def load(path: str | None, split: str) -> ProblemSet:
    """The split "test" or "train" of the user's files, or of the hub without a path.

    Raises UserError where it is not to be had, naming the ways to have it.
    """
    return _from_hub(split) if path is None else from_file(_split_file(Path(path), split))


def _split_file(place: Path, split: str) -> Path:
    """For "test" the path itself where it is a file; else SPLIT.jsonl in that folder."""
    if split == "test" and place.is_file():
        return place
    file = (place if place.is_dir() else place.parent) / f"{split}.jsonl"
    if not file.is_file():
        unless = ", or leave solved examples out with --task-set shots=0" if split == "train" else ""
        raise UserError(f"gsm8k needs '{file}', which does not exist: put the official {split}.jsonl there{unless}")
    return file


def from_file(file: Path) -> ProblemSet:
    """The problems of a jsonl file (also .gz) with `question` and `answer`. Raises UserError naming the line."""
    return _checked(str(file), ((f"{file}, line {number}", values) for number, values in file_objects(file)))


def _from_hub(split: str) -> ProblemSet:
    """A split of the hub's data set, or of what `datasets` keeps of it. Raises UserError where there is neither."""
    try:
        rows = hub_rows(HUB_DATASET, _HUB_CONFIG, split=split)
    except Exception as error:  # the hub's client raises many kinds, all of which mean that the data is not to be had
        raise UserError(
            f"the data set {HUB_DATASET} is neither on this machine nor can the hub be reached "
            f"({type(error).__name__}): go online once, or give the official files with --data DIR or --task-set "
            "data=DIR (a folder with test.jsonl and train.jsonl); the built-in set needs neither: --task gsm8k "
            "--subset mini"
        ) from None
    return _checked(f"{HUB_DATASET} {split}", ((f"{HUB_DATASET} {split}, row {i}", row) for i, row in enumerate(rows)))


def _checked(source: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> ProblemSet:
    made = []
    for where, values in rows:
        problem = Problem(text_field(values, "question", where), text_field(values, "answer", where))
        if not FINAL.search(problem.answer):
            raise UserError(f"{where}: the answer has no '#### N' as the official files have")
        made.append(problem)
    if not made:
        raise UserError(f"{source} holds no problems")
    return ProblemSet(source, tuple(made))
