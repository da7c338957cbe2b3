"""Elastic-Cache: a few rows per pass, and a refresh of the deeper layers when the attention to them drifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.memory import held_bytes
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.windows import Sliding
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.canvas import Canvas
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window, Windows
else:
    torch = LazyModule("torch")

__all__ = ["ElasticCache", "ElasticCacheOptions"]

_ROWS_AT_ONCE = 64  # bounds the attention weights held at a time when many masks are computed


@dataclass(frozen=True)
class ElasticCacheOptions(Options):
    """Options of Elastic-Cache."""

    window: int = option(16, "masks that may be committed in a pass: the first ones left, wherever they stand", low=1)
    gamma: float = option(
        0.9, "refresh deeper layers below this similarity: higher refreshes more, 0 never", low=0, high=1
    )
    track: int = option(1, "most-attended tokens that each layer names for the next pass's drift test", low=1)
    block_caching: bool = option(True, "compute the masks of the window alone; false: all masks that are left")
    similarity: Literal["heads", "keys"] = option(
        "heads",
        "cosine of a tracked token's attention before and after: over heads, mean over keys (the code), "
        "or over keys, mean over heads (the paper)",
    )


@dataclass
class _Pass:
    """What one pass computes for, and what it decides.

    Attributes:
        refresh_from: the first layer over all rows; the number of layers when there is none.
        track, tracked: tracked positions, on the host and on the device.
        asked: rows that predict masks; their attention names the positions to track next.
        track_at, asked_at: where these stand among the rows of the layer that runs.
        masked: all masked positions.
        sims, trigger: the similarity of each layer tested, and the layer that fell below gamma.
        named: the positions that each layer names for the next pass, on the device until the pass is over.
    """

    first: bool
    window: tuple[int, ...]
    refresh_from: int
    track: list[int]
    asked: Tensor
    tracked: Tensor
    track_at: Tensor
    asked_at: Tensor
    masked: Tensor
    sims: list[float] = field(default_factory=list)
    trigger: int | None = None
    named: list[Any] = field(default_factory=list)


class ElasticCache(Method):
    """Every pass but the first computes the tracked tokens, the tokens just committed, and the window of masks.

    In each layer the attention of the tracked tokens from before the pass (their last queries and the old keys) is
    compared with their new attention. Where the two differ too much, all layers behind are computed over all rows: rows
    outside the pass enter the first of them with the layer input that is stored from their last time.
    """

    name = "elastic_cache"
    paper = "Elastic-Cache, arXiv 2510.14973, Algorithm 1 (VILA-Lab/Elastic-Cache 46c0bc3)"
    summary = "window, new and most-attended rows per pass; all rows of the layers behind an attention drift"
    cost = (
        "one dense pass, then about window + track x layers rows, and N rows of the layers behind a trigger; "
        "K, V and layer inputs of all positions"
    )
    notes = (
        "The window slides over the first masks left, so block_length does nothing, and a quota is spread over the "
        "whole response. Defaults follow the code where the paper differs: the similarity runs over heads and each "
        "layer tests the tokens that all layers named (similarity=keys: the paper's vector), every position that is "
        "not masked can be tracked (paper: decoded ones), a committed token is computed once more and then left, and "
        "masks beyond the window wait for a refresh (paper: blocks of 32). Higher gamma refreshes more; gamma=1 is not "
        "the uncached decode, since layer inputs stay old. The code holds queries too; here they are computed again "
        "from the layer inputs. It commits all tokens that tie for the best when none reaches the threshold (here: the "
        "left one), and drops the masks behind an EOS once (here: at every EOS, unless --no-eos-stop)."
    )
    options_class = ElasticCacheOptions
    slides = True
    options: ElasticCacheOptions

    # -- life cycle -------------------------------------------------------------------------------------------------

    def windows(self, canvas: Canvas, settings: DecodeSettings, limit: int | None) -> Windows:
        assert settings.steps is not None
        return Sliding(canvas, self.options.window, settings.steps)

    def begin(self, request: Request) -> None:
        super().begin(request)
        # layer 0 keeps none: its input follows from the ids, and no refresh starts there
        self._inputs: list[Tensor | None] = [None] * self.network.config.num_layers
        self._track: list[int] = []
        self._committed: list[int] = []
        self._pass: _Pass | None = None

    def commit(self, positions: Sequence[int]) -> None:
        self._committed = list(positions)

    def end(self) -> None:
        super().end()
        del self._inputs, self._track, self._committed, self._pass

    # -- one pass ---------------------------------------------------------------------------------------------------

    def forward(self, window: Window) -> Output:
        output = super().forward(window)
        now = self._now
        now.named = torch.stack(now.named).sort().values.tolist()
        self._track = sorted({p for layer in now.named for p in layer})
        return output

    def rows(self, window: Window) -> Rows:
        """All rows at first; then the tracked tokens, those just committed, and the masks."""
        device, masked = self.request.ids.device, self.request.canvas.masked
        row_of = self.network.config.row_of
        asked = [row_of(p) for p in (window.candidates if self.options.block_caching else masked)]
        first = self._pass is None
        rows = Rows.range(0, self.request.length)
        if not first:
            rows = Rows.of(sorted({*self._track, *self._committed, *asked}), device)
        index = [torch.tensor(p, device=device, dtype=torch.long) for p in (asked, self._track, masked)]
        places = [torch.tensor(rows.places(p), device=device, dtype=torch.long) for p in (asked, self._track)]
        self._pass = _Pass(
            first=first,
            window=window.candidates,
            refresh_from=0 if first else self.network.config.num_layers,
            track=self._track,
            asked=index[0],
            tracked=index[1],
            masked=index[2],
            asked_at=places[0],
            track_at=places[1],
        )
        self._committed = []
        self.memory.require(self._track)
        return rows

    def refreshes(self, window: Window, rows: Rows) -> bool:
        # a later pass that happens to compute every row still reuses and tests its caches
        return self._now.first

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        net, memory, now = self.network, self.memory, self._now
        testing = layer < now.refresh_from
        last = self._last_queries(layer) if testing and layer else None
        x, rows = self._enter(layer, x, rows)
        q, k, v = net.project(layer, x)
        q = net.rope(q, rows.where)
        if testing:
            fresh = q.index_select(2, now.track_at)
            before = memory.scores(layer, fresh if last is None else last)
        memory.write(layer, rows, k, v)
        x = x + net.out(layer, net.attend(q, memory.read(layer, q, rows)))
        if testing:
            self._test(layer, memory.weights(layer, before), memory.attention_rows(layer, fresh))
        now.named.append(self._most_attended(layer, q))
        return x + net.ffn(layer, x), rows

    def _enter(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """Keeps the layer's input; where a refresh starts in the middle of a pass, goes on with all rows."""
        now = self._now
        if layer == 0:
            return x, rows
        if layer > now.refresh_from:
            self._inputs[layer] = x
            return x, rows
        kept = self._inputs[layer]
        assert kept is not None
        rows.put(kept, x)
        if layer < now.refresh_from:
            return x, rows
        self.memory.begin_refresh(layer)
        now.asked_at = now.asked
        return kept, Rows.range(0, self.request.length)

    def _last_queries(self, layer: int) -> Tensor:
        """Queries of the tracked tokens from their last time in this layer, from the inputs it had then.

        In layer 0 they equal those of this pass: only a token whose row was computed since it was committed is tracked.
        """
        kept, where = self._inputs[layer], self._now.tracked
        assert kept is not None
        (q,) = self.network.project(layer, kept.index_select(1, where), "q")
        return self.network.rope(q, where)

    def _test(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Compares attention rows [1, H, m, N]; a drift makes the layers behind a refresh."""
        now, readable = self._now, self.memory.readable(layer)
        if readable is not None:
            before, after = before.index_select(3, readable), after.index_select(3, readable)
        along = 1 if self.options.similarity == "heads" else 3
        similarity = float(_cosine(before, after, along).mean())
        now.sims.append(similarity)
        if similarity < self.options.gamma:
            now.trigger, now.refresh_from = layer, layer + 1

    def _most_attended(self, layer: int, q: Tensor) -> Tensor:
        """The positions, none of them masked, that the masks of this pass attend to most in this layer."""
        now = self._now
        total = torch.zeros(self.request.length, device=q.device)
        for some in torch.split(now.asked_at, _ROWS_AT_ONCE):
            total += self.memory.attention_rows(layer, q.index_select(2, some)).sum(dim=(0, 1, 2))
        total[now.masked] = -1.0
        return total.topk(min(self.options.track, self.request.length - len(now.masked))).indices

    @property
    def _now(self) -> _Pass:
        assert self._pass is not None
        return self._pass

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        return {**super().bytes(), "layer_inputs": held_bytes(self._inputs)}

    def report(self) -> dict[str, Any]:
        now = self._now
        return {
            "window": list(now.window),
            "track": now.track,
            "sims": now.sims,
            "trigger_layer": now.trigger,
            "start_reset": -1 if now.first else now.refresh_from,
            "layer_track": now.named,
            **super().report(),
        }


def _cosine(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Cosine similarity along `dim`, norms at least 1e-8, as in torch; its norm over heads is several times slower."""
    lengths = [t.square().sum(dim).sqrt_().clamp_min_(1e-8) for t in (a, b)]
    return (a * b).sum(dim).div_(lengths[0].mul_(lengths[1]))
