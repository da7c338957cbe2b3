"""What is asked for has to fit before anything runs: samples that are made of given texts are made once to see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dllm_bench.errors import UserError
from dllm_bench.running.spec import RunSpec
from dllm_bench.running.task import Task

if TYPE_CHECKING:
    from dllm_bench.models.hub import Model

__all__ = ["check_samples"]


def check_samples(model: Model, task: Task, asked: Sequence[tuple[RunSpec, Sequence[int]]]) -> None:
    """Makes every sample of a task whose texts come from data; `asked` holds cells with indices of samples.

    A task that needs a context length fills it, and refuses one that is too short whichever sample is asked for; there
    the last sample alone tells whether so many can be had.

    Raises UserError where a sample cannot be made for its context length, and, where nobody has chosen a length, where
    prompt and budget have more positions than the model is made for. Scaled rotary positions are a choice to go beyond.
    """
    checked: set[tuple[str, int | None, int, int, int]] = set()
    for spec, indices in asked:
        for index in indices[-1:] if task.ctx == "needed" else indices:
            facts = spec.subset, spec.ctx, spec.gen_length, spec.seed, index
            if facts not in checked:
                checked.add(facts)
                _check(model, task, spec, index)


def _check(model: Model, task: Task, spec: RunSpec, index: int) -> None:
    try:
        sample = task.sample(spec.subset, index, ctx=spec.ctx, gen_length=spec.gen_length, seed=spec.seed)
    except UserError:
        raise
    except Exception:  # whatever else a sample raises is told by its row
        return
    if spec.ctx is None and not spec.rope_scaling and sample.actual_ctx > model.max_positions:
        raise UserError(
            f"sample {index} of {spec.task}/{spec.subset} has {len(sample.prompt_ids)} tokens and {spec.gen_length} to "
            f"generate, more than the {model.max_positions} positions that {model.name} is made for: give a smaller "
            f"--gen-length, or options of the task that make shorter prompts (dllm-bench show {spec.task})"
        )
