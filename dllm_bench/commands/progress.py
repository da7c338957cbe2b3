"""What `dllm-bench run` shows on stderr while it works."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from dllm_bench.running.runner import Cell

__all__ = ["FidelityTally", "RunProgress", "RunTally"]


class Tally(Protocol):
    """Running sums of one cell, and how they are told."""

    def add(self, row: Mapping[str, Any]) -> None: ...

    @property
    def text(self) -> str: ...


class RunTally:
    """Score and speed of one cell."""

    def __init__(self) -> None:
        self.score = 0.0
        self.scored = self.tokens = self.failed = 0
        self.seconds = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        if row.get("score") is not None:
            self.score += row["score"]
            self.scored += 1
        if row.get("decode_seconds") is not None and row.get("useful_tokens") is not None:
            self.seconds += row["decode_seconds"]
            self.tokens += row["useful_tokens"]
        self.failed += row["status"] != "ok"

    @property
    def text(self) -> str:
        """Accuracy and speed so far."""
        accuracy = f"{100 * self.score / self.scored:5.1f} %" if self.scored else "    – %"
        speed = f"{self.tokens / self.seconds:7.1f} tok/s" if self.seconds > 0 else "      – tok/s"
        return f"{accuracy} {speed}" + (f" {self.failed} failed" if self.failed else "")


class FidelityTally:
    """Agreement with the uncached trajectory, and divergence from it."""

    def __init__(self) -> None:
        self.compared = self.agreeing = self.counted = self.failed = 0
        self.divergence = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        self.compared += row["compared"]
        self.agreeing += row["agreeing"]
        self.divergence += row["kl_sum"]
        self.counted += row["kl_count"]
        self.failed += row["status"] != "ok"

    @property
    def text(self) -> str:
        """Agreement and divergence so far."""
        agreement = f"{100 * self.agreeing / self.compared:5.1f} % agree" if self.compared else "    – % agree"
        divergence = f"KL {self.divergence / self.counted:.2g}" if self.counted else "KL –"
        return f"{agreement} {divergence}" + (f" {self.failed} failed" if self.failed else "")


class RunProgress:
    """A bar on a terminal, one plain line per cell elsewhere. Use it as a context manager around the run."""

    def __init__(self, console: Console, cells: int, tally: Callable[[], Tally] = RunTally) -> None:
        self.console, self.cells, self.number = console, cells, 0
        self._make_tally, self._tally = tally, tally()
        self._begun = time.perf_counter()
        self._missing = 0
        self._bar: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            transient=True,
        )

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, cell: Cell, missing: int) -> None:
        """A cell begins."""
        self.number += 1
        self._tally, self._missing, self._begun = self._make_tally(), missing, time.perf_counter()
        if missing and not self._progress.disable:
            name = escape(f"{self._place()}{cell.spec.label}")
            self._bar = self._progress.add_task(name, total=missing, told=self._tally.text)

    def row(self, row: Mapping[str, Any]) -> None:
        """A sample is stored."""
        self._tally.add(row)
        if self._bar is not None:
            self._progress.update(self._bar, advance=1, told=self._tally.text)

    def end(self, cell: Cell) -> None:
        """A cell is complete: its bar gives way to a line."""
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
        kept = cell.samples - self._missing
        told = [f"{self._missing} samples" if self._missing else "nothing to do"]
        if kept:
            told.append(f"{kept} kept")
        if self._missing:
            told += [" ".join(self._tally.text.split()), f"{time.perf_counter() - self._begun:.1f} s"]
        self._say(f"{self._place()}{cell.spec.label}: {', '.join(told)}")

    def warn(self, message: str) -> None:
        """One line that stays."""
        self._say(f"warning: {message}", style="yellow")

    def _place(self) -> str:
        return f"[{self.number}/{self.cells}] " if self.cells > 1 else ""

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
