"""ACache: keys and values of a shared affix are made once, and a request recomputes only its anchors among them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.memory import DenseMemory, Memory
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.methods.fast_dllm import DualCache
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window
    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["ACache", "ACacheOptions"]

_CHUNK = 1 << 24
"""Attention weights that the probe holds at a time: its memory grows with the affix, not with mask rows x affix."""


@dataclass(frozen=True)
class ACacheOptions(Options):
    """Options of ACache."""

    anchor_ratio: float = option(0.2, "part of the affix that refreshes recompute; 0 reuses it as is", low=0, high=1)
    affix: Literal["prefix", "suffix", "none"] = option(
        "prefix",
        "where the affix lies when neither affix_start/affix_end nor the task says: all of the prompt before the "
        "response, or behind it (infill); none is the dual cache",
    )
    affix_start: int | None = option(None, "first position of the affix (default 0)", low=0)
    affix_end: int | None = option(None, "position behind the affix (default: the response or the prompt's end)", low=0)
    selection: Literal["top", "bottom", "random"] = option("top", "which affix tokens by importance become anchors")
    selector: Literal["acache", "cacheblend"] = option(
        "acache", "importance: attention from the masks, or distance of the cached from the true keys and values"
    )
    drop_non_anchor: bool = option(False, "leave affix tokens that are no anchors out of the context altogether")
    step_cap: bool = option(False, "end a block after steps / blocks passes and leave its masks, as the official code")

    def check(self) -> None:
        if self.affix_start is not None and self.affix_end is not None and self.affix_end < self.affix_start:
            raise UserError(
                f"acache option affix_end={self.affix_end} lies before affix_start={self.affix_start}: "
                f"nearest valid is {self.affix_start}"
            )
        if self.affix == "none" and (self.affix_start is not None or self.affix_end is not None):
            raise UserError("acache option affix=none excludes affix_start and affix_end")


class AnchorMemory(DenseMemory):
    """Dense over the whole canvas, or over the kept positions alone; these keep their places in RoPE."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._kept: list[int] | None = None

    def keep(self, positions: list[int]) -> None:
        """Only these positions, ascending, are ever written and read."""
        self._kept = positions

    def room(self) -> int:
        return super().room() if self._kept is None else len(self._kept)

    def places(self, rows: Rows) -> Rows:
        if self._kept is None:
            return rows
        if rows.count == len(self._kept):
            return Rows.range(0, rows.count)
        # passes behind the refresh are over neighbours, and none of those was dropped
        assert rows.span is not None
        start = bisect.bisect_left(self._kept, rows.span.start)
        return Rows.range(start, start + rows.count)

    def readable(self, layer: int) -> Tensor | None:
        return None if self._kept is None else torch.tensor(self._kept, device=self.network.device)

    def end(self) -> None:
        super().end()
        self._kept = None


