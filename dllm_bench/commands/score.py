"""`dllm-bench score` and `dllm-bench rescore`: scores of answers that exist already."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dllm_bench.errors import UserError

if TYPE_CHECKING:
    from dllm_bench.running.rescoring import Rescored
    from dllm_bench.running.scoring import Scored
    from dllm_bench.running.store import Store
    from dllm_bench.running.task import Task

__all__ = ["rescore", "score"]


def score(
    task: Annotated[str, typer.Option("--task", "-t", help="Task, such as ruler_niah, or TASK:SUBSET.")],
    predictions: Annotated[
        str, typer.Option(metavar="FILE|-", help="JSON lines with prediction and references; - reads standard input.")
    ],
    subset: Annotated[str | None, typer.Option(help="Subset of the task.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help='Print {"values": […], "aggregate": x}.')] = False,
) -> None:
    """Score stored answers by a task's official rules, without a model.

    A line holds prediction, references (one or a list) and the facts that the task is scored by, such as all_classes.
    Values are in 0..1, the aggregate is in percent.
    """
    from dllm_bench.running.scoring import score_answers

    name, _, short = task.partition(":")
    found, chosen = _task(name, subset, short)
    source = "standard input" if predictions == "-" else predictions
    scored = score_answers(found, chosen, _objects(predictions, source), source)
    if as_json:
        typer.echo(json.dumps(scored.plain(), ensure_ascii=False, allow_nan=False))
    else:
        _print(scored, f"{name} · {chosen} (scorer version {found.scorer_version})")


def _task(name: str, subset: str | None, short: str) -> tuple[type[Task], str]:
    from dllm_bench.running.task import TASKS

    found = TASKS.get(name)
    if subset and short and subset != short:
        raise UserError(f"--task {name}:{short} and --subset {subset} name two subsets: leave one of them out")
    chosen = subset or short or found.default_subset
    if chosen in found.groups() and chosen not in found.subsets:
        raise UserError(
            f"score takes one subset at a time, and {chosen} stands for several: nearest valid is "
            f"--subset {found.groups()[chosen][0]}"
        )
    found.check_subset(chosen)
    return found, chosen


def _objects(predictions: str, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    from dllm_bench.jsonl import file_objects, json_objects

    return json_objects(sys.stdin.buffer, source) if predictions == "-" else file_objects(Path(predictions))


def _print(scored: Scored, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("line", justify="right")
    for name in scored.grades[0]:
        table.add_column(name, justify="right")
    for line, grades in zip(scored.lines, scored.grades, strict=True):
        table.add_row(str(line), *(f"{value:.4f}" for value in grades.values()))
    console = Console()
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    told = ", ".join(f"{name} {value}" for name, value in scored.aggregate.items())
    console.print(f"{len(scored.lines)} answers, in percent: {told}", markup=False, highlight=False, soft_wrap=True)


def rescore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder.")],
    task: Annotated[
        list[str] | None, typer.Option("--task", "-t", help="Only rows of this task.", show_default=False)
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also rows that the scorer's current version scored.")] = False,
) -> None:
    """Score stored answers again where a task's scorer has changed; the former scores stay in the rows.

    Nothing is decoded. Rows of tasks that are not installed are kept as they are. Don't use it while a run writes to
    the same folder.
    """
    from dllm_bench.running.rescoring import rescored
    from dllm_bench.running.store import Store

    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}': name one that 'dllm-bench run --out' has written")
    store = Store(folder)
    store.check_writable()
    found = rescored(_rows(store, task or ()), every=all_)
    if found.rows:
        store.replace(*found.rows)
    for line in _told(found):
        typer.echo(line)


def _rows(store: Store, tasks: list[str] | tuple[()]) -> list[dict[str, Any]]:
    from dllm_bench.running.task import TASKS

    for name in tasks:
        TASKS.get(name)
    rows = store.read()
    chosen = [row for row in rows if not tasks or row["task"] in tasks]
    if not chosen:
        held = ", ".join(sorted({row["task"] for row in rows}))
        raise UserError(f"'{store.root}' holds no rows" + (f" of {', '.join(tasks)}: it has {held}" if held else ""))
    return chosen


def _told(found: Rescored) -> list[str]:
    lines = []
    for (task, subset), made in found.outcomes.items():
        line = f"{task}/{subset}: {_count(made.rows)} scored by version {made.version}, {made.changed} changed"
        if made.changed and made.compared:
            before, after = (100 * total / made.compared for total in (made.before, made.after))
            line += f" (mean score {before:.2f} % before, {after:.2f} % now)"
        lines.append(line)
    if found.current:
        lines.append(f"scored by the current version already: {_count(found.current)} (--all scores them again)")
    if found.unanswered:
        lines.append(f"without an answer: {_count(found.unanswered)}")
    return [*lines, *(f"kept as it is: {_count(count)}, {why}" for why, count in found.kept.items())]


def _count(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"
