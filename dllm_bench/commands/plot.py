"""`dllm-bench plot`: figures of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dllm_bench.commands.chosen import Contexts, Subsets, Tasks, chosen
from dllm_bench.commands.leaderboard import stored_rows

__all__ = ["plot"]


def plot(
    out: Annotated[Path, typer.Option(metavar="FIG", help="Picture to write: .png, .svg or .pdf.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Results folder; results/runs, else results/reference.", show_default=False),
    ] = None,
    task: Tasks = None,
    subset: Subsets = None,
    ctx: Contexts = None,
    by_subset: Annotated[bool, typer.Option("--by-subset", help="Show the task's subsets apart.")] = False,
) -> None:
    """Draw score and speed against the actual context, and where in the context needles are found.

    A line stands for a method; where a task was run by one method in one way, for a subset.
    """
    from dllm_bench.reporting import figures
    from dllm_bench.reporting.leaderboard import leaderboard

    figures.check_ending(out)
    _, rows = stored_rows(folder)
    figures.save(leaderboard(chosen(rows, task, subset, ctx), by_subset=by_subset, lone_apart=True), out)
    typer.echo(f"wrote {out}")
