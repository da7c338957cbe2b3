"""Options of commands that read stored results: which of the rows they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from dllm_bench.errors import choice

if TYPE_CHECKING:
    from dllm_bench.reporting.leaderboard import Row

__all__ = ["Contexts", "Subsets", "Tasks", "chosen"]

Tasks = Annotated[
    str | None, typer.Option("--task", help="Only this task, or several: gsm8k,ruler_niah.", show_default=False)
]
Subsets = Annotated[
    str | None, typer.Option("--subset", help="Only this subset, or several: single_1,multivalue.", show_default=False)
]
Contexts = Annotated[
    str | None, typer.Option("--ctx", help="Only this context length, or several: 512,4k.", show_default=False)
]


def chosen(rows: list[Row], tasks: str | None, subsets: str | None, contexts: str | None) -> list[Row]:
    """The rows of these tasks, subsets and context lengths, each several names with commas; None: all.

    Raises UserError for a name that none of the rows has.
    """
    from dllm_bench.running.lengths import ctx_name, parse_ctx

    def context(row: Row) -> str:
        return "" if row["nominal_ctx"] is None else ctx_name(row["nominal_ctx"])

    rows = _of(rows, "task", tasks, lambda row: str(row["task"]))
    rows = _of(rows, "subset", subsets, lambda row: str(row["subset"]))
    lengths = None if contexts is None else ",".join(ctx_name(parse_ctx(text)) for text in contexts.split(","))
    return _of(rows, "context length", lengths, context)


def _of(rows: list[Row], kind: str, names: str | None, name: Callable[[Row], str]) -> list[Row]:
    if names is None:
        return rows
    wanted = [text.strip() for text in names.split(",")]
    ordered = sorted(rows, key=lambda row: (row["nominal_ctx"] or 0, row["task"], row["subset"]))
    known = list(dict.fromkeys(filter(None, map(name, ordered))))
    for one in wanted:
        if one not in known:
            raise choice(kind, one, known)
    return [row for row in rows if name(row) in wanted]
