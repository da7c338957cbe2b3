"""Methods and memories with one planted fault each, and the check that must find it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.caching.memory import DenseMemory, Memory, Pieces
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.part import Exact, Part
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.errors import UserError
from dllm_bench.methods.acache import ACache
from dllm_bench.methods.fast_dllm import FastDllm, FastDllmOptions
from dllm_bench.models.counters import Counters
from dllm_bench.models.network import Network
from dllm_bench.options import option

FAULTS: list[tuple[type[Part], str]] = []


def caught_by(check: str) -> Any:
    """Names the check that must fail."""

    def add(cls: type[Part]) -> type[Part]:
        cls.name = cls.__name__
        FAULTS.append((cls, check))
        return cls

    return add


def with_memory(memory: type[Memory]) -> type[Method]:
    """A good method over a faulty memory."""

    class Over(FastDllm):
        @classmethod
        def bottom_memory(cls) -> Memory:
            return memory()

    return Over


# -- stale or wrong contents ------------------------------------------------------------------------------------------


@caught_by("exact")
class StaleCache(FastDllm):
    """Refreshes in the first block only."""

    def rows(self, window: Window) -> Rows:
        self._refresh = window.block == 0 and window.step == 0
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


class Renumbered(DenseMemory):
    """Rotates the keys of a partial pass to positions from 0."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        super().write(layer, rows, k, v)
        rows.put(self._k[layer], self.network.rope(k, slice(0, rows.count)), dim=2)


@caught_by("fresh_rows")
class RenumberedKeys(with_memory(Renumbered)):  # type: ignore[misc]
    pass


@caught_by("own_positions")
class RenumberedQueries(FastDllm):
    """Rotates the queries of every pass to positions from 0."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        net = self.network
        q, k, v = net.project(layer, x)
        self.memory.write(layer, rows, k, v)
        q = net.rope(q, slice(0, rows.count))
        x = x + net.out(layer, net.attend(q, self.memory.read(layer, q, rows)))
        return x + net.ffn(layer, x), rows


class Forgetful(DenseMemory):
    """Leaves the last row of a partial pass as it was."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        if rows.covers(self.request.length) or rows.count < 2:
            super().write(layer, rows, k, v)
        else:
            assert rows.span is not None
            shorter = Rows.range(rows.span.start, rows.span.stop - 1)
            super().write(layer, shorter, k[:, :, :-1], v[:, :, :-1])


@caught_by("fresh_rows")
class ForgetsARow(with_memory(Forgetful)):  # type: ignore[misc]
    pass


class Blind(DenseMemory):
    """Hides the first position, in a refresh too."""

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        return [(k[:, :, 1:], v[:, :, 1:]) for k, v in super().read(layer, q, rows)]


@caught_by("first_pass")
class HidesAPosition(with_memory(Blind)):  # type: ignore[misc]
    pass


@caught_by("exact")
class FiltersARefresh(Memory):
    """A memory that stacks, and reads a selection in a refresh too."""

    paper, summary, cost, base = "none", "every second key", "half the attention", "fast_dllm"

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        assert self.lower is not None
        self.lower.write(layer, rows, k, v)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        assert self.lower is not None
        k, v = self.lower.whole(layer)
        return [(k[:, :, ::2], v[:, :, ::2])]


@caught_by("exact")
class DropsTheLastCandidate(FastDllm):
    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        found = super().targets(window, rows)
        return found[:-1] if len(found) > 1 else found


@caught_by("shifted_model")
class ForgetsTheShift(FastDllm):
    """Takes the logits of position i from row i on every model."""

    def forward(self, window: Window) -> Output:
        rows = self.started = self.rows(window)
        self.memory.begin_pass(window, rows.covers(self.request.length))
        x = self.network.embed(rows.take(self.request.ids))
        for layer in range(self.network.config.num_layers):
            x, rows = self.layer(layer, x, rows)
        self.memory.end_pass()
        positions = self.targets(window, rows)
        return Output(positions, self.network.head(x[:, list(rows.places(positions))])[0])


# -- state that leaks -------------------------------------------------------------------------------------------------


