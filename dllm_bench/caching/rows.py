"""The rows of a pass: a range of positions, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows:
    """Positions that a pass computes, ascending or not, each once.

    A contiguous range is kept as a slice, so taking and writing it copies no index.

    Attributes:
        lowest: no row lies before it (0 where that is not known without asking the device).
    """

    span: slice | None
    index: Tensor | None
    count: int
    lowest: int = 0

    @classmethod
    def range(cls, start: int, stop: int) -> Rows:
        """Positions start … stop - 1."""
        return cls(slice(start, stop), None, stop - start, start)

    @classmethod
    def of(cls, positions: Sequence[int], device: torch.device) -> Rows:
        """Any positions, in the given order."""
        if positions and list(positions) == list(range(positions[0], positions[0] + len(positions))):
            return cls.range(positions[0], positions[-1] + 1)
        index = torch.tensor(positions, device=device, dtype=torch.long)
        return cls(None, index, len(positions), min(positions, default=0))

    @property
    def where(self) -> slice | Tensor:
        """What RoPE and indexing want: the slice or the index tensor."""
        if self.span is not None:
            return self.span
        assert self.index is not None
        return self.index

    def covers(self, length: int) -> bool:
        """Whether these are all positions of a canvas, in order."""
        return self.span is not None and (self.span.start, self.span.stop) == (0, length)

    def take(self, t: Tensor, dim: int = 1) -> Tensor:
        """The rows of a tensor over all positions."""
        if self.span is not None:
            return t.narrow(dim, self.span.start, self.count)
        assert self.index is not None
        return t.index_select(dim, self.index)

    def put(self, t: Tensor | None, values: Tensor, dim: int = 1) -> None:
        """Writes the rows into a tensor over all positions, in place."""
        assert t is not None
        if self.span is not None:
            t.narrow(dim, self.span.start, self.count).copy_(values)
        else:
            assert self.index is not None
            t.index_copy_(dim, self.index, values)

    def places(self, positions: Sequence[int]) -> Sequence[int]:
        """Where each position stands among these rows."""
        if self.span is not None:
            return [p - self.span.start for p in positions]
        return [self._order[p] for p in positions]

    @cached_property
    def _order(self) -> dict[int, int]:
        assert self.index is not None
        return {p: i for i, p in enumerate(self.index.tolist())}
