"""Writes the tables of README.md that show what was measured, from the rows of results/model and results/reference.

python scripts/readme_tables.py             # `make reference` calls it; rewrites what stands between <!-- NAME -->
                                            # and <!-- end -->
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable
from typing import Any

from rich.console import Console
from tiny_card import RESULTS, RULES, measured, table

from dllm_bench.reporting import fidelity, tables
from dllm_bench.reporting.leaderboard import COLUMNS_READ, leaderboard
from dllm_bench.running.fidelity_schema import FIDELITY
from dllm_bench.running.lengths import ctx_name
from dllm_bench.running.store import Store

README = RESULTS.parent / "README.md"
MODEL, REFERENCE = RESULTS / "model", RESULTS / "reference"
WIDTH = 92
USUAL = 200
"""Samples of a cell; other numbers are told."""


def accuracy() -> str:
    """A line per subset, a column per context: the score by each rule, and the samples all right where that differs."""
    found: dict[tuple[str, str, int | None, str], dict[str, Any]] = {}
    for record in measured(MODEL):
        cell = (record["task"], record["subset"], record["ctx"], record["rule"])
        if cell in found:
            raise ValueError(f"{MODEL} has more than one score for {cell}: rows of different settings or versions")
        found[cell] = record
    lengths = sorted({ctx for _, _, ctx, _ in found}, key=lambda ctx: ctx or 0)
    heads = ["no context" if ctx is None else ctx_name(ctx) for ctx in lengths]
    lines = []
    for task, subset in dict.fromkeys((task, subset) for task, subset, *_ in found):
        cells = [[found.get((task, subset, ctx, name)) for name in RULES] for ctx in lengths]
        lines.append([f"`{task}` `{subset}`", *map(joint, cells)])
    return table(["task, subset", *heads], lines)


def joint(cell: list[dict[str, Any] | None]) -> str:
    """The scores by each rule, up to the last one that was measured."""
    while cell and cell[-1] is None:
        cell = cell[:-1]
    return " / ".join(map(percent, cell))


def percent(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    score, right = (f"{100 * record[name]:.1f}".removesuffix(".0") for name in ("accuracy", "all_right"))
    notes = [*([f"all {right}"] if score != right else []), *([f"n {record['n']}"] if record["n"] != USUAL else [])]
    return f"{score} ({', '.join(notes)})" if notes else score


def board(task: str) -> str:
    """The leaderboard's table of one task. Raises ValueError for rows of several machines: speeds compare on one."""
    sections = [s for s in leaderboard(Store(REFERENCE).read(COLUMNS_READ)) if s.setting.task == task]
    if len(sections) != 1:
        titles = ", ".join(s.setting.title for s in sections) or "none"
        raise ValueError(f"{REFERENCE} must have rows of {task} in one setting, not of: {titles}; measure all anew")
    return printed(lambda console: tables.print_sections(sections, console))


def against(task: str) -> str:
    """The fidelity table of one task."""
    rows = [row for row in Store(REFERENCE, FIDELITY).read(fidelity.COLUMNS_READ) if row["task"] == task]
    if not rows:
        raise ValueError(f"{REFERENCE} has no fidelity rows of {task}")
    return printed(lambda console: fidelity.print_table(fidelity.summaries(rows), console))


def printed(show: Callable[[Console], None]) -> str:
    console = Console(width=WIDTH, file=(out := io.StringIO()), force_terminal=False)
    show(console)
    lines = (line.rstrip() for line in out.getvalue().rstrip().splitlines())
    return "\n".join(["```", *lines, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "problems": lambda: board("gsm8k"),
    "problems, fidelity": lambda: against("gsm8k"),
    "needles": lambda: board("ruler_niah"),
    "needles, fidelity": lambda: against("ruler_niah"),
}


def filled(text: str) -> str:
    """README with its tables made anew. Raises ValueError where it has no place for one of them."""
    for name, make in PARTS.items():
        place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"README.md has no '<!-- {name} -->' with an '<!-- end -->' behind it")
        made = make()
        text = place.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    try:
        text = filled(README.read_text(encoding="utf-8"))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
