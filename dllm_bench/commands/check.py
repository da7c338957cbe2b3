"""`dllm-bench check`: conformance of one method, built-in or third-party, on random fixture models."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dllm_bench.conformance.check import Result
    from dllm_bench.conformance.subject import Subject

__all__ = ["check"]

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


def check(
    method: Annotated[str, typer.Argument(help="Method spec, such as fast_dllm or fast_dllm+wavefilter.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Option of the method; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Check that a method keeps the rules: no state leaks, true counters, exact where promised, any model and length.

    Runs on tiny random models on the CPU, in seconds. Exit code 1 if a check fails.
    """
    from dllm_bench.caching.spec import parse_method, split_sets

    values = split_sets(sets or [])
    parse_method(method, values)  # bad input is told before torch is imported

    from rich.console import Console

    from dllm_bench.conformance.runner import CHECKS, run_checks
    from dllm_bench.conformance.subject import Subject

    subject, errors = Subject(method, values), Console(stderr=True)
    done: list[str] = []
    with errors.status("starting") as status:

        def seen(result: Result) -> None:
            done.append(result.name)
            status.update(f"{len(done)} of {len(CHECKS)} checks done")

        results = run_checks(subject, seen)
    failed = [result.name for result in results if result.status == "fail"]
    if as_json:
        typer.echo(json.dumps(_as_json(subject, results), indent=2))
    else:
        _print(subject, results, Console())
    if failed:
        line = f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}"
        errors.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _as_json(subject: Subject, results: list[Result]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "method": subject.spec.name,
        "options": subject.spec.options,
        "passed": all(result.status != "fail" for result in results),
        "seconds": round(sum(result.seconds for result in results), 3),
        "checks": [{**asdict(result), "seconds": round(result.seconds, 3)} for result in results],
    }


def _print(subject: Subject, results: list[Result], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("what it asks, or what is wrong", overflow="fold")
    for result in results:
        text = Text(result.detail or result.what, style="" if result.status == "pass" else _STYLES[result.status])
        table.add_row(result.name, Text(result.status, style=_STYLES[result.status]), text)
    console.print(Text(f"conformance of {subject.spec.label}, on random models of 3 layers"))
    console.print(table)
    counts = {status: sum(result.status == status for result in results) for status in _STYLES}
    seconds = sum(result.seconds for result in results)
    told = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {seconds:.1f} s"
    console.print(Text(told, style="green" if not counts["fail"] else "red"))
