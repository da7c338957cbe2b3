"""`dllm-bench leaderboard`: the table of stored results."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dllm_bench.commands.chosen import Contexts, Subsets, Tasks, chosen
from dllm_bench.errors import UserError

if TYPE_CHECKING:
    from dllm_bench.reporting.leaderboard import Row

__all__ = ["leaderboard", "stored_rows"]


class Format(StrEnum):
    """Ways to print the leaderboard."""

    table = "table"
    csv = "csv"
    json = "json"
    md = "md"


def stored_rows(folder: Path | None) -> tuple[Path, list[Row]]:
    """The rows that tables and figures are made of, and their folder: results/runs, else results/reference.

    Raises UserError where there are none.
    """
    from dllm_bench.reporting.leaderboard import COLUMNS_READ
    from dllm_bench.running.store import Store

    place = folder
    if place is None:
        places = [Path("results/runs"), Path("results/reference")]
        place = next((one for one in places if Store(one).files()), None)
        if place is None:
            raise UserError(
                "there are no results in results/runs or results/reference: make some with 'dllm-bench run'"
            )
    if not place.is_dir():
        raise UserError(f"there is no folder '{place}': name one that 'dllm-bench run --out' has written")
    rows = Store(place).read(COLUMNS_READ)
    if not rows:
        below = sorted({file.parent for file in place.rglob("*.parquet") if not file.name.startswith(".")})
        hint = f"there are some in '{below[0]}'" if below else "make some with 'dllm-bench run --out'"
        raise UserError(f"there are no results in '{place}': {hint}")
    return place, list(rows)


def leaderboard(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Results folder; results/runs, else results/reference.", show_default=False),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
    task: Tasks = None,
    subset: Subsets = None,
    ctx: Contexts = None,
    by_subset: Annotated[bool, typer.Option("--by-subset", help="Show the task's subsets apart.")] = False,
) -> None:
    """Compare methods: score, useful tokens per second, speed-up over the baseline, passes, cache size."""
    from dllm_bench.reporting import tables
    from dllm_bench.reporting.leaderboard import leaderboard as make

    _, rows = stored_rows(folder)
    sections = make(chosen(rows, task, subset, ctx), by_subset=by_subset)
    if format is Format.table:
        from rich.console import Console

        tables.print_sections(sections, Console())
        return
    text = {Format.csv: tables.to_csv, Format.json: tables.to_json, Format.md: tables.to_markdown}[format]
    typer.echo(text(sections))