class Common(DenseMemory):
    """Buffers of one length are shared by all requests."""

    buffers: ClassVar[dict[int, Any]] = {}

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._k, self._v = self.buffers.setdefault(request.length, (self._k, self._v))

    def end(self) -> None:
        self.buffers.pop(self.request.length, None)
        super().end()


@caught_by("independent")
class SharesBuffers(with_memory(Common)):  # type: ignore[misc]
    """Two requests at a time, or the two streams of guidance, write over each other."""


@caught_by("same_again")
class CountsOn(FastDllm):
    """Refreshes every third pass, and goes on counting in the next request."""

    passes = 0

    def rows(self, window: Window) -> Rows:
        self._refresh = self.passes % 3 == 0 or window.step == 0
        self.passes += 1
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


@caught_by("same_again")
class DependsOnOrder(FastDllm):
    """Every second request of the process is filled from right to left."""

    requests = 0

    def begin(self, request: Request) -> None:
        super().begin(request)
        DependsOnOrder.requests += 1

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        found = super().targets(window, rows)
        return found[-2:] if self.requests % 2 else found[:2]


@caught_by("independent")
class CurrentRequest(FastDllm):
    """Keeps the rows of the pass in the class: a request that runs in between changes the next pass."""

    last = 0

    def begin(self, request: Request) -> None:
        super().begin(request)
        CurrentRequest.last = 0

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step == 0 or CurrentRequest.last > 2
        CurrentRequest.last = 0 if self._refresh else CurrentRequest.last + 1
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


@caught_by("same_again")
class DrawsGlobally(FastDllm):
    """Refreshes at random, from the random stream of the process."""

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step == 0 or float(torch.rand(())) < 0.5
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


@caught_by("recovers")
class ResetsAtTheLastToken(FastDllm):
    """Relies on a request's last commit to forget it."""

    passes = 0

    def rows(self, window: Window) -> Rows:
        self._refresh = self.passes % 3 == 0 or window.step == 0
        self.passes += 1
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)

    def commit(self, positions: Any) -> None:
        if not self.request.canvas.masked:
            self.passes = 0


KEPT: list[Any] = []


@caught_by("lets_go")
class KeepsTensors(FastDllm):
    """Remembers the last logits for later."""

    def forward(self, window: Window) -> Output:
        output = super().forward(window)
        KEPT[:] = [output.logits]
        return output


class Lasting(DenseMemory):
    """Keeps its buffers to use them again."""

    def end(self) -> None:
        kept = self._k, self._v
        super().end()
        self._k, self._v = kept


@caught_by("lets_go")
class KeepsBuffers(with_memory(Lasting)):  # type: ignore[misc]
    pass


# -- the caller's things ----------------------------------------------------------------------------------------------


@caught_by("canvas_untouched")
class WritesThePrompt(FastDllm):
    def begin(self, request: Request) -> None:
        super().begin(request)
        request.ids[0, 0] = 1


@caught_by("canvas_untouched")
class WritesBehindTheResponse(FastDllm):
    """Only where there is something behind it, in infill."""

    def commit(self, positions: Any) -> None:
        if self.request.canvas.stop < self.request.length:
            self.request.ids[0, -1] = 1


@caught_by("canvas_untouched")
class ReordersMasks(FastDllm):
    def commit(self, positions: Any) -> None:
        canvas = self.request.canvas
        canvas.dropped += canvas.masked[8:]
        del canvas.masked[8:]


@caught_by("no_mask_left")
class LeavesMasks(FastDllm):
    def pass_limit(self, settings: DecodeSettings) -> int | None:
        return 2


@caught_by("no_mask_left")
class NeverAnswers(FastDllm):
    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return ()


@caught_by("no_mask_left")
class OnlyBehindThePrompt(FastDllm):
    """Takes the response for the end of the canvas."""

    def rows(self, window: Window) -> Rows:
        assert self.request.canvas.stop == self.request.length
        return super().rows(window)


@caught_by("candidates")
class DisorderedCandidates(FastDllm):
    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return tuple(reversed(super().targets(window, rows)))


