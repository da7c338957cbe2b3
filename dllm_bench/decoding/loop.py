"""The one denoising loop: window -> pass -> commit rule -> canvas, until nothing is masked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.shared import Cost, Shared
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.clock import Clock
from dllm_bench.decoding.rules import CommitRule, Decision, make_rule
from dllm_bench.decoding.sampling import private_generator
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.streams import Streams
from dllm_bench.decoding.windows import Window
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
    preparation: Cost | None = None
    """What it took to make shared state for this request alone, outside of its counters and clock."""
    probe: Cost | None = None
    """The part of counters and clock that went into the method's probe."""


def denoise(
    network: Network,
    canvas: Canvas,
    make_method: Callable[[], Method],
    settings: DecodeSettings,
    on_pass: Callable[[Window, Output, Decision], None] | None = None,
    span: tuple[int, int] | None = None,
    shared: Shared | None = None,
    trace: bool = True,
    codec: TextCodec | None = None,
) -> Run:
    """Decodes one canvas in place.

    Args:
        make_method: builds the method; guidance needs a second one for its unconditional stream.
        settings: resolved decode settings.
        on_pass: sees each pass's window, logits and decision after the commit, for studies of trajectories. What it
            computes is neither counted nor timed.
        span: the positions that other requests hold too, as the task declares them.
        shared: state made before, for the method that shares it.
        trace: keep what the method decided in each pass (selections can be as long as the context).
        codec: of the model, for methods that treat some tokens by what they mean.
    """
    run = Run(canvas, Counters(), Clock(network.device))
    network.counters = run.counters
    network.grow_rope(canvas.length)
    streams = Streams(network, canvas, make_method, settings, span, shared, codec)
    run.preparation = streams.preparation
    steps = settings.steps_per_block
    try:
        rule = _rule(network, settings, streams.method)
        limits = [n for n in (streams.method.pass_limit(settings), rule.limit(steps)) if n is not None]
        windows = streams.method.windows(canvas, settings, min(limits, default=None))
        with torch.inference_mode():
            run.clock.begin()
            _probe(run, streams, trace)
            while (window := windows.next()) is not None:
                _step(run, streams, network, rule, window, settings, on_pass, trace)
            run.clock.end()
    finally:
        streams.end()
    return run


def _rule(network: Network, settings: DecodeSettings, method: Method) -> CommitRule:
    whole = settings.blocks == 1 and not method.by_blocks
    generator = private_generator(settings.seed, network.device)
    return make_rule(settings, network.config.mask_id, generator, network.config.family, whole, method.slides)


def _probe(run: Run, streams: Streams, trace: bool) -> None:
    """The method's own pass before the first window: counted and timed like any other, and it commits nothing."""
    clock, before = run.clock, run.clock.now()
    rows = streams.probe()
    if rows is None:
        return
    seconds = clock.now() - before
    run.probe = Cost(rows.count, run.counters.row_layers, seconds)
    _book(run, streams, rows, seconds, (), trace)


def _book(
    run: Run, streams: Streams, rows: Rows, seconds: float, pairs: tuple[tuple[int, int], ...], trace: bool
) -> None:
    """Books a pass that started with these rows and committed these (position, token) pairs."""
    kind = "dense" if rows.covers(run.canvas.length) else "partial"
    run.clock.passed(kind, seconds)
    run.counters.nfe += 1
    run.counters.dense_passes += kind == "dense"
    run.passes.append(Pass(kind, rows.count, pairs, streams.report() if trace else {}))
    held = streams.bytes()
    if sum(held.values()) > sum(run.cache_bytes.values()):
        run.cache_bytes, run.nominal_bytes = held, streams.nominal_bytes()


def _step(
    run: Run,
    streams: Streams,
    network: Network,
    rule: CommitRule,
    window: Window,
    settings: DecodeSettings,
    on_pass: Callable[[Window, Output, Decision], None] | None,
    trace: bool,
) -> None:
    """One pass and its commit."""
    clock, canvas = run.clock, run.canvas
    before = clock.now()
    output = streams.forward(window)
    between = clock.now()
    if not bool(torch.isfinite(output.logits).all()):
        raise ArithmeticError(f"logits of pass {run.counters.nfe + 1} are not finite ({output.logits.dtype} overflow?)")
    decision = rule.decide(window, output.positions, output.logits)
    tokens = decision.tokens.tolist()
    streams.commit(decision)
    if settings.eos_stop:
        canvas.stop_at_eos(decision.positions, tokens)
    after = clock.now()
    done = not any(window.start <= p < window.stop for p in canvas.masked)
    clock.committed(after, after - between, len(tokens), done)
    pairs = tuple(sorted(zip(decision.positions, tokens, strict=True)))
    _book(run, streams, streams.method.started, between - before, pairs, trace)
    if on_pass is not None:
        begun, network.counters = clock.now(), Counters()
        try:
            on_pass(window, output, decision)
        finally:
            network.counters = run.counters
        clock.skip(clock.now() - begun)
