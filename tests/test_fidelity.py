"""Fidelity: what is measured against the uncached pass on the same canvas, and that measuring changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_cases import model
from torch import Tensor

from dllm_bench.caching.memory import DenseMemory, Memory
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding import clock
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.fidelity import Comparison, Step, compare, follow, uncached
from dllm_bench.decoding.loop import Pass, Run, denoise
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.errors import UserError
from dllm_bench.models.counters import Counters
from dllm_bench.reporting.fidelity import DRIFTS, ERRORS, first_error
from dllm_bench.running.fidelity import comparison_rows

LLADA, DREAM = "llada_fastdllm", "dream_fastdllm"
PROMPT = list(range(3, 14))
DECODE = {"gen_length": 16, "block_length": 8, "tokens_per_pass": 2, "eos_stop": False}

both_families = pytest.mark.parametrize("name", [LLADA, DREAM])


def canvas_of(name: str, **decode: Any) -> tuple[Canvas, DecodeSettings]:
    m = model(name)
    settings = DecodeSettings.make({**DECODE, **decode}, m.family)
    return Canvas.make(PROMPT, settings, m.config, m.network.device), settings


def compared(
    name: str, make: Callable[[], Method], needles: tuple[tuple[int, int], ...] = (), **decode: Any
) -> Comparison:
    net = model(name).network
    canvas, settings = canvas_of(name, **decode)
    truth = uncached(net, canvas, settings)
    return compare(net, canvas_of(name, **decode)[0], make, settings, truth, needles=needles)


def ok_rows(found: Comparison) -> list[dict[str, Any]]:
    return [{"status": "ok", "key": "k", **row} for row in comparison_rows(found)]


class Remembering(Method):
    """Computes all rows in every pass, and holds them."""

    @classmethod
    def bottom_memory(cls) -> Memory:
        return DenseMemory()


@both_families
@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_the_uncached_decode_does_not_differ_from_itself(name: str, cfg_scale: float) -> None:
    for make in (parse_method("baseline").build, Remembering):
        found = compared(name, make, cfg_scale=cfg_scale)
        assert (found.agreeing, found.compared, found.first_step, found.first_position) == (16, 16, None, None)
        assert len(found.steps) == found.uncached_passes == 8
        assert all(step.same and step.agreeing == len(step.committed) == 2 for step in found.steps)
        assert {kl for step in found.steps for kl in step.kl} == {0.0}
        rows = ok_rows(found)
        if make is Remembering:
            assert {value for row in rows for drift in DRIFTS for value in row[drift]} == {0.0}
        else:
            assert {row[drift] for row in rows for drift in DRIFTS} == {None}, "it holds nothing that could drift"
        assert first_error(rows, 0.0) is None
        assert {row["mass_kept"] for row in rows} == {row["needles_kept"] for row in rows} == {None}


def drifting(layer: int, step: int, what: str) -> type[Method]:
    """A dense method whose memory spoils the keys or values of one layer from one step on."""

    class Spoiled(DenseMemory):
        def begin(self, request: Request) -> None:
            super().begin(request)
            self.passes = 0

        def begin_pass(self, window: Window, refresh: bool) -> None:
            self.passes += 1

        def write(self, at: int, rows: Rows, k: Tensor, v: Tensor) -> None:
            if at == layer and self.passes > step:
                k, v = (1.05 * k, v) if what == "k" else (k, 1.05 * v)
            super().write(at, rows, k, v)

    class Drifting(Method):
        @classmethod
        def bottom_memory(cls) -> Memory:
            return Spoiled()

    return Drifting


@both_families
@pytest.mark.parametrize("what", ["k", "v"])
@pytest.mark.parametrize(("layer", "step"), [(0, 0), (1, 5), (0, 7), (1, 2)])
def test_planted_drift_is_named(name: str, layer: int, step: int, what: str) -> None:
    found = compared(name, drifting(layer, step, what))
    rows = ok_rows(found)
    assert first_error(rows, 1e-4) == (layer, step)
    column = "key_drift_prompt" if what == "k" else "value_drift_prompt"
    assert rows[step][column][layer] == pytest.approx(0.05, rel=1e-4)
    assert [row["kl_max"] > 0 for row in rows] == [i >= step for i in range(len(rows))]
    assert first_error(rows, 10.0) is None


@both_families
@pytest.mark.parametrize("cfg_scale", [0.0, 1.5])
def test_divergence_is_from_the_uncached_logits_of_the_same_canvas(name: str, cfg_scale: float) -> None:
    """Replays the trajectory: before each commit, the plain network is asked with the ids as they stand."""
    net = model(name).network
    make = parse_method("fast_dllm").build
    found = compared(name, make, cfg_scale=cfg_scale)
    canvas, settings = canvas_of(name, cfg_scale=cfg_scale)
    ids, wanted = canvas.ids.clone(), []

    def logits(given: Tensor, rows: list[int]) -> Tensor:
        return net.head(net.hidden(given)[:, rows])[0].double()

    def on_pass(window: Window, output: Output, decision: Decision) -> None:
        rows = [net.config.row_of(p) for p in output.positions]
        exact = logits(ids, rows)
        if cfg_scale:
            blank = ids.clone()
            blank[:, : canvas.start] = canvas.mask_id
            free = logits(blank, rows)
            exact = free + (cfg_scale + 1) * (exact - free)
        p, q = exact.softmax(-1), output.logits.double().softmax(-1)
        wanted.append((p * (p / q).log()).sum(-1))
        ids[0, decision.positions] = decision.tokens

    denoise(net, canvas, make, settings, on_pass)
    assert len(wanted) == len(found.steps)
    for step, kl in zip(found.steps, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(step.kl, dtype=torch.float64), kl, atol=1e-5, rtol=1e-3)
    assert max(float(kl.max()) for kl in wanted) > 1e-4, "a cache of old keys must show"
    rows = ok_rows(found)
    assert rows[3]["kl_mean"] == pytest.approx(sum(found.steps[3].kl) / len(found.steps[3].kl))
    assert rows[3]["kl_max"] == max(found.steps[3].kl)


def test_drift_is_relative_and_apart_for_prompt_and_response() -> None:
    net = model(LLADA).network
    built: list[Method] = []

    def make() -> Method:
        built.append(parse_method("fast_dllm").build())
        return built[-1]

    found = compared(LLADA, make)
    canvas, settings = canvas_of(LLADA)
    ids, step = canvas.ids.clone(), [0]

    def on_pass(window: Window, output: Output, decision: Decision) -> None:
        x, where = net.embed(ids), slice(0, canvas.length)
        for layer in range(net.config.num_layers):
            q, k, v = net.project(layer, x)
            k = net.rope(k, where)
            held = built[-1].memory.whole(layer)
            mine = found.steps[step[0]]
            for drift, own, exact in ((mine.key_drift, held[0], k), (mine.value_drift, held[1], v)):
                for part, places in (("prompt", slice(0, 11)), ("response", slice(11, 27))):
                    one, other = own[:, :, places].double(), exact[:, :, places].double()
                    distance = float((one - other).norm() / other.norm())
                    assert drift[part][layer] == pytest.approx(distance, rel=1e-3, abs=1e-7)
            x = x + net.out(layer, net.attend(net.rope(q, where), [(k, v)]))
            x = x + net.ffn(layer, x)
        ids[0, decision.positions] = decision.tokens
        step[0] += 1

    denoise(net, canvas, make, settings, on_pass)
    assert step == [8] and found.steps[3].key_drift["prompt"][-1] > 1e-4  # type: ignore[operator]


STACKS = (
    "elastic_cache+wavefilter",
    *(f"{m}+depthweave_kv+wavefilter" for m in ("fast_dllm", "elastic_cache", "acache")),
)


@pytest.mark.parametrize("method", [*(n for n in METHODS.names() if not n.startswith("toy")), *STACKS])
def test_watching_changes_nothing(method: str) -> None:
    """Filters at work on the short prompt; the blocks make refreshes follow passes that read a selection."""
    filters = [part for part, _ in parse_method(method).parts if METHODS.get(part).check_with]
    sets = {f"{part}.{key}": value for part in filters for key, value in METHODS.get(part).check_with.items()}
    net, make = model(LLADA).network, parse_method(method, sets).build
    canvas, settings = canvas_of(LLADA)
    try:
        make().check(settings)
    except UserError:
        pytest.skip("does not decode with these settings")
    alone = denoise(net, canvas, make, settings)
    found = compared(LLADA, make)
    assert found.run.canvas.response() == canvas.response()
    assert found.run.counters == alone.counters and found.run.cache_bytes == alone.cache_bytes
    assert [(p.kind, p.rows, p.committed) for p in found.run.passes] == [
        (p.kind, p.rows, p.committed) for p in alone.passes
    ]
    assert [step.committed for step in found.steps] == [p.committed for p in alone.passes if p.committed]
    assert any(value is not None for step in found.steps for value in step.mass_kept) or not filters


def test_watching_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def ticking() -> float:
        now[0] += 1.0
        return now[0]

    def slow(window: Window, output: Output, decision: Decision) -> None:
        now[0] += 1000.0

    monkeypatch.setattr(clock.time, "perf_counter", ticking)
    canvas, settings = canvas_of(LLADA)
    run = denoise(model(LLADA).network, canvas, Remembering, settings, slow)
    assert run.clock.total < 1000 and run.clock.first_block is not None and run.clock.first_block < 1000


class Blinkered(Remembering):
    """Reads everything, but says that each head could read but a part."""

    @classmethod
    def bottom_memory(cls) -> Memory:
        return Hidden()


def seen_by(head: int, position: int) -> bool:
    return position >= 11 or position % 4 == head % 4


class Hidden(DenseMemory):
    def readable(self, layer: int) -> Tensor | None:
        return torch.arange(self.request.length) if layer else None

    def attention_rows(self, layer: int, q: Tensor) -> Tensor:
        weights = super().attention_rows(layer, q)
        heads, length = weights.shape[1], weights.shape[3]
        return weights * torch.tensor([[seen_by(h, p) for p in range(length)] for h in range(heads)])[None, :, None]


def test_what_a_filter_keeps_by_head() -> None:
    net = model(LLADA).network
    found = compared(LLADA, Blinkered, needles=((2, 4), (9, 12)))
    canvas, _ = canvas_of(LLADA)
    x, where = net.embed(canvas.ids), slice(0, canvas.length)
    shares = []
    for layer in range(net.config.num_layers):
        q, k, v = net.project(layer, x)
        q, k = net.rope(q, where), net.rope(k, where)
        weights = torch.softmax((q @ k.transpose(2, 3)).double() * q.shape[3] ** -0.5, dim=-1)
        heads = q.shape[1]
        mask = torch.tensor([[seen_by(h, p) for p in range(canvas.length)] for h in range(heads)])
        rows = list(found.steps[0].positions)
        shares.append(float((weights[0][:, rows] * mask[:, None]).sum(-1).mean()))
        x = x + net.out(layer, net.attend(q, [(k, v)]))
        x = x + net.ffn(layer, x)
    assert found.steps[0].mass_kept == [None, *(pytest.approx(share, rel=1e-5) for share in shares[1:])]
    assert max(shares) < 0.9
    needles = sum(seen_by(h, p) for h in range(heads) for p in (2, 3, 9, 10, 11)) / (5 * heads)
    assert found.steps[0].needles_kept == [None, *[pytest.approx(needles)] * (len(shares) - 1)]


def test_an_evicting_memory_tells_what_it_kept() -> None:
    whole = compared(LLADA, parse_method("sparse_dllm", {"keep_ratio": 1.0}).build, needles=((2, 4),))
    half = compared(LLADA, parse_method("sparse_dllm", {"keep_ratio": 0.3}).build, needles=((2, 4),))
    for found in (whole, half):
        read_all = [set(step.mass_kept) == {None} for step in found.steps]
        assert read_all == [step.window.step < 2 for step in found.steps]
    late = [(w.mass_kept[1], w.needles_kept[1], h.mass_kept[1]) for w, h in zip(whole.steps, half.steps, strict=True)]
    for mass, needles, less in (one for one in late if one[0] is not None):
        assert mass == pytest.approx(1.0) and needles == 1.0 and less is not None and 0.05 < less < 0.99
    dropped = compared(LLADA, parse_method("acache", {"drop_non_anchor": True}).build, needles=((0, 11),))
    shares = {value for step in dropped.steps for value in step.needles_kept if value is not None}
    assert shares and max(shares) < 0.6, "a fifth of the affix is kept"


def test_where_trajectories_part() -> None:
    canvas, _ = canvas_of(LLADA)
    window = Window(0, 11, 19, 0, 1, ())

    def trajectory(*commits: tuple[tuple[int, int], ...]) -> tuple[Comparison, list[Pass], list[int]]:
        response = [canvas.mask_id] * 16
        for position, token in (pair for one in commits for pair in one):
            response[position - 11] = token
        steps = [Step(window, (), [], {}, {}, [], [], committed=one) for one in commits]
        own = replace_response(canvas, response)
        passes = [Pass("dense", 1, one, {}) for one in commits]
        return Comparison(Run(own, Counters(), clock.Clock(torch.device("cpu"))), steps, 0), passes, response

    first = trajectory(((11, 5),), ((13, 6), (14, 7)), ((12, 8),))
    swapped = trajectory(((11, 5),), ((12, 8), (14, 7)), ((13, 9),))
    follow(first[0], swapped[2], swapped[1])
    assert (first[0].first_step, first[0].first_position) == (1, 12)
    assert (first[0].compared, first[0].agreeing) == (4, 3)
    assert [step.same for step in first[0].steps] == [True, False, False]
    assert [step.agreeing for step in first[0].steps] == [1, 1, 1]
    short = trajectory(((11, 5),))
    follow(short[0], first[2], first[1])
    assert (short[0].first_step, short[0].first_position) == (1, 13), "the other one went on"
    assert (short[0].compared, short[0].agreeing) == (4, 1)


def replace_response(canvas: Canvas, response: list[int]) -> Canvas:
    made = Canvas(canvas.ids.clone(), canvas.start, canvas.stop, canvas.mask_id, ())
    made.ids[0, canvas.start : canvas.stop] = torch.tensor(response)
    return made


def test_the_first_error_is_the_earliest_and_then_the_lowest() -> None:
    row = {"status": "ok", **dict.fromkeys(ERRORS)}
    rows = [
        {**row, "step": 4, "key_drift_prompt": [0.2, 0.0, 0.0]},
        {**row, "step": 3, "key_drift_response": [0.0, None, 0.3], "value_drift_prompt": [0.01, 0.2, 0.3]},
        {"status": "error", "step": None},
    ]
    assert first_error(rows, 0.1) == (1, 3) and first_error(rows, 0.25) == (2, 3)
    assert first_error(rows, 0.001) == (0, 3) and first_error(rows, math.inf) is None
    rows.append({**row, "step": 2, "mass_kept": [None, 0.95, 0.7]})
    assert first_error(rows, 0.01) == (1, 2) and first_error(rows, 0.1) == (2, 2), "what is not read is an error too"
    assert first_error(rows, 0.1, DRIFTS) == (1, 3) and first_error(rows, 0.01, ("mass_kept",)) == (1, 2)
