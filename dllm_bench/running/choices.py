"""Samples that are judged by the likelihood of given answers: what is computed, and the columns of their rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.method import Method
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.spec import MethodSpec
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.models.counters import Counters
from dllm_bench.running.measure import percentile
from dllm_bench.running.rows import grade_columns
from dllm_bench.running.task import Sample, Task

if TYPE_CHECKING:
    from dllm_bench.api import Generation
    from dllm_bench.decoding.likelihood import Likelihood
    from dllm_bench.models.hub import Model

__all__ = ["Judge", "check_method", "greedy_settings"]


def check_method(spec: MethodSpec, task: str) -> None:
    """Raises UserError for a method that would take no part in a likelihood: its rows would praise it for nothing."""
    if not spec.build().uncached:
        classes = {name: METHODS.get(name) for name in METHODS.names()}
        valid = [name for name, cls in classes.items() if issubclass(cls, Method) and cls.uncached]
        raise UserError(
            f"this subset of task '{task}' is judged by likelihoods, which independent uncached passes estimate: "
            f"method '{spec.name}' takes no part in them; nearest valid: --method {' or '.join(valid)}"
        )


def greedy_settings(length: int, family: str) -> DecodeSettings:
    """Settings that give an answer of so many tokens greedily, one per pass, the surest of all positions first."""
    values = {"gen_length": length, "block_length": length, "tokens_per_pass": 1, "eos_stop": False}
    return DecodeSettings.make(values, family)


@dataclass(frozen=True)
class Judge:
    """Asks a model for likelihoods.

    Attributes:
        likelihood, generate: `dllm_bench.loglikelihood` and `dllm_bench.generate`, or stand-ins with their interface.
    """

    model: Model
    likelihood: Callable[..., Likelihood]
    generate: Callable[..., Generation]

    def columns(self, task: Task, sample: Sample, method: MethodSpec) -> dict[str, Any]:
        """The columns of a row. Nothing is generated, so tokens are null; each estimate's passes are counted."""
        asked = sample.choices
        assert asked is not None
        options = {"mc_num": asked.mc_num, "batch": asked.batch, "seed": asked.seed}
        found = [self.likelihood(self.model, *pair, **options) for pair in asked.pairs]
        decoded = [self.greedy(*pair, method) if asked.greedy else (False, None) for pair in asked.pairs]
        made = [generation for _, generation in decoded if generation is not None]
        text = json.dumps([[one.value, greedy] for one, (greedy, _) in zip(found, decoded, strict=True)])
        return {
            "text": text,
            "choice_loglikelihoods": [one.value for one in found],
            "status": "ok",
            **_cost_columns(found, made),
            **grade_columns(task, task.grades(sample, text)),
        }

    def greedy(
        self, context: Sequence[int], answer: Sequence[int], method: MethodSpec
    ) -> tuple[bool, Generation | None]:
        """Whether the method's greedy answer is the given one, and that answer; an empty answer is always given."""
        if not answer:
            return True, None
        settings = greedy_settings(len(answer), self.model.family)
        made = self.generate(self.model, context, method=method, decode=settings)
        return made.output_ids == list(answer), made


def _cost_columns(found: Sequence[Likelihood], made: Sequence[Generation]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for counters in [*(one.counters for one in found), *(one.counters for one in made)]:
        counts.update({f.name: getattr(counters, f.name) for f in fields(Counters)})
    names = ("nfe", "dense_passes", "row_layers", "projected_rows", "attended_rows", "head_rows", "selections")
    passes = [seconds for one in found for seconds in one.pass_seconds]
    passes += [seconds for one in made for _, seconds in one.pass_seconds]
    parts = {part: sum(one.seconds.get(part, 0.0) for one in made) for part in ("dense", "partial", "commit")}
    return {
        **{name: counts[name] for name in names},
        "decode_seconds": sum(one.seconds for one in found) + sum(one.seconds["total"] for one in made),
        "dense_seconds": parts["dense"] + sum(sum(one.pass_seconds) for one in found),
        "partial_seconds": parts["partial"],
        "commit_seconds": parts["commit"],
        "pass_seconds": passes,
        "pass_p50_seconds": percentile(passes, 50),
        "pass_p95_seconds": percentile(passes, 95),
        "cache_bytes_peak": max((one.cache_bytes_peak for one in made), default=0),
    }
