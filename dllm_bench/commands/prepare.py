"""`dllm-bench prepare`: fetches and checks all that later runs need, so that they need no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dllm_bench.commands import run as flags
from dllm_bench.errors import UserError

if TYPE_CHECKING:
    from dllm_bench.models.hub import ModelInfo
    from dllm_bench.running.task import Task

__all__ = ["prepare"]

_FILES = ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "dllm_bench.json")

TaskName = Annotated[
    str | None, typer.Option("--task", "-t", help="Task, such as ruler_niah, or TASK:SUBSET.", show_default=False)
]
WithWeights = Annotated[bool, typer.Option("--weights", help="Fetch the model's weights too.")]


def prepare(
    task: TaskName = None,
    subset: flags.Subset = None,
    model: flags.ModelName = "tiny",
    task_set: flags.TaskSets = None,
    haystack: flags.Haystack = None,
    data: flags.Data = None,
    weights: WithWeights = False,
    chat_template: flags.Template = "auto",
    revision: flags.Revision = None,
) -> None:
    """Fetch and check a task's data and a model's tokenizer once; afterwards runs need no network.

    Weights are fetched only with --weights, or by the first run.
    """
    from dllm_bench.models.hub import EMBEDDED, load_info
    from dllm_bench.running.spec import check_task

    options = flags.task_options(task_set, haystack, data)
    if task is None and (subset or options):
        raise UserError("--subset and options belong to a task: name it, such as --task ruler_niah")
    if task is None and model == EMBEDDED:
        raise UserError("name what to prepare: --task, such as --task ruler_niah, or --model, or both")
    asked = check_task(task, subset or (), options) if task is not None else None
    info = load_info(model, None, chat_template, revision, weights=weights)
    lines, missing = _model_lines(info, weights)
    if asked is not None:
        lines += _task_lines(asked.build(info.codec), asked.subsets)
    for line in lines:
        typer.echo(line)
    if missing:
        typer.echo(f"ready: show-prompt needs no network; run needs the weights of {model} too (add --weights)")
    else:
        typer.echo("ready: runs need no network")


def _model_lines(info: ModelInfo, weights: bool) -> tuple[list[str], list[str]]:
    """A line per file, and the names of missing weight files. Raises UserError where the weights were asked for."""
    from dllm_bench.models.checkpoint import missing_weights
    from dllm_bench.models.hub import EMBEDDED, fingerprint

    if info.name == EMBEDDED:
        return [f"model {info.name}: part of the package, nothing to fetch"], []
    missing = missing_weights(info.folder)
    if missing and weights:
        raise UserError(f"{info.folder / missing[0]} is missing: the weights of {info.name} are not complete")
    where = f"{info.source}, revision {info.revision or info.folder.name}" if info.source else "a folder here"
    lines = [f"model {info.name}: {where}{'' if info.source else ', nothing to fetch'}"]
    lines += [f"  {_file(info.folder / name)}" for name in _FILES if (info.folder / name).is_file()]
    if not missing:
        size = sum(path.stat().st_size for path in info.folder.glob("*.safetensors"))
        lines.append(f"  weights: {_size(size)}, fingerprint {fingerprint(info.folder)}, {info.folder}")
    return lines, missing


def _task_lines(task: Task, subsets: Sequence[str]) -> list[str]:
    """A line per source of each subset, and one for the subsets that need none."""
    lines, made = [], []
    for subset in subsets:
        sources, size = task.fetch(subset), task.size(subset)
        count = "" if size is None else f" ({size:,} samples)"
        if sources:
            lines += [f"task {task.name}/{subset}{count}:", *(f"  {line}" for line in sources)]
        else:
            made.append(f"{subset}{count}")
    if made:
        lines.append(f"task {task.name}: nothing to fetch for {', '.join(made)}")
    return lines


def _file(path: Path) -> str:
    import hashlib

    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"{path.name}: {_size(path.stat().st_size)}, SHA-256 {digest}…, {path}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