class ACache(DualCache):
    """The dual cache with a smaller refresh: every row outside the affix, and the affix tokens that the masks look at
    most. The other affix rows keep keys and values that were computed from the affix alone, once for all requests."""

    name = "acache"
    paper = "ACache, v2 of the paper (sands-lab/ACache d9200d9: llada/generate_ACache.py; cacheblend: 101f327)"
    summary = "shared affix computed once; a probe picks anchors; refreshes recompute anchors and what is not affix"
    cost = (
        "affix rows once for all requests; one probe over the rows outside the affix (all rows with "
        "selector=cacheblend); per block one refresh of those rows and the anchors, then block rows; K and V of all "
        "positions (of the recomputed ones with drop_non_anchor), and of the affix once more for all requests"
    )
    notes = (
        "As in the official code a refresh recomputes all rows outside the affix, not just anchors and block as its "
        "docstring says; the probe counts as a pass, the affix does not. The cacheblend selector compares a full pass "
        "in all layers (an oracle), not the first layer. A block goes on until it is done, as in this bench's dual "
        "cache: step_cap=true gives the official limit. The official code is told the affix; here it is affix_start to "
        "affix_end, else the task's shared span, else the whole prompt before the response. Where shifted logits read "
        "the row before the response (Dream) that row is always recomputed; otherwise Dream runs as LLaDA does."
    )
    options_class = ACacheOptions
    exact_with = Exact({"anchor_ratio": 1.0}, {"block_length": 4, "tokens_per_pass": 4})
    options: ACacheOptions

    @classmethod
    def bottom_memory(cls) -> Memory:
        return AnchorMemory()

    # -- the affix and its cache ------------------------------------------------------------------------------------

    def check(self, settings: DecodeSettings) -> None:
        if self.options.drop_non_anchor and not isinstance(self.memory, AnchorMemory):
            raise UserError(
                "acache option drop_non_anchor=true keeps parts of the canvas only, and a memory stacked on it needs "
                "all positions: leave one of them out"
            )

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        return settings.steps_per_block if self.options.step_cap else None

    def shared_span(self, request: Request) -> tuple[int, int] | None:
        start, stop = self._range(request)
        canvas = request.canvas
        if not 0 <= start <= stop <= canvas.length:
            end = canvas.start if start < canvas.start else canvas.length
            valid = f"affix_end is {end}" if start <= canvas.length else f"affix_start is {max(0, canvas.start - 1)}"
            raise UserError(f"acache: affix {start}:{stop} goes beyond the canvas: nearest valid {valid}")
        if start < canvas.stop and canvas.start < stop and start < stop:
            near = canvas.start if start < canvas.start else start
            raise UserError(
                f"acache: affix {start}:{stop} overlaps the response {canvas.start}:{canvas.stop}: "
                f"nearest valid affix_end is {near}"
            )
        return (start, stop) if start < stop else None

    def _range(self, request: Request) -> tuple[int, int]:
        options, canvas = self.options, request.canvas
        start, stop = options.affix_start, options.affix_end
        if options.affix == "none":
            return 0, 0
        if start is not None or stop is not None:
            start = start or 0
            behind = canvas.start if start < canvas.start else canvas.length
            return start, behind if stop is None else stop
        if request.span is not None:
            return request.span
        given = len(request.shared.ids) if request.shared is not None else None
        if options.affix == "suffix":
            return canvas.stop if given is None else canvas.length - given, canvas.length
        return 0, canvas.start if given is None else given

    def prepare(self, network: Network, ids: Tensor) -> Mapping[str, Sequence[Tensor]]:
        """Keys before RoPE and values of the affix alone, at positions from 0: they serve any later place."""
        keys, values = [], []
        where, layers = slice(0, ids.shape[1]), network.config.num_layers
        x = network.embed(ids)
        for layer in range(layers):
            q, k, v = network.project(layer, x)
            # copies: views would hold on to the queries
            keys.append(k.clone(memory_format=torch.contiguous_format))
            values.append(v.clone(memory_format=torch.contiguous_format))
            if layer < layers - 1:
                attended = network.attend(network.rope(q, where), [(network.rope(k, where), v)])
                x = x + network.out(layer, attended)
                x = x + network.ffn(layer, x)
        return {"keys": keys, "values": values}

    # -- life cycle -------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        super().begin(request)
        start, stop = request.span if request.span is not None and request.shared is not None else (0, 0)
        self._affix = Rows.range(start, stop)
        self._outside = [*range(start), *range(stop, request.length)]
        self._adopts = self._adopted = False
        self._decided: dict[str, Any] = {}
        self._recompute([])

    def end(self) -> None:
        super().end()
        del self._affix, self._outside, self._anchors, self._refreshed, self._adopts, self._adopted, self._decided

    def _recompute(self, anchors: Sequence[int]) -> None:
        """Fixes the rows of every refresh."""
        first = self.network.config.row_of(self.request.canvas.start)
        positions = sorted({*self._outside, *anchors, first})
        self._anchors = len(anchors)
        self._refreshed = Rows.of(positions, self.request.ids.device)
        if self.options.drop_non_anchor and isinstance(self.memory, AnchorMemory):
            self.memory.keep(positions)

    # -- the probe --------------------------------------------------------------------------------------------------

    def probe(self) -> Rows | None:
        count = min(math.ceil(self.options.anchor_ratio * self._affix.count), self._affix.count)
        if count == 0:
            return None
        if self.options.selector == "acache":
            rows = Rows.of(self._outside, self.request.ids.device)
            importance = self._attention_importance(rows)
        else:
            rows = Rows.range(0, self.request.length)
            importance = self._distance_importance(rows)
        anchors = self._select(importance, count)
        self._recompute(anchors)
        self._decided = {"probe": self.options.selector, "anchors": anchors, "importance": importance.tolist()}
        return rows

    def _attention_importance(self, rows: Rows) -> Tensor:
        """Attention that each affix token gets from the masked rows, over affix keys alone, summed over rows, heads and
        layers. The rows themselves attend to everything."""
        net, canvas, keys = self.network, self.request.canvas, self._state("keys")
        first = rows.places([canvas.start])[0]
        total = torch.zeros(self._affix.count, device=self.request.ids.device)
        x = net.embed(rows.take(self.request.ids))
        for layer in range(net.config.num_layers):
            q, k, v = net.project(layer, x)
            q, affix = net.rope(q, rows.where), net.rope(keys[layer], self._affix.where)
            masked = q.narrow(2, first, canvas.stop - canvas.start)
            step = max(1, _CHUNK // (q.shape[1] * self._affix.count))
            for at in range(0, masked.shape[2], step):
                total += net.attention_rows(masked[:, :, at : at + step], [affix]).sum(dim=(0, 1, 2))
            if layer < net.config.num_layers - 1:
                pieces = [(affix, self._state("values")[layer]), (net.rope(k, rows.where), v)]
                x = x + net.out(layer, net.attend(q, pieces))
                x = x + net.ffn(layer, x)
        return total

    def _distance_importance(self, rows: Rows) -> Tensor:
        """Distance of each affix token's cached keys and values from those in the whole context, summed over heads and
        layers."""
        net = self.network
        total = torch.zeros(self._affix.count, device=self.request.ids.device)
        x = net.embed(self.request.ids)
        for layer in range(net.config.num_layers):
            q, k, v = net.project(layer, x)
            for kind, true in (("keys", k), ("values", v)):
                off = self._affix.take(true, dim=2) - self._state(kind)[layer]
                total += off.float().norm(dim=-1).sum(dim=(0, 1))
            if layer < net.config.num_layers - 1:
                x = x + net.out(layer, net.attend(net.rope(q, rows.where), [(net.rope(k, rows.where), v)]))
                x = x + net.ffn(layer, x)
        return total

    def _select(self, importance: Tensor, count: int) -> list[int]:
        """Positions of the anchors, ascending; of equal importances the left one goes first."""
        if self.options.selection == "random":
            generator = torch.Generator().manual_seed(self.request.settings.seed)
            order = torch.randperm(self._affix.count, generator=generator)
        else:
            order = importance.argsort(descending=self.options.selection == "top", stable=True)
        assert self._affix.span is not None
        return sorted(self._affix.span.start + i for i in order[:count].tolist())

    def _state(self, kind: str) -> Sequence[Tensor]:
        assert self.shared is not None
        return self.shared.tensors[kind]

    # -- passes -----------------------------------------------------------------------------------------------------

    def refresh_rows(self) -> Rows:
        return self._refreshed

    def rows(self, window: Window) -> Rows:
        self._decided = {}
        rows = super().rows(window)
        complete = self._refreshed.count == self.request.length or self.options.drop_non_anchor
        self._adopts = self._refresh and not complete and not (self._adopted and self.memory.exact)
        self._adopted |= self._adopts
        return rows

    def refreshes(self, window: Window, rows: Rows) -> bool:
        return self._refresh

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return window.inner

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        if self._adopts:
            # rotated to its place in this request once; the rows of the refresh then overwrite their part
            self.memory.write(layer, self._affix, self._state("keys")[layer], self._state("values")[layer])
        return super().layer(layer, x, rows)

    def report(self) -> dict[str, Any]:
        return self._decided or {**super().report(), "n_anchors": self._anchors}
