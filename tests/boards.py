"""Rows of small made-up boards, and what the leaderboard makes of them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rows import make_row

from dllm_bench.reporting import tables
from dllm_bench.reporting.leaderboard import Section, leaderboard

FAST = {"method": "fast_dllm", "method_label": "fast_dllm"}
LONG = {"method": "fast_dllm+depthweave_kv+wavefilter", "method_label": "fast_dllm+depthweave_kv+wavefilter"}
SHARING = {"method": "acache", "method_label": "acache", "probe_seconds": 0.25, "probe_row_layers": 300}


def rows_of(n: int = 4, **changes: Any) -> list[dict[str, Any]]:
    return [
        make_row(
            **{
                "index": index,
                "needle_depths": None,
                "first_block_seconds": None,
                "memory_peak_bytes": None,
                "model_revision": None,
                "rope_scaling": None,
                **changes,
            }
        )
        for index in range(n)
    ]


def only(rows: list[dict[str, Any]]) -> Section:
    (section,) = leaderboard(rows)
    return section


def entry_of(rows: list[dict[str, Any]], method: str) -> Any:
    (cell,) = only(rows).cells
    return next(entry for entry in cell.entries if entry.method == method)


def board(width: int, rows: list[dict[str, Any]], *, by_subset: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    tables.print_sections(leaderboard(rows, by_subset=by_subset), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def sharing_rows() -> list[dict[str, Any]]:
    """Five samples of 10 tokens in 2 s each; two preparations of 5 s in all, for three and two of them."""
    rows = rows_of(5, **SHARING, shared_bytes=1000)
    for row, seconds, count in zip(rows, (4.0, None, None, 1.0, None), (1, 2, 3, 1, 2), strict=True):
        row |= {"preparation_seconds": seconds, "preparation_row_layers": seconds and 600, "shared_requests": count}
    return rows
