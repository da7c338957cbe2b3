"""Prompts whose length nobody chooses have to fit the model before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dllm_bench.errors import UserError
from dllm_bench.running.spec import RunSpec
from dllm_bench.running.task import Task

if TYPE_CHECKING:
    from dllm_bench.models.hub import Model

__all__ = ["check_positions"]


def check_positions(model: Model, task: Task, asked: Sequence[tuple[RunSpec, Sequence[int]]]) -> None:
    """Makes every sample of a task without context lengths once; `asked` holds cells with indices of samples.

    Raises UserError where prompt and budget have more positions than the model is made for. Scaled rotary positions
    are a choice to go beyond them.
    """
    if task.ctx != "none":
        return
    checked: set[tuple[str, int, int, int]] = set()
    for spec, indices in asked:
        for index in () if spec.rope_scaling else indices:
            facts = spec.subset, spec.gen_length, spec.seed, index
            if facts not in checked:
                checked.add(facts)
                _check(model, task, spec, index)


def _check(model: Model, task: Task, spec: RunSpec, index: int) -> None:
    sample = task.sample(spec.subset, index, ctx=None, gen_length=spec.gen_length, seed=spec.seed)
    if sample.actual_ctx > model.max_positions:
        raise UserError(
            f"sample {index} of {spec.task}/{spec.subset} has {len(sample.prompt_ids)} tokens and {spec.gen_length} to "
            f"generate, more than the {model.max_positions} positions that {model.name} is made for: give a smaller "
            f"--gen-length, or options of the task that make shorter prompts (dllm-bench show {spec.task})"
        )
