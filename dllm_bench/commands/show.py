"""`dllm-bench list` and `dllm-bench show`: what there is, and what one method does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from dllm_bench.errors import UserError, choice

if TYPE_CHECKING:
    from dllm_bench.caching.part import Part
    from dllm_bench.options import Options
    from dllm_bench.registry import Registry
    from dllm_bench.running.task import Task

__all__ = ["list_things", "show"]

_READABLE = 100
"""Columns that a line of text may have; a table with less is narrow."""

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
    base = getattr(cls, "base", "")
    alone = f"means {base}+{cls.name}" if base else ""
    _facts({"alone": alone, "paper": cls.paper, "cost": cls.cost, "notes": cls.notes})
    _options(cls.options_class, "--set")


def _show_task(cls: type[Task]) -> None:
    typer.echo(f"{cls.name} (version {cls.version}): {cls.summary}")
    context = {"needed": "--ctx is needed", "optional": "--ctx, else what fits the model", "none": "no --ctx"}
    named = f"{', '.join(cls.subsets)} (default {cls.default_subset})"
    _facts(
        {
            "source": cls.source,
            "subsets": named if cls.subsets else "names of its source, checked when asked for",
            "groups": ", ".join(cls.groups()),
            "context": context[cls.ctx],
            "metrics": ", ".join(cls.metrics) + (" (the first is the score)" if len(cls.metrics) > 1 else ""),
        }
    )
    _options(cls.options_class, "--task-set")


def _show_model(name: str) -> None:
    from dllm_bench.models.hub import SHORT_NAMES, card_of

    short = SHORT_NAMES[name]
    typer.echo(f"{name}: {short.summary}")
    facts = {}
    if short.source:
        revision = short.revision or "main (not pinned)"
        facts = {"hub": short.source, "revision": revision, "template": short.chat_template}
    _facts({**facts, **card_of(name)})


def _facts(facts: Mapping[str, str]) -> None:
    """Names and values side by side: on a terminal long values are wrapped, elsewhere each is one line."""
    from rich.console import Console
    from rich.table import Table

    told, console = {name: value for name, value in facts.items() if value}, Console()
    if not console.is_terminal:
        width = max(map(len, told), default=0)
        for name, value in told.items():
            typer.echo(f"{name:{width}}  {value}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=_READABLE)
    for name, value in told.items():
        table.add_row(name, value)
    console.print(table, markup=False)


def _options(cls: type[Options], flag: str) -> None:
    from rich.console import Console

    from dllm_bench.options import describe

    rows = [(key, kind, _shown(default), text) for key, kind, default, text in describe(cls)]
    if not rows:
        typer.echo("options  none")
        return
    typer.echo(f"options ({flag} key=value)")
    if Console().width < _READABLE:  # no room for a column of types
        narrow = [(key, default, f"{text} ({kind})") for key, kind, default, text in rows]
        _table(["option", "default", "meaning"], narrow)
    else:
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
