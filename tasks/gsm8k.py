"""GSM8K: word problems of grade-school arithmetic, asked as lm-eval 0.4.13 asks them.

Wording, stop strings, budget and the two scores are lm-eval's. The shots of `gsm8k` are not: there one random stream
goes through all documents, so a document's shots depend on how many processes share the work. Here they depend on the
document's number and the seed alone.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from dllm_bench.errors import UserError
from dllm_bench.options import Options, option
from dllm_bench.running.task import Answer, Sample, Task
from dllm_bench.tasks import gsm8k_data
from dllm_bench.tasks.draws import private_random
from dllm_bench.tasks.gsm8k_cot_shots import COT_SHOTS
from dllm_bench.tasks.gsm8k_data import ProblemSet
from dllm_bench.tasks.gsm8k_scoring import (
    COT_STRICT,
    STRICT,
    extract_flexible,
    extract_strict,
    same_number,
    same_text,
)
from dllm_bench.tasks.pieces import common_prefix

__all__ = ["Gsm8k", "Gsm8kCot", "Gsm8kCotOptions", "Gsm8kOptions"]

_DATA_HELP = (
    "the official jsonl files: a folder with test.jsonl and train.jsonl, or the file of the questions (train.jsonl "
    "beside it); the hub's openai/gsm8k if not given"
)


@dataclass(frozen=True)
class Gsm8kOptions(Options):
    """Options of gsm8k."""

    shots: int | None = option(None, "solved problems before the question; 5 if not given, 0 for the mini set", low=0)
    data: str | None = option(None, _DATA_HELP)

    def check(self) -> None:
        if self.data is not None:
            gsm8k_data.check_path(self.data)


@dataclass(frozen=True)
class Gsm8kCotOptions(Options):
    """Options of gsm8k_cot."""

    shots: int = option(8, "the first so many of the eight fixed solved problems", low=0, high=len(COT_SHOTS))
    data: str | None = option(None, _DATA_HELP)

    def check(self) -> None:
        if self.data is not None:
            gsm8k_data.check_path(self.data)


class _WordProblems(Task):
    """What both tasks share: the problems, the prompt, the scores.

    The whole prompt is one user turn. The reference is the data set's answer text, solution and all.

    Attributes:
        asked, answered: words before the question and before its answer.
        strict: the pattern of the strict score.
    """

    version: ClassVar[int] = 1
    ctx: ClassVar[Literal["needed", "optional", "none"]] = "none"
    metrics: ClassVar[tuple[str, ...]] = ("strict", "flexible", "numeric")
    aliases: ClassVar[Mapping[str, str]] = {"answer": "references"}
    asked: ClassVar[str]
    answered: ClassVar[str]
    strict: ClassVar[re.Pattern[str]]

    def budget(self, subset: str) -> int:
        """256 tokens, as lm-eval gives by default."""
        self.check_subset(subset)
        return 256

    def size(self, subset: str) -> int | None:
        """Number of problems. Raises UserError where the data is missing."""
        return len(self._questions(subset).problems)

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Problem `index`. Raises UserError for a context length, and where there is no such problem."""
        if ctx is not None:
            raise UserError(f"{self.name} has no context lengths: leave the length out")
        problems = self._questions(subset).problems
        if not 0 <= index < len(problems):
            raise UserError(f"{self.name} {subset} has {len(problems)} problems: the last index is {len(problems) - 1}")
        shots, facts = self._shots(subset, index, seed)
        ids = self.codec.wrap(shots + self._question(problems[index].question))
        affix = self._affix(ids)
        return Sample(
            task=self.name,
            subset=subset,
            index=index,
            seed=seed,
            prompt_ids=tuple(ids),
            references=(problems[index].answer,),
            gen_length=gen_length,
            until=(self.asked, "</s>", "<|im_end|>"),
            spans={"affix": ((0, affix),)} if affix else {},
            meta=facts,
        )

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """lm-eval's strict and flexible match, and whether the numbers are equal; the best over the references."""
        strict = extract_strict(answer.prediction, cls.strict)
        flexible = extract_flexible(answer.prediction)
        return {
            "strict": float(any(same_text(strict, r) for r in answer.references)),
            "flexible": float(any(same_text(flexible, r) for r in answer.references)),
            "numeric": float(any(same_number(answer.prediction, r) for r in answer.references)),
        }

    def fetch(self, subset: str) -> list[str]:
        """Reads all that the subset's samples are made of."""
        if subset == "mini":
            return []
        sets = [self._questions(subset), *self._shot_sets(subset)]
        return [f"{one.source}: {len(one.problems)} problems" for one in sets]

    @abstractmethod
    def _shots(self, subset: str, index: int, seed: int) -> tuple[str, dict[str, Any]]:
        """The solved problems before a question as text, and what the row tells of them."""

    @abstractmethod
    def _shot_sets(self, subset: str) -> list[ProblemSet]:
        """Where shots are drawn from, beside the package."""

    @abstractmethod
    def _questions(self, subset: str) -> ProblemSet:
        """The problems of a subset."""

    def _affix(self, ids: Sequence[int]) -> int:
        """Number of ids at the beginning of the prompt that all samples of the subset have."""
        return 0

    def _question(self, question: str) -> str:
        return f"{self.asked} {question}\n{self.answered}"

    def _solved(self, question: str, answer: str) -> str:
        return f"{self._question(question)} {answer}\n\n"


