"""ACache beyond the fixtures: sharing across requests, costs, ranges, shifted logits and grouped heads, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from golden_cases import model
from torch import Tensor

from dllm_bench import Generation, UserError, generate, prepare
from dllm_bench.caching.memory import Memory, Pieces
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.methods import acache
from dllm_bench.methods.acache import ACache, ACacheOptions
from dllm_bench.methods.fast_dllm import FastDllm

LLADA, DREAM = "llada_acache", "dream_fastdllm"
DECODE = {"gen_length": 16, "block_length": 8, "threshold": 0.6, "eos_stop": False}
AFFIX = [(7 * i + 3) % 120 for i in range(30)]
HEAD, QUESTION, OTHER = [5, 9, 11], [40, 41, 2, 17, 90], [77, 3, 61, 62, 63, 64, 8, 8, 19]


def run(prompt: Sequence[int], options: dict[str, Any] | None = None, name: str = LLADA, **more: Any) -> Generation:
    return generate(model(name), prompt, "acache", options or {}, DECODE, trace=True, **more)


def same(a: Generation, b: Generation) -> bool:
    return (a.output_ids, a.passes, a.counters) == (b.output_ids, b.passes, b.counters)


# -- state that requests share --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_ratio": 1.0}, {"anchor_ratio": 0.0}, {"drop_non_anchor": True}, {"selector": "cacheblend"}],
    ids=str,
)
def test_requests_that_share_answer_as_alone_and_never_write_it(options: dict[str, Any]) -> None:
    shared = prepare(model(LLADA), AFFIX, "acache", options)
    assert shared is not None
    before = shared.checksum()
    for prompt, span in (([*AFFIX, *QUESTION], (0, 30)), ([*HEAD, *AFFIX, *OTHER], (3, 33))):
        alone, sharing = run(prompt, options, span=span), run(prompt, options, span=span, shared=shared)
        assert same(alone, sharing)
        assert alone.preparation is not None and sharing.preparation is None
        assert shared.checksum() == before


def test_the_checksum_sees_one_changed_number() -> None:
    shared = prepare(model(LLADA), AFFIX, "acache")
    assert shared is not None
    before = shared.checksum()
    with torch.inference_mode():
        shared.tensors["values"][2][0, 1, 4, 0] += 1e-3
    assert shared.checksum() != before


def test_the_place_of_the_affix_does_not_change_what_is_shared() -> None:
    first = prepare(model(LLADA), [*AFFIX, *QUESTION], "acache", span=(0, 30))
    moved = prepare(model(LLADA), [*HEAD, *AFFIX, *OTHER], "acache", {"affix_start": 3, "affix_end": 33})
    assert first is not None and moved is not None
    assert first.checksum() == moved.checksum() and first.ids == moved.ids == tuple(AFFIX)


def test_state_is_made_again_only_for_other_tokens() -> None:
    first = prepare(model(LLADA), [*AFFIX, *QUESTION], "acache", span=(0, 30))
    again = prepare(model(LLADA), [*HEAD, *AFFIX, *OTHER], "acache", span=(3, 33), reuse=first)
    other = prepare(model(LLADA), [*HEAD, *AFFIX, *OTHER], "acache", span=(4, 33), reuse=first)
    assert again is first
    assert other is not None and other.ids == tuple(AFFIX[1:])
    assert prepare(model(LLADA), AFFIX, "fast_dllm", reuse=first) is None
    assert prepare(model(LLADA), AFFIX, "acache", {"affix": "none"}) is None


def test_shared_keys_are_those_of_the_affix_alone_before_rope() -> None:
    shared, net = prepare(model(LLADA), AFFIX, "acache"), model(LLADA).network
    assert shared is not None
    x = net.embed(torch.tensor([AFFIX]))
    where = slice(0, len(AFFIX))
    for layer in range(net.config.num_layers):
        q, k, v = net.project(layer, x)
        torch.testing.assert_close(shared.tensors["keys"][layer], k)
        torch.testing.assert_close(shared.tensors["values"][layer], v)
        x = x + net.out(layer, net.attend(net.rope(q, where), [(net.rope(k, where), v)]))
        x = x + net.ffn(layer, x)
    size = net.config.num_layers * net.config.num_kv_heads * len(AFFIX) * net.config.head_dim * 4
    assert shared.bytes() == {"shared_keys": size, "shared_values": size}


def test_state_that_does_not_fit_is_refused() -> None:
    shared = prepare(model(LLADA), AFFIX, "acache")
    prompt = [*AFFIX, *QUESTION]
    with pytest.raises(UserError, match="30 tokens, the request's span has 29"):
        run(prompt, span=(0, 29), shared=shared)
    with pytest.raises(UserError, match="number 0 is 3 there, 10 in the request"):
        run(prompt, span=(1, 31), shared=shared)
    with pytest.raises(UserError, match="another loaded model"):
        generate(model(LLADA, "float64"), prompt, "acache", {}, DECODE, span=(0, 30), shared=shared)
    with pytest.raises(UserError, match="reads no shared state"):
        generate(model(LLADA), prompt, "fast_dllm", {}, DECODE, shared=shared)
    with pytest.raises(UserError, match="reads no shared state"):
        run(prompt, {"affix": "none"}, shared=shared)
    assert shared is not None
    with pytest.raises(UserError, match="made by method 'acache', not by 'other'"):
        shared.check("other", model(LLADA).network, AFFIX)


def test_shared_state_tells_where_a_prefix_or_a_suffix_ends() -> None:
    shared = prepare(model(LLADA), AFFIX, "acache")
    assert same(run([*AFFIX, *QUESTION], shared=shared), run([*AFFIX, *QUESTION], span=(0, 30)))
    canvas = [*QUESTION, *[0] * 16, *OTHER, *AFFIX]
    decode = {**DECODE, "fill": (5, 21)}
    suffix = generate(model(LLADA), canvas, "acache", {"affix": "suffix"}, decode, True, shared=shared)
    assert same(suffix, generate(model(LLADA), canvas, "acache", {}, decode, True, span=(30, 60)))


# -- costs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["acache", "cacheblend"])
def test_affix_and_probe_are_counted_apart(selector: str) -> None:
    got = run([*AFFIX, *QUESTION], {"selector": selector}, span=(0, 30))
    layers, outside = model(LLADA).config.num_layers, 5 + 16
    # nobody needs the last layer's output of these two
    assert got.preparation is not None and got.probe is not None
    assert (got.preparation["rows"], got.preparation["row_layers"]) == (30, 30 * (layers - 1))
    probed = outside if selector == "acache" else outside + 30
    assert (got.probe["rows"], got.probe["row_layers"]) == (probed, probed * (layers - 1))
    assert got.preparation["seconds"] > 0 and got.probe["seconds"] > 0
    passes = got.passes or []
    assert [p["rows"] for p in passes if p["method"].get("refresh")] == [outside + math.ceil(0.2 * 30)] * 2
    assert got.row_layers == probed * (layers - 1) + layers * sum(p["rows"] for p in passes[1:])
    assert got.nfe == len(passes) == len(got.pass_seconds)
    assert passes[0]["kind"] == got.pass_seconds[0][0] == ("partial" if selector == "acache" else "dense")
    assert got.dense_passes == (selector == "cacheblend")
    assert got.counters.head_rows == sum(len(w) for w in windows(got))


def windows(got: Generation) -> list[list[int]]:
    """Masks of the block that each pass could fill."""
    found, left = [], list(range(35, 51))
    for p in (got.passes or [])[1:]:
        block = [i for i in left if i < left[0] - (left[0] - 35) % 8 + 8]
        found.append(block)
        left = [i for i in left if i not in {at for at, _ in p["committed"]}]
    return found


def test_bytes_name_the_shared_state_and_what_a_request_keeps_of_it() -> None:
    prompt, net = [*AFFIX, *QUESTION], model(LLADA).network
    one = net.config.num_layers * net.config.num_kv_heads * net.config.head_dim * 4
    whole, dropped = run(prompt, span=(0, 30)), run(prompt, {"drop_non_anchor": True}, span=(0, 30))
    assert whole.cache_bytes == {k: one * n for k, n in zip(KINDS, (51, 51, 30, 30), strict=True)}
    assert dropped.cache_bytes == {k: one * n for k, n in zip(KINDS, (27, 27, 30, 30), strict=True)}


KINDS = ("keys", "values", "shared_keys", "shared_values")


# -- limits of the method -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"affix": "none"}, {"affix_start": 4, "affix_end": 4}], ids=str)
@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_without_an_affix_it_is_the_dual_cache(name: str, options: dict[str, Any]) -> None:
    prompt = [*AFFIX, *QUESTION]
    dual = generate(model(name), prompt, "fast_dllm", {}, DECODE, trace=True)
    got = run(prompt, options, name)
    assert (got.output_ids, got.counters) == (dual.output_ids, dual.counters)
    assert got.preparation is None and got.probe is None


@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize("cfg", [0.0, 1.5])
def test_all_anchors_are_the_dual_cache_and_a_probe(name: str, cfg: float) -> None:
    prompt, decode = [*HEAD, *AFFIX, *QUESTION], {**DECODE, "cfg_scale": cfg}
    dual = generate(model(name), prompt, "fast_dllm", {}, decode, trace=True)
    got = generate(model(name), prompt, "acache", {"anchor_ratio": 1}, decode, trace=True, span=(3, 33))
    assert (got.output_ids, got.nfe) == (dual.output_ids, dual.nfe + 1)
    assert [(p["kind"], p["rows"], p["committed"]) for p in (got.passes or [])[1:]] == [
        (p["kind"], p["rows"], p["committed"]) for p in dual.passes or []
    ]
    assert got.preparation is not None
    assert got.preparation["rows"] == (30 if cfg == 0 else 60)


def test_guidance_makes_the_affix_of_its_unconditional_stream_itself() -> None:
    prompt, decode = [*HEAD, *AFFIX, *QUESTION], {**DECODE, "cfg_scale": 1.0}
    shared = prepare(model(LLADA), prompt, "acache", {}, decode, span=(3, 33))
    alone, sharing = (
        generate(model(LLADA), prompt, "acache", {}, decode, True, span=(3, 33), shared=given)
        for given in (None, shared)
    )
    assert same(alone, sharing)
    assert alone.preparation is not None and sharing.preparation is not None
    assert (alone.preparation["rows"], sharing.preparation["rows"]) == (60, 30)


def test_no_anchors_need_no_probe() -> None:
    got = run([*AFFIX, *QUESTION], {"anchor_ratio": 0}, span=(0, 30))
    assert got.probe is None and (got.passes or [])[0]["rows"] == 21


def test_one_affix_token_and_nothing_else() -> None:
    got = run([7])
    assert got.masks_left == 0 and (got.passes or [])[0]["method"]["anchors"] == [0]


# -- where the affix is ---------------------------------------------------------------------------------------------


def anchors(got: Generation) -> list[int]:
    found: list[int] = (got.passes or [])[0]["method"]["anchors"]
    return found


def test_options_come_before_the_declared_span_and_that_before_the_default() -> None:
    prompt = [*HEAD, *AFFIX, *QUESTION]
    assert run(prompt).preparation["rows"] == 38  # type: ignore[index]
    assert run(prompt, span=(3, 33)).preparation["rows"] == 30  # type: ignore[index]
    assert run(prompt, {"affix_end": 20}, span=(3, 33)).preparation["rows"] == 20  # type: ignore[index]
    assert run(prompt, {"affix_start": 9}, span=(3, 33)).preparation["rows"] == 29  # type: ignore[index]
    canvas, decode = [*QUESTION, *[0] * 16, *AFFIX], {**DECODE, "fill": (5, 21)}
    behind = generate(model(LLADA), canvas, "acache", {"affix_start": 25}, decode, trace=True)
    assert behind.preparation["rows"] == 26  # type: ignore[index]
    assert min(anchors(behind)) >= 25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"affix_end": 36}, r"affix 0:36 overlaps the response 35:51: nearest valid affix_end is 35"),
        ({"affix_start": 40, "affix_end": 45}, r"overlaps the response"),
        ({"affix_end": 99}, r"affix 0:99 goes beyond the canvas: nearest valid affix_end is 35"),
        ({"affix_start": 99}, r"affix 99:51 goes beyond the canvas: nearest valid affix_start is 34"),
        ({"affix_start": 5, "affix_end": 3}, r"lies before affix_start=5: nearest valid is 5"),
        ({"affix": "none", "affix_end": 3}, r"affix=none excludes"),
        ({"anchor_ratio": 1.2}, r"at most 1"),
        ({"affix": "infix"}, r"prefix, suffix, none"),
    ],
    ids=str,
)
def test_bad_ranges_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run([*AFFIX, *QUESTION], options)


def test_a_declared_span_outside_the_prompt_is_refused() -> None:
    for span in ((0, 36), (-1, 4), (5, 4)):
        with pytest.raises(UserError, match="is no range of the prompt's 35 tokens"):
            run([*AFFIX, *QUESTION], span=span)


# -- anchors --------------------------------------------------------------------------------------------------------


def test_bottom_and_top_do_not_meet_and_random_follows_the_seed_alone() -> None:
    prompt = [*AFFIX, *QUESTION]
    top, bottom = (anchors(run(prompt, {"selection": s}, span=(0, 30))) for s in ("top", "bottom"))
    assert not set(top) & set(bottom) and len(top) == len(bottom) == 6
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(drawn))
        got = generate(
            model(LLADA), prompt, "acache", {"selection": "random"}, {**DECODE, "seed": seed}, True, span=(0, 30)
        )
        drawn.append(anchors(got))
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(d == sorted(set(d)) and len(d) == 6 and max(d) < 30 for d in drawn)


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_importance_is_the_masks_attention_to_affix_keys_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, span = [*HEAD, *AFFIX, *QUESTION], (3, 33)
    wanted = literal_importance(name, prompt, span)
    for chunk in (acache._CHUNK, 30 * model(name).config.num_heads * 3, 1):
        monkeypatch.setattr(acache, "_CHUNK", chunk)
        got = run(prompt, {}, name, span=span)
        assert (got.passes or [])[0]["method"]["importance"] == pytest.approx(wanted.tolist(), rel=1e-4)
    assert anchors(got) == sorted((wanted.topk(6).indices + 3).tolist())


def test_the_probe_holds_few_attention_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net, held = model(LLADA).network, []
    weights = net.attention_rows

    def look(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
        held.append(weights(q, keys).numel())
        return weights(q, keys)

    monkeypatch.setattr(net, "attention_rows", look)
    monkeypatch.setattr(acache, "_CHUNK", 500)
    run([*AFFIX, *QUESTION], span=(0, 30))
    assert held == [480] * 4 * net.config.num_layers


def literal_importance(name: str, prompt: list[int], span: tuple[int, int]) -> Tensor:
    """With repeated heads and materialised attention."""
    net = model(name).network
    shared = prepare(model(name), prompt, "acache", {}, DECODE, span=span)
    assert shared is not None
    ids = torch.tensor([[*prompt, *[net.config.mask_id] * 16]])
    outside = torch.tensor([i for i in range(ids.shape[1]) if not span[0] <= i < span[1]])
    x, total = net.embed(ids[:, outside]), torch.zeros(span[1] - span[0])
    groups = net.config.num_heads // net.config.num_kv_heads
    for layer in range(net.config.num_layers):
        q, k, v = net.project(layer, x)
        q, k = net.rope(q, outside), net.rope(k, outside)
        affix = net.rope(shared.tensors["keys"][layer], slice(*span))
        weights = q[:, :, -16:] @ affix.repeat_interleave(groups, 1).mT / math.sqrt(net.config.head_dim)
        total += weights.softmax(-1).sum(dim=(0, 1, 2))
        x = x + net.out(layer, net.attend(q, [(affix, shared.tensors["values"][layer]), (k, v)]))
        x = x + net.ffn(layer, x)
    return total


# -- keys and values of a request -----------------------------------------------------------------------------------


def decode_with(method: ACache, prompt: Sequence[int], name: str, on_pass: Any, **more: Any) -> Run:
    settings = DecodeSettings.make(DECODE, model(name).family)
    canvas = Canvas.make(list(prompt), settings, model(name).config, torch.device("cpu"))
    return denoise(model(name).network, canvas, lambda: method, settings, on_pass, **more)


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_only_anchors_leave_the_shared_state(name: str) -> None:
    net, start, stop = model(name).network, 3, 33
    shared = prepare(model(name), [*HEAD, *AFFIX, *QUESTION], "acache", {}, DECODE, span=(start, stop))
    assert shared is not None
    method, seen = ACache(ACacheOptions()), []

    def look(*_: Any) -> None:
        for layer in range(net.config.num_layers):
            keys, values = method.memory.whole(layer)
            rotated = net.rope(shared.tensors["keys"][layer], slice(start, stop))
            same_k = (keys[:, :, start:stop] == rotated).all(dim=-1).all(dim=1)[0]
            same_v = (values[:, :, start:stop] == shared.tensors["values"][layer]).all(dim=-1).all(dim=1)[0]
            if layer > 0:  # layer 0 sees the token alone, wherever it stands
                seen.append([i + start for i in range(stop - start) if not (same_k[i] and same_v[i])])

    run = decode_with(method, [*HEAD, *AFFIX, *QUESTION], name, look, span=(start, stop), shared=shared)
    chosen = run.passes[0].method["anchors"]
    assert len(chosen) == 6 and seen and all(s == chosen for s in seen)


def test_the_row_before_the_response_is_recomputed_where_logits_read_it() -> None:
    assert model(DREAM).config.shift
    for options, count in (({"anchor_ratio": 0}, 17), ({"drop_non_anchor": True, "anchor_ratio": 0}, 17)):
        got = run(AFFIX, options, DREAM)
        assert (got.passes or [])[0]["rows"] == count and got.masks_left == 0
    assert (run(AFFIX, {"anchor_ratio": 0}).passes or [])[0]["rows"] == 16


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_dropped_tokens_are_gone_and_the_others_keep_their_positions(name: str) -> None:
    """Against a dense memory in which the dropped keys are hidden by a mask."""
    prompt, span = [*HEAD, *AFFIX, *QUESTION], (3, 33)
    got = run(prompt, {"drop_non_anchor": True}, name, span=span)
    hiding = ACache(ACacheOptions(), Hiding(acache.AnchorMemory()))
    assert isinstance(hiding.memory, Hiding)
    kept = sorted({*range(3), *range(33, 54), *anchors(got)})
    hiding.memory.kept = torch.tensor(kept)
    run_ = decode_with(hiding, prompt, name, None, span=span)
    assert [p.committed for p in run_.passes[1:]] == [
        tuple(tuple(c) for c in p["committed"]) for p in (got.passes or [])[1:]
    ]
    assert [p["rows"] for p in (got.passes or [])] == [p.rows for p in run_.passes]


EMPTY = {"_k": [], "_v": [], "_kept": None}


class Stacked(Memory):
    """Passes everything to the memory below and keeps a record."""

    name = "stacked"

    def __init__(self, lower: Memory) -> None:
        super().__init__(None, lower)
        self.below = lower
        self.writes: list[tuple[int, int]] = []
        self.refreshes: list[bool] = []

    def begin_pass(self, window: Window, refresh: bool) -> None:
        super().begin_pass(window, refresh)
        self.refreshes.append(refresh)

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self.writes.append((layer, rows.count))
        self.below.write(layer, rows, k, v)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        return self.below.read(layer, q, rows)


class Hiding(Stacked):
    kept: Tensor

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        k, v = self.below.whole(layer)
        return [(k[:, :, self.kept], v[:, :, self.kept])]


class Lossy(Stacked):
    @property
    def exact(self) -> bool:
        return False


def over_lossy(lower: Memory) -> Stacked:
    return Stacked(Lossy(lower))


@pytest.mark.parametrize(("make", "times"), [(Stacked, 1), (Lossy, 2), (over_lossy, 2)])
def test_a_memory_gets_the_affix_once_or_in_every_refresh_where_it_keeps_a_reduced_form(
    make: Callable[[Memory], Stacked], times: int
) -> None:
    method = ACache(ACacheOptions(), make(acache.AnchorMemory()))
    run = decode_with(method, [*AFFIX, *QUESTION], LLADA, None, span=(0, 30))
    assert isinstance(method.memory, Stacked)
    layers = model(LLADA).config.num_layers
    assert [w for w in method.memory.writes if w[1] == 30] == [(i, 30) for i in range(layers)] * times
    # the probe is none of the memory's business; a refresh is announced although it is not dense
    assert method.memory.refreshes == [p.method["refresh"] for p in run.passes[1:]]
    assert sum(method.memory.refreshes) == 2


def test_dropping_tokens_under_another_memory_is_refused() -> None:
    settings = DecodeSettings.make(DECODE)
    method = ACache(ACacheOptions(drop_non_anchor=True), Stacked(acache.AnchorMemory()))
    with pytest.raises(UserError, match="drop_non_anchor=true keeps parts of the canvas only"):
        method.check(settings)
    parse_method("acache", {"drop_non_anchor": True}).build().check(settings)


@pytest.mark.parametrize("options", [ACacheOptions(), ACacheOptions(drop_non_anchor=True)], ids=str)
def test_no_state_survives_a_request(options: ACacheOptions) -> None:
    method, fresh = ACache(options), vars(ACache(options)).keys()
    answers = []
    for prompt, span in (([*AFFIX, *QUESTION], (0, 30)), ([*HEAD, *AFFIX], (2, 20)), ([*AFFIX, *QUESTION], (0, 30))):
        run = decode_with(method, prompt, LLADA, None, span=span)
        answers.append((run.canvas.response(), run.passes))
        assert sum(method.bytes().values()) == 0 and method.shared is None
        assert vars(method).keys() - fresh <= {"_refresh"}
        assert vars(method.memory) == {"options": method.memory.options, "lower": None, **EMPTY}
    assert answers[0] == answers[2]


def test_bfloat16() -> None:
    got = generate(model(LLADA, "bfloat16"), [*AFFIX, *QUESTION], "acache", {}, DECODE, trace=True, span=(0, 30))
    assert got.masks_left == 0 and len(anchors(got)) == 6


def test_it_shares_the_schedule_with_fast_dllm() -> None:
    assert ACache.by_blocks and FastDllm.by_blocks
    capped = ACache(ACacheOptions(step_cap=True))
    settings = DecodeSettings.make({"gen_length": 32, "block_length": 8, "steps": 8})
    assert (capped.pass_limit(settings), ACache(ACacheOptions()).pass_limit(settings)) == (2, None)
