"""Options of commands that read stored results: which of the rows they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dllm_bench.errors import UserError, choice

if TYPE_CHECKING:
    from dllm_bench.reporting.leaderboard import Row

__all__ = ["Contexts", "Subsets", "Tasks", "chosen"]

Tasks = Annotated[
    list[str] | None, typer.Option("--task", help="Show these tasks alone: gsm8k,ruler_niah.", show_default=False)
]
Subsets = Annotated[
    list[str] | None,
    typer.Option("--subset", help="Show these subsets alone: single_1,multivalue.", show_default=False),
]
Contexts = Annotated[
    list[str] | None, typer.Option("--ctx", help="Show these context lengths alone: 512,4k.", show_default=False)
]


def chosen(
    rows: list[Row],
    tasks: Sequence[str] | None = None,
    subsets: Sequence[str] | None = None,
    contexts: Sequence[str] | None = None,
) -> list[Row]:
    """The rows of these tasks, subsets and context lengths, each a list of names with commas; None: all.

    Raises UserError for a name that none of the rows has.
    """
    from dllm_bench.running.spec import members

    for column, texts in (("task", tasks), ("subset", subsets)):
        if texts is not None:
            rows = _named(rows, column, members(texts) or [""])
    return rows if contexts is None else _at(rows, members(contexts) or [""])


def _named(rows: list[Row], column: str, wanted: Sequence[str]) -> list[Row]:
    known = sorted({row[column] for row in rows})
    for name in wanted:
        if name not in known:
            raise choice(column, name, known)
    return [row for row in rows if row[column] in wanted]


def _at(rows: list[Row], texts: Sequence[str]) -> list[Row]:
    from dllm_bench.running.lengths import ctx_name, parse_ctx

    known = sorted({row["nominal_ctx"] for row in rows if row["nominal_ctx"] is not None})
    if not known:
        raise UserError("these results have no context lengths: leave --ctx out")
    wanted = [parse_ctx(text) for text in texts]
    for ctx in wanted:
        if ctx not in known:
            near = min(known, key=lambda one: abs(one - ctx))
            raise UserError(
                f"no results at context length '{ctx_name(ctx)}': nearest valid is {ctx_name(near)}; "
                f"valid: {', '.join(map(ctx_name, known))}"
            )
    return [row for row in rows if row["nominal_ctx"] in wanted]
