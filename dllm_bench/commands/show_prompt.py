"""`dllm-bench show-prompt`: the exact prompt of one sample, made without the model's weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dllm_bench.commands import run as flags
from dllm_bench.errors import UserError

if TYPE_CHECKING:
    from dllm_bench.models.hub import ModelInfo
    from dllm_bench.running.spec import TaskRequest
    from dllm_bench.running.task import Sample, Task

__all__ = ["abbreviated", "show_prompt"]

_SHOWN = 3000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Index = Annotated[int, typer.Option(help="Number of the sample, from 0.")]
Full = Annotated[bool, typer.Option("--full", help="Show a long prompt whole on a terminal too.")]
Ids = Annotated[bool, typer.Option("--ids", help="Print the ids alone, as generate --prompt-ids takes them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; with --ids it holds the ids too.")]


def show_prompt(
    task: flags.TaskName,
    ctx: flags.Ctx = None,
    subset: flags.Subset = None,
    index: Index = 0,
    model: flags.ModelName = "tiny",
    task_set: flags.TaskSets = None,
    haystack: flags.Haystack = None,
    data: flags.Data = None,
    gen_length: flags.GenLength = None,
    seed: flags.Seed = 0,
    full: Full = False,
    ids: Ids = False,
    as_json: Json = False,
    chat_template: flags.Template = "auto",
    revision: flags.Revision = None,
) -> None:
    """Show the exact prompt of a sample, as run with the same options gives it to the model.

    Piped output is whole; on a terminal the middle of a long prompt is left out, with a note.
    """
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.models.hub import load_info
    from dllm_bench.running.spec import check_ctxs, check_task

    asked = check_task(task, subset or (), flags.task_options(task_set, haystack, data))
    ctxs = check_ctxs(asked, ctx or ())
    for what, values in (("subset", asked.subsets), ("context length", ctxs)):
        if len(values) > 1:
            raise UserError(f"a prompt has one {what}, not {len(values)}: nearest valid is {values[0]}")
    for what, number in (("index", index), ("seed", seed)):
        if number < 0:
            raise UserError(f"{what} must be at least 0 (nearest valid: 0), got {number}")
    if gen_length is not None:
        DecodeSettings.make({"gen_length": gen_length})
    info = load_info(model, None, chat_template, revision)
    made, sample = _made(asked, info, ctxs[0], index, seed, gen_length)
    if ids and not as_json:
        typer.echo(json.dumps(list(sample.prompt_ids)))
        return
    facts = _facts(made, sample, info)
    text = info.codec.show(sample.prompt_ids)
    if as_json:
        told = {**facts, **({"prompt_ids": list(sample.prompt_ids)} if ids else {}), "prompt": text}
        typer.echo(json.dumps(told, ensure_ascii=False, default=list))
        return
    for line in _lines(facts):
        typer.echo(line)
    typer.echo(_for_terminal(text, full) if sys.stdout.isatty() else text)


def _made(
    asked: TaskRequest, info: ModelInfo, ctx: int | None, index: int, seed: int, gen_length: int | None
) -> tuple[Task, Sample]:
    """The sample, by the same rules as in a run. Raises UserError for an index that the task does not have."""
    from dllm_bench.running.spec import generation_budget

    task, [subset] = asked.build(info.codec), asked.subsets
    size = task.size(subset)
    if size is not None and index >= size:
        raise UserError(f"{asked.name}/{subset} has {size} samples: nearest valid index is {size - 1}, got {index}")
    budget = generation_budget({"gen_length": gen_length}, task.budget(subset), info.decode_defaults)
    ctx = task.default_ctx(subset, info.max_positions) if ctx is None else ctx
    return task, task.sample(subset, index, ctx=ctx, gen_length=budget, seed=seed)


def _facts(task: Task, sample: Sample, info: ModelInfo) -> dict[str, Any]:
    """What a row tells of the prompt, by the names of its columns."""
    from dllm_bench.running.rows import prompt_hash

    return {
        "task": task.name,
        "task_version": task.version,
        "task_options": task.options.as_dict(),
        "task_data": task.data(sample.subset),
        "subset": sample.subset,
        "index": sample.index,
        "seed": sample.seed,
        "model": info.name,
        "model_revision": info.revision,
        "chat_template": info.chat_template,
        "codec": info.codec.identity(),
        "prompt_hash": prompt_hash(sample.prompt_ids),
        "prompt_tokens": len(sample.prompt_ids),
        "gen_length": sample.gen_length,
        "actual_ctx": sample.actual_ctx,
        "nominal_ctx": sample.nominal_ctx,
        "beyond_max_positions": sample.actual_ctx > info.max_positions,
        "references": list(sample.references),
        "choices": None if sample.choices is None else [info.codec.show(answer) for _, answer in sample.choices.pairs],
        "until": list(sample.until),
        "spans": {name: [list(span) for span in spans] for name, spans in sample.spans.items()},
        "sample_meta": dict(sample.meta),
    }


def _lines(facts: Mapping[str, Any]) -> list[str]:
    f = facts
    asked = "" if f["nominal_ctx"] is None else f" of {f['nominal_ctx']}"
    beyond = ", beyond the model's positions" if f["beyond_max_positions"] else ""
    data = "" if f["task_data"] is None else f", data {f['task_data']}"
    spans = [f"{name} {start}:{stop}" for name, ranges in f["spans"].items() for start, stop in ranges]
    return [
        f"task        {f['task']}/{f['subset']}, version {f['task_version']}{data}",
        f"sample      index {f['index']}, seed {f['seed']}",
        f"model       {f['model']}{'' if f['model_revision'] is None else ' at ' + f['model_revision']}",
        f"template    {f['chat_template']}, hash of tokenizer and template {f['codec']}",
        f"prompt      {f['prompt_tokens']} ids, hash {f['prompt_hash']}",
        f"budget      {f['gen_length']} tokens to generate",
        f"context     {f['actual_ctx']}{asked} tokens: prompt and budget{beyond}",
        f"references  {_json(f['references'])}",
        f"until       {_json(f['until'])}",
        *([] if f["choices"] is None else [f"choices     {_json(f['choices'])}"]),
        f"spans       {', '.join(spans) or 'none'}",
        f"meta        {_json(f['sample_meta'])}",
        "--- prompt ---",
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=list)


def _for_terminal(text: str, full: bool) -> str:
    """The text with control characters spelled out, since a terminal would obey them."""
    safe = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    return safe if full else abbreviated(safe)


def abbreviated(text: str, limit: int = _SHOWN) -> str:
    """A text of more than `limit` characters without its middle, which a note stands for."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    half = limit // 2
    note = f"[… {left_out:,} characters left out here; --full shows them …]"
    return f"{text[: limit - half]}\n{note}\n{text[len(text) - half :]}"
