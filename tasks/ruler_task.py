"""What RULER's tasks have in common: scores, finished samples, and samples that are drawn until one fits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from dllm_bench.errors import UserError
from dllm_bench.options import Options
from dllm_bench.running.task import Answer, Codec, Sample, Task
from dllm_bench.tasks.draft import Prompt, Whole
from dllm_bench.tasks.fitting import Asked
from dllm_bench.tasks.pieces import answer_joint
from dllm_bench.tasks.ruler_scoring import string_match_all

__all__ = ["REDRAWS", "Drawn", "DrawnTask", "RulerTask"]

PROBES = 32
"""Draws of which the largest sets the smallest context length."""

REDRAWS = 1000
"""Draws after which a sample is given up that does not fit."""

_LONG = 1 << 15

D = TypeVar("D", bound=Whole)


class RulerTask(Task):
    """A task of RULER.

    Spans: "affix" (all before the question), "question" (the question and all behind it) and "needle" (where the
    references come from; not in every task). Meta: fill, and needle_depths (percent of the context's tokens before
    each needle) where there are needles.
    """

    source: ClassVar[str] = "https://arxiv.org/abs/2404.06654"
    tokens: ClassVar[int]

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        self._joint = answer_joint(codec)

    def budget(self, subset: str) -> int:
        """NVIDIA/RULER's tokens_to_generate."""
        self.check_subset(subset)
        return self.tokens

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """Share of the references that the answer names (NVIDIA's string_match_all, as a share)."""
        return {"score": string_match_all(answer.prediction, answer.references)}

    def _length(self, ctx: int | None) -> int:
        if ctx is None:
            raise UserError(f"{self.name} needs a context length in tokens (nearest valid: 4096)")
        return ctx

    def _too_small(self, asked: Asked, least: int) -> UserError:
        return UserError(
            f"a context of {asked.ctx} tokens is too small for {self.name} {asked.subset} with a generation budget of "
            f"{asked.gen_length}: the minimum is {least}"
        )

    def _finished(
        self,
        asked: Asked,
        prompt: Prompt,
        needles: tuple[tuple[int, int], ...],
        references: tuple[str, ...],
        meta: Mapping[str, Any],
        affix: int | None = None,
    ) -> Sample:
        """The sample. `affix`: ids that it shares with others where that is less than all before the question."""
        first, last = prompt.context
        spans: dict[str, tuple[tuple[int, int], ...]] = {
            "question": ((last, len(prompt.ids)),),
            "affix": ((0, last if affix is None else affix),),
        }
        facts: dict[str, Any] = {"fill": (len(prompt.ids) + asked.gen_length) / asked.ctx}
        if needles:
            spans = {"needle": needles, **spans}
            depths = [round(100 * (start - first) / (last - first), 2) for start, _ in needles]
            facts = {"needle_depths": depths, **facts}
        return Sample(
            task=self.name,
            subset=asked.subset,
            index=asked.index,
            seed=asked.seed,
            prompt_ids=tuple(prompt.ids),
            references=references,
            gen_length=asked.gen_length,
            nominal_ctx=asked.ctx,
            spans=spans,
            meta={**facts, **meta},
        )


@dataclass(frozen=True)
class Drawn(Generic[D]):
    """A sample that was drawn and is still to be sized.

    Attributes:
        needles: for each reference the number of its needle; empty where a task has no needles.
    """

    draft: D
    references: tuple[str, ...]
    needles: tuple[int, ...] = ()


class DrawnTask(RulerTask, Generic[D]):
    """A task without data of its own: each sample is drawn by a private generator."""

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        self._minima: dict[tuple[int, int], int] = {}

    def minimum(self, subset: str, gen_length: int, ctx: int = 0) -> int:
        """Smallest context length in tokens, from `ctx` on: what must be there, wording, template and budget."""
        self.check_subset(subset)
        return self._largest_probe(gen_length, _LONG)

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Sample `index` for `ctx` tokens. Raises UserError below `minimum(subset, gen_length)`."""
        asked = Asked(subset, index, self._length(ctx), gen_length, seed)
        least = self.minimum(subset, gen_length, asked.ctx)
        if asked.ctx < least:
            raise self._too_small(asked, least)
        for attempt in range(REDRAWS):
            drawn = self._drawn(asked.ctx, self.name, self.version, asked.ctx, index, seed, attempt)
            filled = self._filled(drawn.draft, asked)
            if filled:
                prompt, size = filled
                needles = tuple(prompt.needles[i] for i in drawn.needles)
                return self._finished(asked, prompt, needles, drawn.references, drawn.draft.facts(*size))
        raise self._too_small(asked, least + 64)

    @abstractmethod
    def _drawn(self, ctx: int, *facts: object) -> Drawn[D]:
        """A sample for a context length by generators that depend on the facts alone."""

    def _filled(self, draft: D, asked: Asked) -> tuple[Prompt, tuple[int, str]] | None:
        """The prompt and its size; None where it does not fit."""
        size = draft.fitted(asked)
        return (draft.prompt(*size), size) if size else None

    def _largest_probe(self, gen_length: int, ctx: int) -> int:
        """Tokens of the largest of some samples of no size, and the budget."""
        if (gen_length, ctx) not in self._minima:
            drafts = (self._drawn(ctx, self.name, "probe", i).draft for i in range(PROBES))
            self._minima[gen_length, ctx] = max(len(draft.encode(0)) for draft in drafts) + gen_length
        return self._minima[gen_length, ctx]
