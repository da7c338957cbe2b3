"""`dllm-bench list` and `dllm-bench show`: what there is, and what one method does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from dllm_bench.errors import UserError, choice

if TYPE_CHECKING:
    from dllm_bench.caching.part import Part
    from dllm_bench.options import Options
    from dllm_bench.registry import Registry
    from dllm_bench.running.task import Task

__all__ = ["list_things", "show"]

KINDS = ("methods", "tasks", "models")


def list_things(kind: str = typer.Argument(..., metavar="methods|tasks|models", help="What to list.")) -> None:
    """List methods, tasks or models, with one line each."""
    if kind not in KINDS:
        raise choice("kind", kind, KINDS)
    rows = {"methods": _methods, "tasks": _tasks, "models": _models}[kind]()
    _table([kind.removesuffix("s"), "what it is"], rows)


def show(name: str = typer.Argument(..., help="A method (parts joined with +), a task or a model.")) -> None:
    """Show a method's paper, cost and options with their defaults (of each part of a+b; or a task, or a model)."""
    from dllm_bench.caching.part import METHODS
    from dllm_bench.models.hub import SHORT_NAMES
    from dllm_bench.running.task import TASKS

    if name in METHODS.names():
        _show_method(METHODS.get(name))
    elif "+" in name:
        _show_stack(name)
    elif name in TASKS.names():
        _show_task(TASKS.get(name))
    elif name in SHORT_NAMES:
        _show_model(name)
    else:
        raise choice("name", name, [*METHODS.names(), *TASKS.names(), *SHORT_NAMES])


def _methods() -> list[tuple[str, ...]]:
    from dllm_bench.caching.part import METHODS

    return [(name, _summary(METHODS, name)) for name in METHODS.names()]


def _tasks() -> list[tuple[str, ...]]:
    from dllm_bench.running.task import TASKS

    return [(name, _summary(TASKS, name)) for name in TASKS.names()]


def _summary(registry: Registry[Any], name: str) -> str:
    try:
        return _described(registry.get(name))
    except UserError as error:  # one broken plug-in must not hide the others
        return f"does not load: {error}"


def _models() -> list[tuple[str, ...]]:
    from dllm_bench.models.hub import SHORT_NAMES

    return [
        (name, short.summary + (f" ({short.source})" if short.source else "")) for name, short in SHORT_NAMES.items()
    ]


def _described(cls: Any) -> str:
    """The summary, with the caveat of a method that has one."""
    caveat = getattr(cls, "caveat", "")
    return str(cls.summary) + (f" [{caveat}]" if caveat else "")


def _show_stack(spec: str) -> None:
    """All parts of a method spec. Raises UserError where they do not fit together."""
    from dllm_bench.caching.part import METHODS
    from dllm_bench.caching.spec import parse_method

    for number, (part, _) in enumerate(parse_method(spec).parts):
        if number:
            typer.echo()
        _show_method(METHODS.get(part))


def _show_method(cls: type[Part]) -> None:
    typer.echo(f"{cls.name}: {_described(cls)}")
    if base := getattr(cls, "base", ""):
        typer.echo(f"alone  means {base}+{cls.name}")
    typer.echo(f"paper  {cls.paper}")
    typer.echo(f"cost   {cls.cost}")
    if cls.notes:
        typer.echo(f"notes  {cls.notes}")
    _options(cls.options_class, "--set")


def _show_task(cls: type[Task]) -> None:
    typer.echo(f"{cls.name} (version {cls.version}): {cls.summary}")
    typer.echo(f"source   {cls.source}")
    named = f"{', '.join(cls.subsets)} (default {cls.default_subset})"
    typer.echo(f"subsets  {named if cls.subsets else 'names of its source, checked when asked for'}")
    if len(cls.metrics) > 1:
        typer.echo(f"metrics  {', '.join(cls.metrics)} (the first is the score)")
    if cls.groups():
        typer.echo(f"groups   {', '.join(cls.groups())}")
    _options(cls.options_class, "--task-set")


def _show_model(name: str) -> None:
    from dllm_bench.models.hub import SHORT_NAMES, card_of

    short = SHORT_NAMES[name]
    typer.echo(f"{name}: {short.summary}")
    if short.source:
        typer.echo(f"hub       {short.source}")
        typer.echo(f"revision  {short.revision or 'main (not pinned)'}")
        typer.echo(f"template  {short.chat_template}")
    for key, value in card_of(name).items():
        typer.echo(f"{key}  {value}")


def _options(cls: type[Options], flag: str) -> None:
    from dllm_bench.options import describe

    rows = [(key, kind, _shown(default), text) for key, kind, default, text in describe(cls)]
    if not rows:
        typer.echo("options  none")
        return
    typer.echo(f"options ({flag} key=value)")
    _table(["option", "type", "default", "meaning"], rows)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(_shown(v) for v in value) + "]"
    return "none" if value is None else str(value)


def _table(header: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, title in enumerate(header):
        table.add_column(title, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)
