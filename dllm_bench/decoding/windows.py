"""Windows: which masked positions may be committed in the next pass."""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.decoding.canvas import Canvas

__all__ = ["Blocks", "Window"]


@dataclass(frozen=True)
class Window:
    """What one pass may commit.

    Attributes:
        block: index of the block. start, stop: its positions, half-open.
        step: passes made in this block before this one; 0 is where a caching method refreshes.
        steps: passes that the block's schedule is spread over.
        candidates: masked positions that may be committed, ascending: those of the block, and those that an earlier
            block left over.
    """

    block: int
    start: int
    stop: int
    step: int
    steps: int
    candidates: tuple[int, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """The candidates inside the block."""
        return tuple(p for p in self.candidates if p >= self.start)


class Blocks:
    """Semi-autoregressive blocks from left to right; one block of the whole response is plain diffusion.

    A block ends when it has no mask left, or after `limit` passes where the method or the rule has one.
    """

    def __init__(self, canvas: Canvas, block_length: int, steps: int, limit: int | None = None) -> None:
        self._canvas, self._length, self._steps, self._limit = canvas, block_length, steps, limit
        self._block = 0
        self._step = 0

    def next(self) -> Window | None:
        """The next pass's window; None when the response is done."""
        canvas = self._canvas
        while canvas.start + self._block * self._length < canvas.stop:
            start = canvas.start + self._block * self._length
            stop = start + self._length
            candidates = tuple(p for p in canvas.masked if p < stop)
            fresh = any(p >= start for p in candidates)
            if fresh and (self._limit is None or self._step < self._limit):
                window = Window(self._block, start, stop, self._step, self._steps, candidates)
                self._step += 1
                return window
            self._block += 1
            self._step = 0
        return None
