"""`dllm-bench fidelity`: how far a method's trajectory is from the uncached one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dllm_bench.commands import run as flags

if TYPE_CHECKING:
    from rich.console import Console

    from dllm_bench.running.runner import Cell
    from dllm_bench.running.spec import Plan, Request
    from dllm_bench.running.store import Store

__all__ = ["fidelity"]

Plot = Annotated[
    Path | None,
    typer.Option(metavar="FIG", help="Draw errors per layer and step: .png, .svg or .pdf.", show_default=False),
]


def fidelity(
    method: flags.Methods,
    task: flags.TaskName = "ruler_niah",
    ctx: flags.Ctx = None,
    subset: flags.Subset = None,
    samples: flags.Samples = 4,
    model: flags.ModelName = "tiny",
    set_: flags.Sets = None,
    task_set: flags.TaskSets = None,
    haystack: flags.Haystack = None,
    data: flags.Data = None,
    seed: flags.Seed = 0,
    out: flags.Out = Path("results/runs"),
    fresh: flags.Fresh = False,
    plot: Plot = None,
    gen_length: flags.GenLength = None,
    block_length: flags.Block = None,
    steps: flags.Steps = None,
    threshold: flags.Threshold = None,
    factor: flags.Factor = None,
    tokens_per_pass: flags.PerPass = None,
    remasking: flags.Remasking = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    cfg_scale: flags.Cfg = None,
    alg: flags.Alg = None,
    alg_temp: flags.AlgTemp = None,
    eps: flags.Eps = None,
    no_eos_stop: flags.NoEosStop = False,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
    rope_scaling: flags.Rope = None,
    chat_template: flags.Template = "auto",
    revision: flags.Revision = None,
) -> None:
    """Compare methods with the uncached trajectory, pass by pass: tokens, logits, drift, what is not read."""
    given = locals()
    from dllm_bench.running.task import TASKS

    if not ctx and TASKS.get(task.partition(":")[0]).ctx == "needed":
        given["ctx"] = ["1k"]
    request, load = flags.as_asked(given)
    code = _execute(request, load, out, fresh, plot)
    if code:
        sys.exit(code)


def _execute(request: Request, load: Mapping[str, Any], out: Path, fresh: bool, plot: Path | None) -> int:
    """Compares, prints the table and draws; returns the exit code: 1 where a sample failed, 130 after Ctrl-C.

    Raises UserError, before anything is written, where the request cannot be met.
    """
    from rich.console import Console

    from dllm_bench.reporting.figures import check_ending
    from dllm_bench.running.fidelity_schema import FIDELITY
    from dllm_bench.running.spec import check
    from dllm_bench.running.store import Store

    errors = Console(stderr=True)
    plan = check(request)
    if plot is not None:
        check_ending(plot)
    store = Store(out, FIDELITY)
    store.check_writable()
    cells: list[Cell] = []
    try:
        cells += _run(plan, load, store, fresh, errors)
    except KeyboardInterrupt:
        return flags.interrupted(store, errors)
    return _close(store, {key for cell in cells for key in cell.keys.values()}, plot, errors)


def _run(plan: Plan, load: Mapping[str, Any], store: Store, fresh: bool, errors: Console) -> list[Cell]:
    """Loads the model and compares all cells."""
    import dllm_bench
    from dllm_bench.commands.progress import FidelityTally, RunProgress
    from dllm_bench.running.environment import Environment
    from dllm_bench.running.fidelity import FidelityRunner

    model = dllm_bench.load_model(**load)
    task, cells, short = flags.cells_of(plan, model)
    with RunProgress(errors, len(cells), FidelityTally) as progress:
        if short:
            progress.warn(short)
        FidelityRunner(model, task, store, Environment.capture(model.device), progress).run(cells, fresh=fresh)
    store.compact()
    return cells


def _close(store: Store, keys: set[str], plot: Path | None, errors: Console) -> int:
    """Prints the table of the asked samples, and draws them where it was asked for."""
    from rich.console import Console

    from dllm_bench.reporting import fidelity, fidelity_figure

    rows = [row for row in store.read(fidelity.COLUMNS_READ) if row["key"] in keys]
    made = fidelity.summaries(rows)
    fidelity.print_table(made, Console())
    if plot is not None:
        fidelity_figure.save(made, plot)
        typer.echo(f"wrote {plot}")
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        text = f"{len(failed)} of {len(keys)} samples failed ({failed[0]['error']}); the same command tries them again"
        errors.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0