class Gsm8k(_WordProblems):
    """GSM8K with solved problems of its training set before each question.

    Subset mini: short problems that come with the package, for small models and machines without a network; its shots
    are other problems of the set.
    Meta: shot_rows (rows of the training set, in the order of the prompt).
    """

    name: ClassVar[str] = "gsm8k"
    summary: ClassVar[str] = "word problems in arithmetic, five solved ones first; or a built-in mini set"
    source: ClassVar[str] = "https://arxiv.org/abs/2110.14168"
    subsets: ClassVar[tuple[str, ...]] = ("main", "mini")
    default_subset: ClassVar[str] = "main"
    options_class: ClassVar[type[Options]] = Gsm8kOptions
    asked: ClassVar[str] = "Question:"
    answered: ClassVar[str] = "Answer:"
    strict: ClassVar[re.Pattern[str]] = STRICT
    options: Gsm8kOptions

    def data(self, subset: str) -> str | None:
        """Hashes of the user's own files: the questions, and the training set where there are shots."""
        if self.options.data is None or subset == "mini":
            return None
        sets = [self._test, *self._shot_sets("main")]
        return "+".join(one.named() for one in sets)

    def _count(self, subset: str) -> int:
        """Number of shots."""
        if self.options.shots is not None:
            return self.options.shots
        return 0 if subset == "mini" else 5

    def _questions(self, subset: str) -> ProblemSet:
        self.check_subset(subset)
        if subset == "main":
            return self._test
        if self.options.data is not None:
            raise UserError("gsm8k's subset mini is built in: leave data out, or take the subset main")
        return self._mini

    def _shot_sets(self, subset: str) -> list[ProblemSet]:
        if not self._count(subset):
            return []
        return [self._mini if subset == "mini" else self._train]

    def _shots(self, subset: str, index: int, seed: int) -> tuple[str, dict[str, Any]]:
        """Drawn one after another, so fewer shots are the first ones of more; never the question itself."""
        count, sets = self._count(subset), self._shot_sets(subset)
        if not sets:
            return "", {"shot_rows": []}
        (source,) = sets
        question = self._questions(subset).problems[index].question
        most = len(source.problems) - source.counts[question]
        if count > most:
            raise UserError(f"{source.source} has {most} problems to draw {count} shots from: nearest valid is {most}")
        rng = private_random(self.name, self.version, subset, seed, index)
        rows: list[int] = []
        while len(rows) < count:
            row = rng.randrange(len(source.problems))
            if row not in rows and source.problems[row].question != question:
                rows.append(row)
        drawn = [source.problems[row] for row in rows]
        return "".join(self._solved(shot.question, shot.answer) for shot in drawn), {"shot_rows": rows}

    @cached_property
    def _test(self) -> ProblemSet:
        return gsm8k_data.load(self.options.data, "test")

    @cached_property
    def _train(self) -> ProblemSet:
        return gsm8k_data.load(self.options.data, "train")

    @cached_property
    def _mini(self) -> ProblemSet:
        return gsm8k_data.from_file(gsm8k_data.MINI)


class Gsm8kCot(_WordProblems):
    """GSM8K with the same eight solved problems before each question, whose answers end in "The answer is N."

    Span: "affix" (the solved problems: the same ids in all samples).
    """

    name: ClassVar[str] = "gsm8k_cot"
    summary: ClassVar[str] = "word problems in arithmetic, eight fixed solved ones first (chain of thought)"
    source: ClassVar[str] = "https://arxiv.org/abs/2201.11903"
    subsets: ClassVar[tuple[str, ...]] = ("main",)
    default_subset: ClassVar[str] = "main"
    options_class: ClassVar[type[Options]] = Gsm8kCotOptions
    asked: ClassVar[str] = "Q:"
    answered: ClassVar[str] = "A:"
    strict: ClassVar[re.Pattern[str]] = COT_STRICT
    options: Gsm8kCotOptions

    def data(self, subset: str) -> str | None:
        """Hash of the user's own file."""
        return None if self.options.data is None else self._test.named()

    def _questions(self, subset: str) -> ProblemSet:
        self.check_subset(subset)
        return self._test

    def _shot_sets(self, subset: str) -> list[ProblemSet]:
        return []

    def _shots(self, subset: str, index: int, seed: int) -> tuple[str, dict[str, Any]]:
        return self._solved_text, {}

    def _affix(self, ids: Sequence[int]) -> int:
        """Up to the question. A token may reach into it, so ids are compared: with those of no question at all."""
        return common_prefix(ids, self._before) if self.options.shots else 0

    @cached_property
    def _solved_text(self) -> str:
        return "".join(self._solved(*shot) for shot in COT_SHOTS[: self.options.shots])

    @cached_property
    def _before(self) -> list[int]:
        return self.codec.wrap(self._solved_text + self.asked)

    @cached_property
    def _test(self) -> ProblemSet:
        return gsm8k_data.load(self.options.data, "test")
