"""LongBench v1 and LongBench-E by the official rules, and two mini sets of the same form that lie in the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from dllm_bench.errors import UserError
from dllm_bench.options import Options, option
from dllm_bench.running.task import Answer, Codec, Sample, Task
from dllm_bench.tasks.longbench_data import HUB_DATASET, Item, built_in, data_file, digest, from_file, from_hub
from dllm_bench.tasks.longbench_mini import MINI, MiniSource
from dllm_bench.tasks.longbench_scoring import best, bucket, first_line
from dllm_bench.tasks.longbench_sets import EXTENDED, GROUPS, SETS, base_name
from dllm_bench.tasks.middle_cut import TooShort, fitted

__all__ = ["LongBench", "LongBenchOptions"]

_BUCKETS = ("0-4k", "4-8k", "8k+")


@dataclass(frozen=True)
class LongBenchOptions(Options):
    """Options of longbench."""

    data: str | None = option(
        None,
        "folder with the official files (hotpotqa.jsonl, hotpotqa_e.jsonl, …; .jsonl.gz too); if not given, the hub's "
        "data set or its local cache, and the package for the mini sets",
    )

    def check(self) -> None:
        if self.data is not None and not Path(self.data).expanduser().is_dir():
            raise UserError(f"longbench option 'data': '{self.data}' is no folder")


class LongBench(Task):
    """The 21 data sets of LongBench, the 13 of LongBench-E (NAME_e), and the built-in mini_qa and mini_retrieval.

    A prompt that is longer than the context length allows is cut in the middle of its context: template, answer prefix
    and generation budget count, and the question always stays. The mini sets are filled up to a length that is asked
    for, and taken as they are without one.

    Spans: "needle" (mini sets: the answering sentence).
    Meta: id, dataset, language, length (in words or characters, from the data), all_classes, truncated,
    original_tokens (ids of the whole prompt); mini sets also paragraphs, answer_paragraph (its place from 1), cut_unit
    (whether a part of one more paragraph is there), and fill where a length was asked for.
    """

    name: ClassVar[str] = "longbench"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "LongBench v1 and LongBench-E: QA, summaries, few-shot, retrieval, code; two built-in sets"
    source: ClassVar[str] = "https://arxiv.org/abs/2308.14508"
    subsets: ClassVar[tuple[str, ...]] = (*SETS, *EXTENDED, *MINI)
    default_subset: ClassVar[str] = "hotpotqa"
    ctx: ClassVar[Literal["needed", "optional", "none"]] = "optional"
    options_class: ClassVar[type[Options]] = LongBenchOptions

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, LongBenchOptions):
            raise TypeError("longbench takes LongBenchOptions")
        self._folder = None if self.options.data is None else Path(self.options.data).expanduser()
        self._items: dict[str, list[Item]] = {}
        self._digests: dict[str, str] = {}
        self._sources: dict[str, MiniSource] = {}

    @classmethod
    def groups(cls) -> Mapping[str, tuple[str, ...]]:
        """all: the 21 official sets; en, zh, code: those of one kind; e: LongBench-E; mini: the built-in sets."""
        return {**GROUPS, "mini": tuple(MINI)}

    def budget(self, subset: str) -> int:
        """The official number of tokens to generate; 32 for the mini sets."""
        self.check_subset(subset)
        return MINI[subset].budget if subset in MINI else SETS[base_name(subset)].budget

    def default_ctx(self, subset: str, longest: int) -> int | None:
        """The model's largest position; None for the mini sets, whose items are taken as they are."""
        return None if subset in MINI else longest

    def size(self, subset: str) -> int:
        """Number of items."""
        return len(self._load(subset))

    def fetch(self, subset: str) -> list[str]:
        """Loads and checks the items, from the hub into its local cache where no folder is given."""
        where = str(self._folder or ("built in" if subset in MINI else f"hub {HUB_DATASET}"))
        return [f"longbench {subset}: {self.size(subset)} items ({where})"]

    def data(self, subset: str) -> str | None:
        """The subset's own file in the folder: its name and the hash of its content."""
        if self._folder is None:
            return None
        if subset not in self._digests:
            path = data_file(self._folder, subset)
            self._digests[subset] = f"file:{path.name}:{digest(path)}"
        return self._digests[subset]

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Item `index` of the file, for `ctx` tokens with the budget; None: neither cut nor filled.

        Raises UserError below the least length that holds instruction and question, which it names.
        """
        items = self._load(subset)
        if not 0 <= index < len(items):
            raise UserError(f"longbench {subset} has {len(items)} items: the nearest valid index is {len(items) - 1}")
        item = items[index]
        facts = {
            "id": item.id,
            "dataset": item.dataset,
            "language": item.language,
            "length": item.length,
            "all_classes": list(item.classes) or None,
        }
        made = self._mini if subset in MINI else self._official
        try:
            return made(Sample(self.name, subset, index, seed, (), item.answers, gen_length, ctx, meta=facts), item)
        except TooShort as error:
            raise UserError(
                f"longbench {subset}, item {index}: a context of {ctx} tokens does not hold its instruction and "
                f"question; with a generation budget of {gen_length} the minimum is {error.minimum + gen_length}"
            ) from None

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """The official metric of the data set, best over the references; facts: all_classes for trec and lsht."""
        cls.check_subset(subset)
        if subset in MINI:
            return {"score": best(MINI[subset].metric, answer.prediction, answer.references)}
        rules = SETS[base_name(subset)]
        classes = answer.facts.get("all_classes") or ()
        if rules.metric == "classification" and not _names(classes):
            raise UserError(
                f"longbench {subset} is scored with the names of all classes: 'all_classes' must list them as texts, "
                f"got {classes or None!r:.60}"
            )
        prediction = first_line(answer.prediction) if rules.first_line else answer.prediction
        return {"score": best(rules.metric, prediction, answer.references, classes)}

    @classmethod
    def aggregate(cls, subset: str, answers: Sequence[Answer], grades: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The mean in percent; for LongBench-E also that of each length bucket, None where it is empty.

        The official script prints nan for an empty bucket.
        """
        whole = super().aggregate(subset, answers, grades)
        if subset not in EXTENDED:
            return whole
        parts: dict[str, list[float]] = {name: [] for name in _BUCKETS}
        for answer, grade in zip(answers, grades, strict=True):
            length = answer.facts.get("length")
            if isinstance(length, bool) or not isinstance(length, int | float) or not isfinite(length):
                raise UserError(
                    f"longbench {subset} is scored by lengths: 'length' must be a number, got {length!r:.60}"
                )
            parts[bucket(length)].append(grade["score"])
        means = {name: round(100 * sum(part) / len(part), 2) if part else None for name, part in parts.items()}
        return {**whole, **means}

    def _load(self, subset: str) -> list[Item]:
        if subset not in self._items:
            self.check_subset(subset)
            rules = SETS.get(base_name(subset))
            needs = {
                "asks": rules is None or rules.asks,
                "classes": rules is not None and rules.metric == "classification",
            }
            if self._folder is not None:
                self._items[subset] = from_file(data_file(self._folder, subset), **needs)
            else:
                self._items[subset] = built_in(subset) if subset in MINI else from_hub(subset, **needs)
        return self._items[subset]

    def _official(self, blank: Sample, item: Item) -> Sample:
        rules = SETS[base_name(blank.subset)]
        before, after = rules.around(item.input)
        limit = None if blank.nominal_ctx is None else blank.nominal_ctx - blank.gen_length
        made = fitted(self.codec, before, item.context, after, limit=limit, template=rules.template)
        meta = {**blank.meta, "truncated": made.truncated, "original_tokens": made.original_tokens}
        # a stop string counts from the second token on, as in the official script
        return replace(
            blank, prompt_ids=tuple(made.ids), until=rules.until, lead="\n" if rules.until else "", meta=meta
        )

    def _mini(self, blank: Sample, item: Item) -> Sample:
        if blank.subset not in self._sources:
            self._sources[blank.subset] = MiniSource(self.codec, blank.subset, self._load(blank.subset))
        source, ctx = self._sources[blank.subset], blank.nominal_ctx
        whole = source.as_it_is(item)
        made, meta = whole, {**blank.meta, "truncated": False, "original_tokens": len(whole.ids)}
        if ctx is not None:
            made = source.filled(blank.index, ctx=ctx, gen_length=blank.gen_length, seed=blank.seed)
            meta["fill"] = (len(made.ids) + blank.gen_length) / ctx
        meta |= {"paragraphs": made.paragraphs, "answer_paragraph": made.place, "cut_unit": made.cut_unit}
        ids, spans = tuple(made.ids), {"needle": (made.needle,)}
        return replace(blank, prompt_ids=ids, references=made.references, spans=spans, meta=meta)


def _names(classes: object) -> bool:
    """Whether it is a list of class names, one at least."""
    return isinstance(classes, list | tuple) and bool(classes) and all(isinstance(name, str) for name in classes)
