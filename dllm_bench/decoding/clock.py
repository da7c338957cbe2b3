"""Where the seconds of one request go; the device is waited for around every timed region."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

__all__ = ["Clock"]


@dataclass
class Clock:
    """Seconds of one decode.

    Attributes:
        dense, partial: seconds of passes that started over all rows, and of the others.
        commit: seconds of sampling, choosing and writing tokens.
        passes: (kind, seconds) of each pass, in order.
        first_commit, first_block: seconds from the start to the first committed token, and to the first finished block.
    """

    device: torch.device
    dense: float = 0.0
    partial: float = 0.0
    commit: float = 0.0
    total: float = 0.0
    passes: list[tuple[str, float]] = field(default_factory=list)
    first_commit: float | None = None
    first_block: float | None = None
    _start: float = 0.0

    def now(self) -> float:
        """Seconds of the monotonic clock, after all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin(self) -> float:
        self._start = self.now()
        return self._start

    def passed(self, kind: str, seconds: float) -> None:
        """Books one pass."""
        self.passes.append((kind, seconds))
        if kind == "dense":
            self.dense += seconds
        else:
            self.partial += seconds

    def committed(self, now: float, seconds: float, tokens: int, block_done: bool) -> None:
        """Books the commit behind a pass."""
        self.commit += seconds
        if tokens and self.first_commit is None:
            self.first_commit = now - self._start
        if block_done and self.first_block is None:
            self.first_block = now - self._start

    def skip(self, seconds: float) -> None:
        """Leaves out what was spent on watching the decode."""
        self._start += seconds

    def end(self) -> None:
        self.total = self.now() - self._start

    def seconds(self) -> dict[str, float]:
        """The parts by name."""
        return {"dense": self.dense, "partial": self.partial, "commit": self.commit, "total": self.total}