@caught_by("candidates")
class LooksAhead(FastDllm):
    """Gives logits of the next block too."""

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return tuple(self.request.canvas.masked) if self._refresh else window.inner


# -- costs ------------------------------------------------------------------------------------------------------------


@caught_by("primitives_only")
class BypassesPrimitives(FastDllm):
    """Its own feed-forward, which nobody counts."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        net = self.network
        q, k, v = net.project(layer, x)
        self.memory.write(layer, rows, k, v)
        q, w = net.rope(q, rows.where), net.weights.layers[layer]
        x = x + net.out(layer, net.attend(q, self.memory.read(layer, q, rows)))
        normed = F.rms_norm(x, (x.shape[-1],), w.ffn_norm, net.config.norm_eps)
        gate, up = F.linear(normed, w.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w.down), rows


@caught_by("counters")
class ReportsHalf(FastDllm):
    def forward(self, window: Window) -> Output:
        before = self.network.counters.row_layers
        output = super().forward(window)
        self.network.counters.row_layers = (before + self.network.counters.row_layers) // 2
        return output


@caught_by("counters")
class CountsElsewhere(FastDllm):
    """Runs its refreshes under counters of its own."""

    def forward(self, window: Window) -> Output:
        if window.step:
            return super().forward(window)
        counters = self.network.counters
        self.network.counters = Counters()
        output = super().forward(window)
        self.network.counters = counters
        counters.head_rows += len(output.positions)
        return output


@caught_by("counters")
class HidesAPass(FastDllm):
    """Runs two passes and shows one."""

    def forward(self, window: Window) -> Output:
        super().forward(window)
        return super().forward(window)


@caught_by("counters")
class SaysFewerRows(FastDllm):
    def forward(self, window: Window) -> Output:
        output = super().forward(window)
        self.started = Rows.range(0, 1)
        return output


@caught_by("logits_used")
class AllLogits(FastDllm):
    """Computes logits of every row and throws most away."""

    def forward(self, window: Window) -> Output:
        output = super().forward(window)
        self.network.head(self.network.embed(self.request.ids))
        return output


@caught_by("no_square")
class SquareMatrix(FastDllm):
    """Asks for the attention of all rows in a refresh."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        if self._refresh:
            q, k = self.network.project(layer, x, "qk")
            self.network.attention_rows(self.network.rope(q, rows.where), [self.network.rope(k, rows.where)])
        return super().layer(layer, x, rows)


