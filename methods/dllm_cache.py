"""dLLM-Cache: prompt and response are refreshed at intervals of their own; in between V-verify picks what to renew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.memory import held_bytes
from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")

__all__ = ["DllmCache", "DllmCacheOptions"]

_GUIDED_AT_FIRST = 5  # steps at the start in which guidance always runs its unconditional pass


@dataclass(frozen=True)
class DllmCacheOptions(Options):
    """Options of dLLM-Cache."""

    prompt_interval: int = option(100, "passes from one refresh of the prompt to the next", low=1)
    response_interval: int = option(7, "passes from one refresh of the response to the next", low=1)
    transfer_ratio: float = option(
        0.25, "share of the response renewed in the other passes; 0 turns V-verify off", low=0, high=1
    )
    refresh_first_layer: bool = option(
        True, "layer 0 is refreshed in every pass, as in the released code; false is the paper's schedule"
    )
    cfg_interval: int = option(1, "passes from one unconditional pass of guidance to the next", low=1)


@dataclass(frozen=True)
class _Choice:
    """Rows that V-verify picked: their places in the response, their positions, their queries before RoPE."""

    places: Tensor
    rows: Rows
    q: Tensor


class DllmCache(Method):
    """Caches K, V and both branch outputs. A row that is not renewed still moves: its residual is the current input
    plus the cached branches. Intervals count the passes of the request, not of a block, and each stream of guidance
    counts its own.

    Nothing ever reads the residual of a prompt row between two refreshes of the prompt, except where the last one
    predicts the first response token (shifted logits). So those passes run over the response (and that one row) alone,
    and only there branches are kept: the same numbers, without computing prompt rows that nobody looks at.
    """

    name = "dllm_cache"
    paper = "dLLM-Cache, arXiv 2506.06295, method section (maomaocun/dLLM-cache 17235bf)"
    summary = "prompt and response refreshed at intervals; in between the response rows whose values moved most"
    cost = (
        "dense every prompt_interval passes; else the G response rows, in all layers every response_interval passes, "
        "otherwise in layer 0, and above it V of all G and transfer_ratio x G rows; holds K and V of all positions, "
        "two branches and V of G"
    )
    notes = (
        "Layer 0 is refreshed in every pass as in the code (the paper does not: refresh_first_layer=false). V of all "
        "response rows is renewed as in the code; the paper's figure renews the selected ones. In every pass the code "
        "also computes the prompt rows of layer 0 and adds cached branches to all prompt rows; no answer depends on "
        "them, so here they are neither computed nor kept (same tokens, less work, less memory). With shifted logits "
        "(Dream) the last prompt row, which predicts the first response token, belongs to the prompt as in the code: "
        "above layer 0 it is as old as its last refresh. Similarities are taken in float32 at least. The paper's 9.1x "
        "is a ratio of FLOPs, not of time."
    )
    options_class = DllmCacheOptions
    exact_with = Exact({"prompt_interval": 1, "response_interval": 1, "cfg_interval": 1})
    renews_values = True
    options: DllmCacheOptions

    # -- life cycle -------------------------------------------------------------------------------------------------

    def check(self, settings: DecodeSettings) -> None:
        if self.options.cfg_interval > 1 and settings.cfg_scale == 0:
            raise UserError(
                f"dllm_cache option cfg_interval={self.options.cfg_interval} has no effect without guidance: "
                "give --cfg-scale, or leave it at 1"
            )

    def begin(self, request: Request) -> None:
        super().begin(request)
        canvas, network = request.canvas, request.network
        # the row that predicts the first response token lies in the prompt where logits are shifted
        first = network.config.row_of(canvas.start)
        self._start, self._lead = canvas.start, canvas.start - first
        self._response = Rows.range(canvas.start, canvas.stop)
        self._kept = Rows.range(first, canvas.stop)
        self._prompt = Rows.of([*range(canvas.start), *range(canvas.stop, request.length)], network.device)
        self._number = int(self._response.count * self.options.transfer_ratio)
        self._verifies = self.options.transfer_ratio > 0 and self.options.response_interval > 1
        self._passes = 0
        self._attention: dict[int, Tensor] = {}
        self._ffn: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}

    def end(self) -> None:
        super().end()
        for held in (self._attention, self._ffn, self._values, self._chosen):
            held.clear()
        del self._prompt, self._response, self._kept

    def guidance_holds(self) -> int:
        behind = self._passes + 2  # the pass behind the coming one, counted from 1
        while behind > _GUIDED_AT_FIRST and (behind - 1) % self.options.cfg_interval:
            behind += 1
        return behind - self._passes - 2

    # -- one pass ---------------------------------------------------------------------------------------------------

    def rows(self, window: Window) -> Rows:
        self._prompt_due = self._passes % self.options.prompt_interval == 0
        self._response_due = self._passes % self.options.response_interval == 0
        self._passes += 1
        self._chosen.clear()
        return Rows.range(0, self.request.length) if self._prompt_due else self._kept

    def refreshes(self, window: Window, rows: Rows) -> bool:
        # with a prompt of one token, which predicts the response's first, the rows kept are all rows too
        return self._prompt_due

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        if self._forced(layer) or (self._prompt_due and self._response_due):
            return self._refresh(layer, x, rows), rows
        if self._prompt_due:
            return self._refresh_prompt(layer, x), rows
        if self._response_due:
            self._refresh_response(layer, x)
        else:
            self._renew(layer, x, self._verify(layer, x))
        return x + self._attention[layer] + self._ffn[layer], rows

    def _forced(self, layer: int) -> bool:
        return layer == 0 and self.options.refresh_first_layer

    # -- the four cases of a layer: everything, the prompt, the response, V-verify ----------------------------------

    def _refresh(self, layer: int, x: Tensor, rows: Rows) -> Tensor:
        q, k, v = self.network.project(layer, x)
        if self._prompt_due:
            self.memory.write(layer, rows, k, v)
        else:  # layer 0: what it keeps of a prompt row depends on the token alone
            self.memory.write(layer, self._response, k[:, :, self._lead :], v[:, :, self._lead :])
        attention, ffn = self._branches(layer, x, q, rows)
        if not self._forced(layer):
            self._keep(layer, 0, self._kept.take(attention), self._kept.take(ffn))
            self._keep_values(layer, v[:, :, self._start : self._start + self._response.count])
        return x + attention + ffn

    def _refresh_prompt(self, layer: int, x: Tensor) -> Tensor:
        """The response is brought up to date before prompt queries read it."""
        inner, outer = self._kept.take(x), self._prompt.take(x)
        q, k, v = self.network.project(layer, outer)
        self.memory.write(layer, self._prompt, k, v)
        choice = self._verify(layer, inner)
        attention, ffn = self._branches(layer, outer, q, self._prompt)
        if self._lead:
            self._keep(layer, 0, self._last_of_prompt(attention), self._last_of_prompt(ffn))
        self._renew(layer, inner, choice)
        inner = inner + self._attention[layer] + self._ffn[layer]
        x = torch.empty_like(x)
        self._prompt.put(x, outer + attention + ffn)
        self._kept.put(x, inner)
        return x

    def _refresh_response(self, layer: int, x: Tensor) -> None:
        inner = x[:, self._lead :]
        q, k, v = self.network.project(layer, inner)
        self.memory.write(layer, self._response, k, v)
        self._keep(layer, self._lead, *self._branches(layer, inner, q, self._response))
        self._keep_values(layer, v)

    def _verify(self, layer: int, x: Tensor) -> _Choice | None:
        """Renews V of the response, and K of the rows whose V changed most since the last pass."""
        if not self._verifies:
            return None
        inner = x[:, self._lead :]
        (v,) = self.network.project(layer, inner, "v")
        before = self._values[layer]
        precise = torch.promote_types(v.dtype, torch.float32)
        now = self._keep_values(layer, v)
        similarity = F.cosine_similarity(now.to(precise), before.to(precise), dim=-1, eps=1e-8)[0]
        places = similarity.argsort(stable=True)[: self._number].sort().values
        self._chosen[layer] = places + self._start
        self.memory.write_values(layer, self._response, v)
        if self._number == 0:
            return None
        rows = Rows(None, self._chosen[layer], self._number)
        q, k = self.network.project(layer, inner.index_select(1, places), "qk")
        self.memory.write(layer, rows, k, v.index_select(2, places))
        return _Choice(places, rows, q)

    def _renew(self, layer: int, x: Tensor, choice: _Choice | None) -> None:
        """Both branches of the chosen rows."""
        if choice is None:
            return
        places = choice.places + self._lead
        attention, ffn = self._branches(layer, x.index_select(1, places), choice.q, choice.rows)
        self._attention[layer].index_copy_(1, places, attention)
        self._ffn[layer].index_copy_(1, places, ffn)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _branches(self, layer: int, x: Tensor, q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Attention and FFN branches of rows with residual x and queries q before RoPE."""
        q = self.network.rope(q, rows.where)
        attention = self.network.out(layer, self.network.attend(q, self.memory.read(layer, q, rows)))
        return attention, self.network.ffn(layer, x + attention)

    def _keep(self, layer: int, place: int, attention: Tensor, ffn: Tensor) -> None:
        """Copies branches into the cache, from `place` on."""
        for kept, fresh in ((self._attention, attention), (self._ffn, ffn)):
            if layer not in kept:
                kept[layer] = fresh.new_empty((1, self._kept.count, fresh.shape[2]))
            kept[layer][:, place : place + fresh.shape[1]] = fresh

    def _keep_values(self, layer: int, v: Tensor) -> Tensor:
        """Keeps V of the response, heads side by side, for the comparison in the next pass."""
        flat = v.transpose(1, 2).flatten(2)
        if self._verifies:  # a slice of a joint projection is copied, so that the rest of it is let go
            self._values[layer] = flat.clone() if flat.untyped_storage().nbytes() > flat.nbytes else flat
        return flat

    def _last_of_prompt(self, t: Tensor) -> Tensor:
        return t[:, self._start - 1 : self._start]

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        return {
            **self.memory.bytes(),
            "attention_branch": held_bytes(self._attention.values()),
            "ffn_branch": held_bytes(self._ffn.values()),
            "verified_values": held_bytes(self._values.values()),
        }

    def report(self) -> dict[str, Any]:
        """Which regions were refreshed, and the positions that V-verify chose, layer by layer."""
        return {
            "refresh_prompt": self._prompt_due,
            "refresh_response": self._response_due,
            "selected": {layer: chosen.tolist() for layer, chosen in self._chosen.items()},
            **super().report(),
        }
