"""dKV-Cache: keys and values of decoded tokens are kept one pass late; masked rows are computed in every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.rules import split_evenly
from dllm_bench.decoding.sampling import private_generator
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")

__all__ = ["DkvCache", "DkvCacheOptions"]

_INTERVALS = {"decode": 8, "greedy": 2}
_NEIGHBOURS = 4


@dataclass(frozen=True)
class DkvCacheOptions(Options):
    """Options of dKV-Cache."""

    variant: Literal["decode", "greedy"] = option(
        "decode", "decode computes all rows that are not kept yet; greedy the last and next commits and a neighbourhood"
    )
    refresh_interval: int | None = option(
        None, "passes of a block from one dense pass to the next (default 8 for decode, 2 for greedy)", low=1
    )
    neighbours: int | None = option(
        None, "masked rows computed around each token to commit (greedy only, default 4)", low=0
    )

    def check(self) -> None:
        if self.variant == "decode" and self.neighbours is not None:
            raise UserError("dkv_cache option neighbours needs variant=greedy: decode computes every masked row")

    @property
    def interval(self) -> int:
        """The refresh interval that holds."""
        return _INTERVALS[self.variant] if self.refresh_interval is None else self.refresh_interval

    @property
    def width(self) -> int:
        """The neighbours that hold."""
        return _NEIGHBOURS if self.neighbours is None else self.neighbours


class DkvCache(Method):
    """Decode: a pass computes the rows that were masked before the previous pass, so a committed token is computed once
    more with its own id before its key and value stay. Greedy: the order of commits is drawn when a block starts, so a
    pass can compute the tokens just committed, those to be committed, and a few masked neighbours."""

    name = "dkv_cache"
    paper = "dKV-Cache, arXiv 2505.15781, method section (horseee/dKV-Cache 49a76fc)"
    summary = "keys and values of decoded tokens kept one pass late; the rest recomputed (decode) or in part (greedy)"
    cost = (
        "dense every refresh_interval passes of a block (decode: in its first two as well), else all rows still masked "
        "(decode) or 2 + neighbours rows per committed token (greedy); K and V of all positions"
    )
    notes = (
        "The released code cuts its decode cache to the decoded positions; here one buffer holds all positions, and "
        "masked ones are overwritten before they are read, which gives the same numbers. With shifted logits (Dream) "
        "the row before each candidate is computed too; the released Dream variants are not reproduced. The released "
        "code has no guidance; here each stream keeps its own cache."
    )
    options_class = DkvCacheOptions
    exact_with = Exact({"variant": "decode", "refresh_interval": 1})
    options: DkvCacheOptions

    def check(self, settings: DecodeSettings) -> None:
        if self.options.variant == "greedy" and settings.remasking != "random":
            raise UserError(
                "dkv_cache variant=greedy draws the order of commits beforehand: it needs --remasking random "
                "(without --alg); nearest valid: variant=decode"
            )

    def begin(self, request: Request) -> None:
        super().begin(request)
        # response positions without a token when the previous pass started, and those committed after it
        self._open: list[int] = []
        self._fresh: list[int] = []
        self._undecoded = set(range(request.canvas.start, request.canvas.stop))
        self._generator = private_generator(request.settings.seed, torch.device("cpu"))
        self._order: list[int] = []
        self._plan: list[int] = []

    def commit(self, positions: Sequence[int]) -> None:
        self._fresh = sorted(positions)
        self._undecoded.difference_update(positions)

    def end(self) -> None:
        super().end()
        del self._open, self._fresh, self._undecoded, self._generator, self._order, self._plan

    # -- one pass ---------------------------------------------------------------------------------------------------

    def rows(self, window: Window) -> Rows:
        greedy = self.options.variant == "greedy"
        if greedy:
            self._next = self._commits(window)
        self._refresh = window.step % self.options.interval == 0 or (not greedy and window.step == 1)
        wanted = set(self._near() if greedy else self._open)
        self._open = sorted(self._undecoded)
        if self._refresh:
            return Rows.range(0, self.request.length)
        asked = self._next if greedy else window.candidates
        return Rows.of(sorted(wanted.union(map(self.network.config.row_of, asked))), self.network.device)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return self._next if self.options.variant == "greedy" else window.candidates

    # -- greedy -----------------------------------------------------------------------------------------------------

    def order(self, window: Window) -> list[int]:
        """All positions of the canvas in the order in which they may be committed, drawn once per block."""
        return torch.rand(self.request.length, generator=self._generator).argsort(descending=True, stable=True).tolist()

    def _commits(self, window: Window) -> tuple[int, ...]:
        """The candidates that this pass commits, ascending: the next ones of the block's order."""
        if window.step == 0:
            self._order = self.order(window)
            self._plan = split_evenly(len(window.inner), window.steps)
        number = self.request.settings.tokens_per_pass
        if number is None:
            number = self._plan[window.step] if window.step < len(self._plan) else 1
        left = set(window.candidates)
        return tuple(sorted([p for p in self._order if p in left][:number]))

    def _near(self) -> list[int]:
        """The tokens just committed, those to commit, and the masked ones next to these, left and right in turn."""
        near = [*self._fresh, *(p for p in self._next if p not in self._fresh)]
        for position in self._next:
            near += self._around(position, set(near))
        return near

    def _around(self, position: int, taken: set[int]) -> list[int]:
        found: list[int] = []
        canvas = self.request.canvas
        for distance in range(1, canvas.stop - canvas.start):
            for one in (position - distance, position + distance):
                if len(found) < self.options.width and one in self._undecoded and one not in taken:
                    found.append(one)
        return found

    # -- reports ----------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {"refresh": self._refresh, **super().report()}