class Growing(DenseMemory):
    """Holds a row of N / 4 numbers for every position."""

    def end_pass(self) -> None:
        self._table = torch.zeros(self.request.length, self.request.length // 4)

    def bytes(self) -> dict[str, int]:
        table = getattr(self, "_table", None)
        return {**super().bytes(), "table": 0 if table is None else table.numel() * 4}

    def end(self) -> None:
        super().end()
        self._table = None


@caught_by("linear_memory")
class HoldsATable(with_memory(Growing)):  # type: ignore[misc]
    pass


@caught_by("bytes_measured")
class UnderstatesBytes(FastDllm):
    def bytes(self) -> dict[str, int]:
        return {"keys": super().bytes().get("keys", 0)}


@caught_by("bytes_measured")
class OverstatesBytes(FastDllm):
    def bytes(self) -> dict[str, int]:
        return {kind: 2 * held for kind, held in super().bytes().items()}


# -- models, lengths, options -----------------------------------------------------------------------------------------


@caught_by("prompt_lengths")
class NeedsTwoTokens(FastDllm):
    def begin(self, request: Request) -> None:
        super().begin(request)
        self._scale = 1 / math.log2(request.canvas.start)


class Single(DenseMemory):
    """Buffers in float32, whatever the model's precision is."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        if self._k[layer] is None:
            shape = (k.shape[0], k.shape[1], self.request.length, k.shape[3])
            self._k[layer], self._v[layer] = torch.zeros(shape), torch.zeros(shape)
        super().write(layer, rows, k, v)


@caught_by("dtypes")
class SinglePrecision(with_memory(Single)):  # type: ignore[misc]
    pass


@caught_by("gqa_model")
class EveryHeadItsKeys(FastDllm):
    """Takes for granted that there are as many key heads as query heads."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        net = self.network
        q, k, v = net.project(layer, x)
        self.memory.write(layer, rows, k, v)
        q = net.rope(q, rows.where)
        (keys, values), *_ = self.memory.read(layer, q, rows)
        scores = torch.einsum("bhmd,bhnd->bhmn", q, keys) * net.config.head_dim**-0.5
        x = x + net.out(layer, torch.softmax(scores, dim=-1) @ values)
        return x + net.ffn(layer, x), rows


@caught_by("bias_model")
class ForgetsBiases(FastDllm):
    """Projects with the weights alone."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        weights = self.network.weights.layers[layer]
        bias, weights.qkv_bias = weights.qkv_bias, None
        try:
            return super().layer(layer, x, rows)
        finally:
            weights.qkv_bias = bias


@dataclass(frozen=True)
class UnboundedOptions(FastDllmOptions):
    every: int = option(2, "passes from one refresh to the next")


@caught_by("options_work")
class UnboundedOption(FastDllm):
    """Divides by an option that may be 0."""

    options_class = UnboundedOptions
    options: UnboundedOptions

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step % self.options.every == 0
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


@caught_by("described")
class Undescribed(FastDllm):
    paper = ""


@caught_by("plain_reports")
class ReportsTensors(FastDllm):
    def report(self) -> dict[str, Any]:
        return {"rows": torch.arange(self.started.count)}


@caught_by("commit_rules")
class FearsTheEnd(FastDllm):
    """Takes for granted that every position is committed, which is not so behind an EOS."""

    def commit(self, positions: Any) -> None:
        if self.request.canvas.dropped or len(self.request.canvas.masked) % 2:
            raise IndexError("no position is left")


@caught_by("guidance")
class ReadsThePrompt(FastDllm):
    """Looks for the prompt among the ids, where the second stream of guidance holds masks."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        assert request.ids[0, 0] != request.canvas.mask_id


@caught_by("shared_untouched")
class WritesTheAffix(ACache):
    """Rotates the shared keys to their place where they lie."""

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        if self._adopts:
            keys = self._state("keys")[layer]
            keys.copy_(self.network.rope(keys, self._affix.where))
        return super().layer(layer, x, rows)


@caught_by("shared_untouched")
class MakesMoreThanItSays(ACache):
    """Shared state that depends on the request it is made in, not on its tokens alone."""

    def shared_span(self, request: Request) -> tuple[int, int] | None:
        self._tint = float(request.ids[0, :].sum())
        return super().shared_span(request)

    def prepare(self, network: Network, ids: Tensor) -> Mapping[str, Sequence[Tensor]]:
        made = super().prepare(network, ids)
        return {**made, "values": [v * (1 + self._tint % 7) for v in made["values"]]}


# -- what is no fault, or not one of the kit's alone ------------------------------------------------------------------


@dataclass(frozen=True)
class RangedOptions(FastDllmOptions):
    every: int = option(2, "passes from one refresh to the next", low=1)


class Ranged(FastDllm):
    """Refreshes every few passes of a block."""

    name = "Ranged"
    options_class = RangedOptions
    options: RangedOptions
    exact_with = Exact({"every": 1})

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step % self.options.every == 0
        return Rows.range(0, self.request.length) if self._refresh else Rows.range(self._first(window), window.stop)


class Boastful(Ranged):
    """Promises to be exact at its default, and is not."""

    name = "Boastful"
    exact_with = Exact()


class Choosy(Ranged):
    name = "Choosy"
    check_with: ClassVar[dict[str, Any]] = {"every": 1}


@dataclass(frozen=True)
class CappedOptions(FastDllmOptions):
    limit: int | None = option(None, "passes after which a block ends", low=1)


class Capped(FastDllm):
    """Ends a block early where the user asks for it."""

    name = "Capped"
    options_class = CappedOptions
    options: CappedOptions

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        return self.options.limit


class Impossible(FastDllm):
    name = "Impossible"

    def check(self, settings: DecodeSettings) -> None:
        raise UserError("it never fits")


class Loud(ReportsTensors):
    """Two faults at once."""

    name = "Loud"
    cost = " "
