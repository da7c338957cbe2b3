"""The streams of a request: one, or two under classifier-free guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.memory import held_bytes
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.shared import Shared
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.sharing import provide
from dllm_bench.decoding.windows import Window
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from dllm_bench.models.network import Network
    from dllm_bench.models.text import TextCodec
else:
    torch = LazyModule("torch")

__all__ = ["Streams"]


class Streams:
    """The conditional stream and, under guidance, the unconditional one: each has a method of its own."""

    def __init__(
        self,
        network: Network,
        canvas: Canvas,
        make_method: Callable[[], Method],
        settings: DecodeSettings,
        span: tuple[int, int] | None,
        shared: Shared | None,
        codec: TextCodec | None,
    ) -> None:
        self._canvas, self._scale = canvas, settings.cfg_scale
        self._free = canvas.unconditional() if self._scale > 0 else None
        self._both = False
        # passes left that reuse the difference of the streams, and that difference by position
        self._held = 0
        self._difference: dict[int, torch.Tensor] = {}
        requests = [Request(network, canvas, canvas.ids, settings, span, shared, codec)]
        if self._free is not None:
            # it holds masks where the prompt was: the shared state that was given does not stand for those
            requests.append(Request(network, canvas, self._free, settings, span, codec=codec))
        self._all = [make_method() for _ in requests]
        provided = [provide(method, request) for method, request in zip(self._all, requests, strict=True)]
        costs = [made.cost for _, made in provided if made is not None]
        self.preparation = sum(costs[1:], costs[0]) if costs else None
        for method, (request, _) in zip(self._all, provided, strict=True):
            method.begin(request)

    @property
    def method(self) -> Method:
        """That of the conditional stream."""
        return self._all[0]

    def probe(self) -> Rows | None:
        """Runs the probe of every stream; rows of the conditional one's."""
        first, *_ = [method.probe() for method in self._all]
        return first

    def forward(self, window: Window) -> Output:
        if self._free is None:
            return self.method.forward(window)
        self._both = self._held == 0
        if not self._both:
            return self._with_held_difference(window)
        self._held = self.method.guidance_holds()
        wide = replace(window, candidates=self._reachable(window))
        output, free = self.method.forward(wide), self._all[1].forward(wide)
        if free.positions != output.positions:
            raise RuntimeError("the two streams of guidance computed different rows")
        difference = output.logits - free.logits
        self._difference = dict(zip(output.positions, difference, strict=True)) if self._held else {}
        return self._guided(window, output.positions, free.logits, difference)

    def _with_held_difference(self, window: Window) -> Output:
        output = self.method.forward(window)
        difference = torch.stack([self._difference[p] for p in output.positions])
        self._held -= 1
        if not self._held:
            self._difference = {}
        return self._guided(window, output.positions, output.logits - difference, difference)

    def _reachable(self, window: Window) -> tuple[int, ...]:
        """The candidates, and those of the blocks that passes reusing this one's difference may come to."""
        if not self._held:
            return window.candidates
        stop = window.stop + self._held * (window.stop - window.start)
        return tuple(p for p in self._canvas.masked if p < stop)

    def _guided(
        self, window: Window, positions: tuple[int, ...], free: torch.Tensor, difference: torch.Tensor
    ) -> Output:
        """un + (scale + 1)(cond - un), for the window's candidates alone."""
        logits, asked = free + (self._scale + 1) * difference, set(window.candidates)
        places = [i for i, p in enumerate(positions) if p in asked]
        if len(places) == len(positions):
            return Output(positions, logits)
        return Output(tuple(positions[i] for i in places), logits[places])

    def commit(self, decision: Decision) -> None:
        if not decision.positions:
            return
        self._canvas.commit(decision.positions, decision.tokens)
        if self._free is not None:
            index = torch.tensor(decision.positions, device=self._free.device)
            self._free[0, index] = decision.tokens.to(self._free.dtype)
        for method in self._all:
            method.commit(decision.positions)

    def report(self) -> dict[str, Any]:
        """The conditional method's decisions, with those of the unconditional one where it ran."""
        report = self.method.report()
        free = self._all[1].report() if self._both else {}
        return {**report, "unconditional": free} if free else report

    def bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        if self._difference:
            total["guidance"] = held_bytes(self._difference.values())
        for method in self._all:
            for kind, held in method.bytes().items():
                total[kind] = total.get(kind, 0) + held
        return total

    def nominal_bytes(self) -> dict[str, float] | None:
        """The same with the formulas of memories that have one; None where none has."""
        total: dict[str, float] = {}
        for method in self._all:
            for kind, held in (method.nominal_bytes() or {}).items():
                total[kind] = total.get(kind, 0) + held
        if total and self._difference:
            total["guidance"] = held_bytes(self._difference.values())
        return total or None

    def end(self) -> None:
        for method in self._all:
            method.end()
