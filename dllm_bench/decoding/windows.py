"""Windows: which masked positions may be committed in the next pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from dllm_bench.decoding.canvas import Canvas

__all__ = ["Blocks", "Sliding", "Window", "Windows"]


@dataclass(frozen=True)
class Window:
    """What one pass may commit.

    Attributes:
        block: index of the block. start, stop: its positions, half-open.
        step: passes made in this block before this one; 0 is where a caching method refreshes.
        steps: passes that the block's schedule is spread over.
        candidates: masked positions that may be committed, ascending: those of the block, and those that an earlier
            block left over.
        remaining: masks that a schedule spreads its commits over; None: the candidates inside the block.
    """

    block: int
    start: int
    stop: int
    step: int
    steps: int
    candidates: tuple[int, ...]
    remaining: int | None = None

    @property
    def masks(self) -> int:
        """Masks that a schedule spreads its commits over."""
        return len(self.inner) if self.remaining is None else self.remaining

    @property
    def inner(self) -> tuple[int, ...]:
        """The candidates inside the block."""
        return tuple(p for p in self.candidates if p >= self.start)


class Windows(ABC):
    """The order in which a response is filled. One object serves one request."""

    @abstractmethod
    def next(self) -> Window | None:
        """The next pass's window; None when the response is done."""


class Blocks(Windows):
    """Semi-autoregressive blocks from left to right; one block of the whole response is plain diffusion.

    A block ends when it has no mask left, or after `limit` passes where the method or the rule has one.
    """

    def __init__(self, canvas: Canvas, block_length: int, steps: int, limit: int | None = None) -> None:
        self._canvas, self._length, self._steps, self._limit = canvas, block_length, steps, limit
        self._block = 0
        self._step = 0

    def next(self) -> Window | None:
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


class Sliding(Windows):
    """The first `width` masks that are left, wherever they stand: the window moves right as its masks are filled.

    There is one block, the whole response, and it goes on until no mask is left: a schedule's last step can commit no
    more than its window holds, so no limit of passes ends it.
    """

    def __init__(self, canvas: Canvas, width: int, steps: int) -> None:
        self._canvas, self._width, self._steps = canvas, width, steps
        self._step = 0

    def next(self) -> Window | None:
        canvas = self._canvas
        if not canvas.masked:
            return None
        candidates = tuple(canvas.masked[: self._width])
        window = Window(0, canvas.start, canvas.stop, self._step, self._steps, candidates, len(canvas.masked))
        self._step += 1
        return window
