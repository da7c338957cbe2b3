"""The one denoising loop: window -> pass -> commit rule -> canvas, until nothing is masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.request import Request
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.clock import Clock
from dllm_bench.decoding.rules import CommitRule, Decision, make_rule
from dllm_bench.decoding.sampling import private_generator
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Blocks, Window
from dllm_bench.lazy import LazyModule
from dllm_bench.models.counters import Counters

if TYPE_CHECKING:
    import torch

    from dllm_bench.models.network import Network
    from dllm_bench.models.text import TextCodec
else:
    torch = LazyModule("torch")

__all__ = ["Pass", "Run", "denoise"]


@dataclass(frozen=True)
class Pass:
    """One pass of a trajectory: its kind (dense or partial), the rows that entered layer 0, the tokens it committed as
    (position, id) in order of position, and what the method decided."""

    kind: str
    rows: int
    committed: tuple[tuple[int, int], ...]
    method: dict[str, Any]


@dataclass
class Run:
    """What one decode did and cost."""

    canvas: Canvas
    counters: Counters
    clock: Clock
    passes: list[Pass] = field(default_factory=list)
    cache_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes the method held between passes, by kind, at the moment it held most."""
    nominal_bytes: dict[str, float] | None = None
    """The same by the formulas of methods that have one; None where none has."""


def denoise(
    network: Network,
    canvas: Canvas,
    make_method: Callable[[], Method],
    settings: DecodeSettings,
    on_pass: Callable[[Window, Output, Decision], None] | None = None,
    codec: TextCodec | None = None,
) -> Run:
    """Decodes one canvas in place.

    Args:
        make_method: builds the method; guidance needs a second one for its unconditional stream.
        settings: resolved decode settings.
        on_pass: sees each pass's window, logits and decision, for studies of trajectories.
        codec: of the model, for methods that treat some tokens by what they mean.
    """
    run = Run(canvas, Counters(), Clock(network.device))
    network.counters = run.counters
    network.grow_rope(canvas.length)
    streams = _Streams(network, canvas, make_method, settings, codec)
    rule = _rule(network, settings, streams.method)
    limits = [n for n in (streams.method.pass_limit(settings), rule.limit(settings.steps_per_block)) if n is not None]
    assert settings.block_length is not None
    blocks = Blocks(canvas, settings.block_length, settings.steps_per_block, min(limits, default=None))
    try:
        with torch.inference_mode():
            run.clock.begin()
            while (window := blocks.next()) is not None:
                _step(run, streams, rule, window, settings, on_pass)
            run.clock.end()
    finally:
        streams.end()
    return run


def _rule(network: Network, settings: DecodeSettings, method: Method) -> CommitRule:
    whole = settings.blocks == 1 and not method.by_blocks
    generator = private_generator(settings.seed, network.device)
    return make_rule(settings, network.config.mask_id, generator, network.config.family, whole)


def _step(
    run: Run,
    streams: _Streams,
    rule: CommitRule,
    window: Window,
    settings: DecodeSettings,
    on_pass: Callable[[Window, Output, Decision], None] | None,
) -> None:
    """One pass and its commit."""
    clock, canvas = run.clock, run.canvas
    before = clock.now()
    output = streams.forward(window)
    between = clock.now()
    started = streams.method.started
    dense = started.covers(canvas.length)
    clock.passed("dense" if dense else "partial", between - before)
    decision = rule.decide(window, output.positions, output.logits)
    tokens = decision.tokens.tolist()
    streams.commit(decision)
    if settings.eos_stop:
        canvas.stop_at_eos(decision.positions, tokens)
    after = clock.now()
    done = not any(window.start <= p < window.stop for p in canvas.masked)
    clock.committed(after, after - between, len(tokens), done)
    run.counters.nfe += 1
    run.counters.dense_passes += dense
    pairs = tuple(sorted(zip(decision.positions, tokens, strict=True)))
    run.passes.append(Pass("dense" if dense else "partial", started.count, pairs, streams.method.report()))
    held = streams.bytes()
    if sum(held.values()) > sum(run.cache_bytes.values()):
        run.cache_bytes, run.nominal_bytes = held, streams.nominal_bytes()
    if on_pass is not None:
        on_pass(window, output, decision)


class _Streams:
    """The conditional stream and, under guidance, the unconditional one: each has a method of its own."""

    def __init__(
        self,
        network: Network,
        canvas: Canvas,
        make_method: Callable[[], Method],
        settings: DecodeSettings,
        codec: TextCodec | None,
    ) -> None:
        self._canvas, self._scale = canvas, settings.cfg_scale
        self.method = make_method()
        self._all = [self.method]
        self._free: torch.Tensor | None = None
        self.method.begin(Request(network, canvas, canvas.ids, settings, codec=codec))
        if self._scale > 0:
            self._free = canvas.unconditional()
            self._all.append(make_method())
            self._all[1].begin(Request(network, canvas, self._free, settings, codec=codec))

    def forward(self, window: Window) -> Output:
        output = self.method.forward(window)
        if self._free is None:
            return output
        free = self._all[1].forward(window)
        if free.positions != output.positions:
            raise RuntimeError("the two streams of guidance computed different rows")
        guided = free.logits + (self._scale + 1) * (output.logits - free.logits)
        return Output(output.positions, guided)

    def commit(self, decision: Decision) -> None:
        if not decision.positions:
            return
        self._canvas.commit(decision.positions, decision.tokens)
        if self._free is not None:
            index = torch.tensor(decision.positions, device=self._free.device)
            self._free[0, index] = decision.tokens.to(self._free.dtype)
        for method in self._all:
            method.commit(decision.positions)

    def bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for method in self._all:
            for kind, held in method.bytes().items():
                total[kind] = total.get(kind, 0) + held
        return total

    def nominal_bytes(self) -> dict[str, float] | None:
        total: dict[str, float] = {}
        for method in self._all:
            for kind, held in (method.nominal_bytes() or {}).items():
                total[kind] = total.get(kind, 0) + held
        return total or None

    def end(self) -> None:
        for method in self._all:
            method.end()
