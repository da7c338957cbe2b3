"""`dllm-bench run`: benchmark methods on a task, and keep every sample."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dllm_bench.models.hub import Model
    from dllm_bench.running.runner import Cell
    from dllm_bench.running.spec import Plan, Request
    from dllm_bench.running.store import Store
    from dllm_bench.running.task import Task

__all__ = ["as_asked", "cells_of", "execute", "interrupted", "run", "task_options"]

_DECODE = "Decoding"
_MODEL = "Model"

Methods = Annotated[
    list[str], typer.Option("--method", "-m", help="Cache method; a comma list runs one after another.")
]
TaskName = Annotated[str, typer.Option("--task", "-t", help="Task, such as ruler_niah, or TASK:SUBSET.")]
Ctx = Annotated[
    list[str] | None, typer.Option(help="Context length in tokens, such as 512,2k,32k.", show_default=False)
]
Subset = Annotated[
    list[str] | None, typer.Option(help="Subset of the task, or a group of them such as all.", show_default=False)
]
Samples = Annotated[int, typer.Option("--samples", "-n", help="Samples per cell.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Option of the method.")]
TaskSets = Annotated[list[str] | None, typer.Option("--task-set", metavar="KEY=VALUE", help="Option of the task.")]
Haystack = Annotated[
    str | None,
    typer.Option(metavar="FILE|DIR", help="Text of essay haystacks: --task-set haystack=…", show_default=False),
]
Data = Annotated[
    str | None,
    typer.Option(metavar="DIR|FILE", help="The task's data: --task-set data=…", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Seed of the samples and of their decoding.")]
Out = Annotated[Path, typer.Option(help="Results folder.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Drop the stored samples of this run and start over.")]

ModelName = Annotated[str, typer.Option("--model", help="Short name, folder, or hub id.", rich_help_panel=_MODEL)]
Dtype = Annotated[str, typer.Option(help="auto, float64, float32, bfloat16, float16.", rich_help_panel=_MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.", rich_help_panel=_MODEL)]
Rope = Annotated[str | None, typer.Option(help="ntk:FACTOR for longer contexts.", rich_help_panel=_MODEL)]
Template = Annotated[str, typer.Option(help="auto, llada, dream, plain.", rich_help_panel=_MODEL)]
Revision = Annotated[str | None, typer.Option(help="Hub revision instead of the pinned one.", rich_help_panel=_MODEL)]


def _decode(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=_DECODE, show_default=False)


GenLength = Annotated[int | None, _decode("Tokens to generate; the task's official budget.")]
Block = Annotated[int | None, _decode("Tokens per block; 32, or a number near it that divides the budget.")]
Steps = Annotated[int | None, _decode("Passes in all; chooses the quota rule.")]
Threshold = Annotated[float | None, _decode("Commit tokens at least this confident; 0.9.")]
Factor = Annotated[float | None, _decode("Fast-dLLM's factor rule.")]
PerPass = Annotated[int | None, _decode("Commit so many tokens in every pass.")]
Remasking = Annotated[str | None, _decode("low_confidence or random.")]
Temperature = Annotated[float | None, _decode("Noise of the sampling; 0 is greedy.")]
TopP = Annotated[float | None, _decode("Nucleus of Dream's sampling.")]
TopK = Annotated[int | None, _decode("Largest k of Dream's sampling.")]
Cfg = Annotated[float | None, _decode("Scale of classifier-free guidance.")]
Alg = Annotated[str | None, _decode("Dream's schedule.")]
AlgTemp = Annotated[float | None, _decode("Temperature of the choice of positions in Dream's schedules.")]
Eps = Annotated[float | None, _decode("Last time step of Dream's schedules.")]
NoEosStop = Annotated[bool, typer.Option("--no-eos-stop", help="Decode behind an EOS too.", rich_help_panel=_DECODE)]


def run(
    method: Methods,
    task: TaskName,
    ctx: Ctx = None,
    subset: Subset = None,
    samples: Samples = 20,
    model: ModelName = "tiny",
    set_: Sets = None,
    task_set: TaskSets = None,
    haystack: Haystack = None,
    data: Data = None,
    seed: Seed = 0,
    out: Out = Path("results/runs"),
    fresh: Fresh = False,
    gen_length: GenLength = None,
    block_length: Block = None,
    steps: Steps = None,
    threshold: Threshold = None,
    factor: Factor = None,
    tokens_per_pass: PerPass = None,
    remasking: Remasking = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    cfg_scale: Cfg = None,
    alg: Alg = None,
    alg_temp: AlgTemp = None,
    eps: Eps = None,
    no_eos_stop: NoEosStop = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    rope_scaling: Rope = None,
    chat_template: Template = "auto",
    revision: Revision = None,
) -> None:
    """Run a benchmark: one stored row per sample, and a table at the end. A rerun does only what is missing."""
    request, load = as_asked(locals())
    code = execute(request, load, out, fresh)
    if code:
        sys.exit(code)


def as_asked(given: Mapping[str, Any]) -> tuple[Request, dict[str, Any]]:
    """The request, and how its model is loaded, from the values of the flags above."""
    from dllm_bench.commands.generate import decode_values
    from dllm_bench.running.spec import Request

    # a run's seed makes the samples; each sample's decoding has a seed of its own
    decode = decode_values({name: value for name, value in given.items() if name != "seed"})
    lists = {name: given[name] or () for name in ("ctx", "subset", "set_")}
    request = Request(
        given["method"], given["task"], lists["ctx"], lists["subset"], given["samples"], given["seed"], decode,
        lists["set_"], task_options(given["task_set"], given["haystack"], given["data"]),
    )  # fmt: skip
    load = {name: given[name] for name in ("dtype", "device", "rope_scaling", "chat_template", "revision")}
    return request, {"spec": given["model"], **load}


def task_options(task_set: Sequence[str] | None, haystack: str | None, data: str | None) -> tuple[str, ...]:
    """`key=value` options of the task: those of --task-set, and those that have a flag of their own."""
    named = {"haystack": haystack, "data": data}
    return (*(task_set or ()), *(f"{name}={value}" for name, value in named.items() if value is not None))


def execute(request: Request, load: Mapping[str, Any], out: Path, fresh: bool) -> int:
    """Runs a request and prints its table; returns the exit code: 1 where a sample failed, 130 after Ctrl-C.

    Raises UserError, before anything is written, where the request cannot be met.
    """
    from rich.console import Console

    from dllm_bench.running.spec import check
    from dllm_bench.running.store import Store

    errors = Console(stderr=True)
    plan = check(request)
    store = Store(out)
    store.check_writable()
    cells: list[Cell] = []
    try:
        cells += _run(plan, load, store, fresh, errors)
    except KeyboardInterrupt:
        return interrupted(store, errors)
    keys = {key for cell in cells for key in cell.keys.values()}
    return _close(store, keys, errors)


def _run(plan: Plan, load: Mapping[str, Any], store: Store, fresh: bool, errors: Console) -> list[Cell]:
    """Loads the model and computes all cells."""
    import dllm_bench
    from dllm_bench.commands.progress import RunProgress
    from dllm_bench.running.choices import Judge
    from dllm_bench.running.environment import Environment
    from dllm_bench.running.runner import Runner

    model = dllm_bench.load_model(**load)
    task, cells, short = cells_of(plan, model)
    with RunProgress(errors, len(cells)) as progress:
        if short:
            progress.warn(short)
        environment = Environment.capture(model.device)
        judge = Judge(model, dllm_bench.loglikelihood, dllm_bench.generate)
        runner = Runner(model, task, store, dllm_bench.generate, environment, progress, dllm_bench.prepare, judge)
        runner.run(cells, fresh=fresh)
    store.compact()
    return cells


def cells_of(plan: Plan, model: Model) -> tuple[Task, list[Cell], str | None]:
    """The task, the cells of a plan, and a warning where the task has fewer samples than were asked for."""
    import dllm_bench
    from dllm_bench.running.runner import Cell
    from dllm_bench.running.spec import expand

    task, asked = plan.task_class(model.codec, plan.task_options), plan.request.samples
    cells = []
    for spec in expand(plan, model, task, dllm_bench.__version__):
        size = task.size(spec.subset)
        cells.append(Cell(spec, asked if size is None else min(size, asked)))
    few = sorted({f"{c.spec.task}/{c.spec.subset} has {c.samples}" for c in cells if c.samples < asked})
    return task, cells, f"fewer samples than the {asked} asked for: {', '.join(few)}" if few else None


def interrupted(store: Store, errors: Console) -> int:
    """Tells what is kept after Ctrl-C; returns the exit code."""
    store.compact()
    errors.print(
        f"stopped: {len(store)} rows are kept in {store.root}; the same command"
        " (without --fresh) goes on where it stopped",
        style="yellow",
        highlight=False,
        soft_wrap=True,
    )
    return 130


def _close(store: Store, keys: set[str], errors: Console) -> int:
    """Prints the table of the asked samples; names failed ones in one line."""
    from rich.console import Console

    from dllm_bench.reporting.leaderboard import COLUMNS_READ, leaderboard
    from dllm_bench.reporting.tables import print_sections
    from dllm_bench.running.schema import FAILED

    rows = [row for row in store.read([*COLUMNS_READ, "key", "error"]) if row["key"] in keys]
    print_sections(leaderboard(rows), Console())
    failed = [row for row in rows if row["status"] in FAILED]
    if failed:
        errors.print(_failures(failed, len(rows)), style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _failures(failed: Sequence[Mapping[str, Any]], total: int) -> str:
    counts = Counter(row["status"] for row in failed)
    words = {"masks_left": "with masks left (scored 0)", "oom": "out of memory", "error": "by an error"}
    told = ", ".join(f"{counts[status]} {text}" for status, text in words.items() if counts[status])
    first = next((row["error"] for row in failed if row["status"] == "error"), None)
    retry = "; the same command tries again what ran out of memory or raised" if counts["oom"] + counts["error"] else ""
    return f"{len(failed)} of {total} samples failed: {told}{f' ({first})' if first else ''}{retry}"
