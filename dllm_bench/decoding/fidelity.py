"""How far a method's trajectory is from the uncached one: pass by pass, on the same canvas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dllm_bench.caching.memory import PassMemory
from dllm_bench.caching.method import Method, Output
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Pass, Run, denoise
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.models.network import Network
    from dllm_bench.models.text import TextCodec
else:
    torch = LazyModule("torch")

__all__ = ["Comparison", "Step", "compare", "follow", "uncached"]

_ROWS_AT_ONCE = 16  # bounds the attention weights, and the float64 logits, held at a time

Shares = list[float | None]
"""One number per layer; None where the layer has none."""


@dataclass
class Step:
    """One committing pass beside its exact counterpart: a dense uncached pass over the ids as the pass saw them.

    Attributes:
        positions: the candidates that the pass had logits for. kl: divergence of its distributions from the exact ones,
            KL(exact || method) in nats, one number per candidate.
        key_drift, value_drift: relative Frobenius distance of what the memory holds from the exact keys and values, per
            layer, of the positions outside the response ("prompt") and inside it ("response").
        mass_kept: share of the exact attention of the candidates' rows that falls on what the pass could read, per
            layer; None where it could read everything.
        needles_kept: share of the needles' tokens, over all heads, that it could read.
        same: whether the uncached trajectory committed the same in this pass. agreeing: how many of the tokens
            committed here the uncached trajectory has at their place in the end.
    """

    window: Window
    positions: tuple[int, ...]
    kl: list[float]
    key_drift: dict[str, Shares]
    value_drift: dict[str, Shares]
    mass_kept: Shares
    needles_kept: Shares
    kind: str = ""
    rows: int = 0
    committed: tuple[tuple[int, int], ...] = ()
    same: bool = True
    agreeing: int = 0


@dataclass
class Comparison:
    """A trajectory beside the uncached one from the same canvas.

    Attributes:
        run: the method's own decode; its counters and clock hold nothing of the comparison.
        uncached_passes: committing passes of the uncached trajectory.
        compared: response positions that either trajectory filled. agreeing: those that hold the same token in both.
        first_step, first_position: the first committing pass, counted from 0, whose commits differ from those of the
            same pass of the uncached trajectory, and the leftmost position where they do. None: there is none.
    """

    run: Run
    steps: list[Step]
    uncached_passes: int
    compared: int = 0
    agreeing: int = 0
    first_step: int | None = None
    first_position: int | None = None


def uncached(network: Network, canvas: Canvas, settings: DecodeSettings) -> Run:
    """The uncached decode: every pass over all rows, nothing kept."""
    return denoise(network, canvas, lambda: Method(None, PassMemory()), settings, trace=False)


def compare(
    network: Network,
    canvas: Canvas,
    make_method: Callable[[], Method],
    settings: DecodeSettings,
    truth: Run,
    *,
    span: tuple[int, int] | None = None,
    needles: Sequence[tuple[int, int]] = (),
    codec: TextCodec | None = None,
) -> Comparison:
    """Decodes one canvas in place with a method, and compares each pass with the exact one and with `truth`.

    Args:
        truth: from `uncached`, on a canvas that was the same.
        span, codec: as `denoise` takes them.
        needles: half-open ranges of positions whose tokens a filter should keep.
    """
    built: list[Method] = []

    def make() -> Method:
        built.append(make_method())
        return built[-1]

    wanted = [p for start, stop in needles for p in range(start, stop)]
    watch = _Watch(network, canvas, settings, built, torch.tensor(wanted, device=network.device, dtype=torch.long))
    run = denoise(network, canvas, make, settings, watch, span, trace=False, codec=codec)
    # a probe commits nothing and is no step
    passes = run.passes[len(run.passes) - len(watch.steps) :]
    for step, made in zip(watch.steps, passes, strict=True):
        step.kind, step.rows, step.committed = made.kind, made.rows, made.committed
    found = Comparison(run, watch.steps, len(truth.passes))
    follow(found, truth.canvas.response(), truth.passes)
    return found


def follow(found: Comparison, response: Sequence[int], passes: Sequence[Pass]) -> None:
    """Compares what was committed with the uncached trajectory: its response and its passes."""
    canvas = found.run.canvas
    own = canvas.response()
    filled = [(a, b) for a, b in zip(own, response, strict=True) if (a, b) != (canvas.mask_id, canvas.mask_id)]
    found.compared, found.agreeing = len(filled), sum(a == b for a, b in filled)
    for i in range(max(len(found.steps), len(passes))):
        mine = set(found.steps[i].committed) if i < len(found.steps) else set()
        theirs = set(passes[i].committed) if i < len(passes) else set()
        if i < len(found.steps):
            found.steps[i].same = i < len(passes) and mine == theirs
            found.steps[i].agreeing = sum(response[p - canvas.start] == token for p, token in mine)
        if mine != theirs and found.first_step is None:
            found.first_step, found.first_position = i, min(p for p, _ in mine ^ theirs)


@dataclass
class _Watch:
    """Sees every pass of a decode, and computes its exact counterpart."""

    network: Network
    canvas: Canvas
    settings: DecodeSettings
    methods: list[Method]
    needles: Tensor
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids = self.canvas.ids.clone()

    def __call__(self, window: Window, output: Output, decision: Decision) -> None:
        exact = _Exact(self.network, self.canvas, self.methods[0], output.positions, self.needles)
        logits = exact.measure(self._ids)
        if self.settings.cfg_scale > 0:
            ids = torch.full_like(self._ids, self.canvas.mask_id)
            response = slice(self.canvas.start, self.canvas.stop)
            ids[:, response] = self._ids[:, response]
            free = exact.head(self.network.hidden(ids))
            logits = free + (self.settings.cfg_scale + 1) * (logits - free)
        self.steps.append(
            Step(
                window,
                output.positions,
                _divergence(logits, output.logits),
                exact.drift(0),
                exact.drift(1),
                _numbers(exact.mass),
                _numbers(exact.found),
            )
        )
        # the canvas holds this pass's commits by now, and the next pass sees it so
        self._ids.copy_(self.canvas.ids)


class _Exact:
    """One dense pass by the network's primitives, measured layer by layer against what a method holds."""

    def __init__(
        self, network: Network, canvas: Canvas, method: Method, positions: tuple[int, ...], needles: Tensor
    ) -> None:
        self.network, self.memory, self.needles = network, method.memory, needles
        self.start, self.stop = canvas.start, canvas.stop
        rows = [network.config.row_of(p) for p in positions]
        self.rows = torch.tensor(rows, device=network.device, dtype=torch.long)
        # per layer: (keys, values), each as (prompt, response)
        self.drifts: list[list[list[Tensor]] | None] = []
        self.mass: list[Tensor | None] = []
        self.found: list[Tensor | None] = []

    def measure(self, ids: Tensor) -> Tensor:
        """Logits [len(positions), V] of the pass over ids [1, N]."""
        net, where = self.network, slice(0, ids.shape[1])
        x = net.embed(ids)
        for layer in range(net.config.num_layers):
            q, k, v = net.project(layer, x)
            q, k = net.rope(q, where), net.rope(k, where)
            self._compare(layer, q, k, v)
            x = x + net.out(layer, net.attend(q, [(k, v)]))
            x = x + net.ffn(layer, x)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        return self.network.head(x.index_select(1, self.rows))[0]

    def _compare(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        held = self.memory.held(layer)
        self.drifts.append(None if held is None else [self._distances(held[0], k), self._distances(held[1], v)])
        readable = self._readable(layer, q)
        self.mass.append(None if readable is None else self._mass(q.index_select(2, self.rows), k, readable))
        kept = None if readable is None or not len(self.needles) else readable[:, :, self.needles].double().mean()
        self.found.append(kept)

    def _distances(self, held: Tensor, exact: Tensor) -> list[Tensor]:
        """Relative Frobenius distance outside the response and inside it; not a number where there is nothing."""
        wide = torch.promote_types(exact.dtype, torch.float32)
        held, exact = held.to(wide), exact.to(wide)
        squares = [t.square().sum(dim=(0, 1, 3), dtype=torch.float64) for t in (held - exact, exact)]
        inside = [s[self.start : self.stop].sum() for s in squares]
        outside = [s[: self.start].sum() + s[self.stop :].sum() for s in squares]
        return [(part[0] / part[1]).sqrt() for part in (outside, inside)]

    def _readable(self, layer: int, q: Tensor) -> Tensor | None:
        """Which keys [1, H or 1, N] the pass could read, by head where the memory tells; None: all."""
        positions = self.memory.readable(layer)
        if positions is None:
            return None
        try:
            # a query of zeros gives every key that can be read the same weight
            weights = self.memory.attention_rows(layer, torch.zeros_like(q[:, :, :1]))
        except TypeError:
            weights = None
        if weights is not None and weights.shape[3] == q.shape[2]:
            return weights[:, :, 0] > 0
        seen = torch.zeros(1, 1, q.shape[2], dtype=torch.bool, device=q.device)
        seen[..., positions] = True
        return seen

    def _mass(self, q: Tensor, k: Tensor, readable: Tensor) -> Tensor:
        kept = [
            (self.network.attention_rows(part, [k]) * readable[:, :, None]).sum(dim=-1, dtype=torch.float64).flatten()
            for part in torch.split(q, _ROWS_AT_ONCE, dim=2)
        ]
        return torch.cat(kept).mean()

    def drift(self, which: int) -> dict[str, Shares]:
        """That of keys (0) or values (1), by part of the canvas."""
        parts = ("prompt", "response")
        return {
            part: _numbers([None if d is None else d[which][i] for d in self.drifts]) for i, part in enumerate(parts)
        }


def _divergence(exact: Tensor, own: Tensor) -> list[float]:
    """KL(exact || own) of each row of logits, in float64."""
    found = []
    for a, b in zip(torch.split(exact, _ROWS_AT_ONCE), torch.split(own, _ROWS_AT_ONCE), strict=True):
        p, q = torch.log_softmax(a.double(), dim=-1), torch.log_softmax(b.double(), dim=-1)
        # a logit of minus infinity has no mass, and rounding may leave the sum a little below 0
        found.append(torch.nan_to_num(p.exp() * (p - q), nan=0.0, posinf=torch.inf).sum(dim=-1).clamp(min=0))
    return torch.cat(found).tolist() if found else []


def _numbers(values: Sequence[Tensor | None]) -> Shares:
    """Numbers on the host with one wait for the device; None for what is missing or undefined."""
    known = [v.double() for v in values if v is not None]
    numbers = iter(torch.stack(known).tolist() if known else [])
    found: Shares = []
    for value in values:
        number = None if value is None else next(numbers)
        found.append(None if number is None or number != number else number)
    return found
