"""dKV-Cache and Sparse-dLLM beyond the fixtures: shifted logits, shared heads, guidance, bytes, state, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_cases import model
from torch import Tensor

from dllm_bench import generate
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.errors import UserError
from dllm_bench.methods.dkv_cache import DkvCache

LLADA, DREAM = "llada_dllmcache", "dream_fastdllm"
PROMPT = [5, 77, 31, 8, 99, 12, 64, 3, 41, 18, 110]
METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dkv_cache", {"refresh_interval": 4}, {}),
    ("dkv_cache", {"variant": "greedy", "refresh_interval": 3}, {"remasking": "random"}),
    ("sparse_dllm", {}, {}),
]


def run(
    name: str,
    method: str,
    options: dict[str, Any],
    decode: dict[str, Any],
    watch: Callable[[Window, Output, Decision], None] | None = None,
) -> tuple[Run, list[Method]]:
    loaded = model(name)
    settings = DecodeSettings.make({"eos_stop": False, **decode}, loaded.family)
    canvas = Canvas.make(PROMPT, settings, loaded.config, loaded.network.device)
    built: list[Method] = []
    spec = parse_method(method, options)

    def build() -> Method:
        built.append(spec.build())
        return built[-1]

    return denoise(loaded.network, canvas, build, settings, watch), built


# -- all three ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "options", "decode"), METHODS)
@pytest.mark.parametrize("more", [{}, {"fill": "3:9"}, {"cfg_scale": 0.7}, {"tokens_per_pass": 3}])
def test_llada(method: str, options: dict[str, Any], decode: dict[str, Any], more: dict[str, Any]) -> None:
    lengths = {"block_length": 3} if "fill" in more else {"gen_length": 16, "block_length": 8}
    made, built = run(LLADA, method, options, {**lengths, **decode, **more})
    assert not made.canvas.masked
    assert all(sum(m.bytes().values()) == 0 for m in built)
    assert not any(isinstance(v, Tensor) for m in built for v in (*vars(m).values(), *vars(m.memory).values()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("method", "options"), [(m, o) for m, o, d in METHODS if not d])
@pytest.mark.parametrize("alg", ["entropy", "confidence_threshold"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_dream(method: str, options: dict[str, Any], alg: str, dtype: str, prompt: list[int]) -> None:
    decode = {"gen_length": 16, "block_length": 8, "alg": alg}
    made = generate(model(DREAM, dtype), prompt, method, options, decode)
    assert made.masks_left == 0 or made.useful_tokens < 16


@pytest.mark.parametrize(
    ("method", "options", "decode", "message"),
    [
        ("dkv_cache", {"variant": "greedy"}, {}, "needs --remasking random"),
        ("dkv_cache", {"variant": "greedy"}, {"alg": "origin"}, "needs --remasking random"),
        ("dkv_cache", {"neighbours": 2}, {}, "needs variant=greedy"),
        ("dkv_cache", {"refresh_interval": 0}, {}, "at least 1"),
        ("dkv_cache", {"variant": "gready"}, {}, "did you mean 'greedy'"),
        ("sparse_dllm", {"kernel_size": 4}, {}, "odd .nearest valid: 3 or 5"),
        ("sparse_dllm", {"keep_ratio": 0}, {}, "above 0"),
        ("sparse_dllm", {"keep_ratio": 1.1}, {}, "at most 1"),
    ],
)
def test_refusals(method: str, options: dict[str, Any], decode: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        generate(model(LLADA), PROMPT, method, options, {"gen_length": 8, **decode})
    assert "\n" not in str(caught.value)


# -- dKV-Cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_dkv_refreshed_in_every_pass_is_the_baseline(name: str) -> None:
    decode = {"gen_length": 16, "block_length": 8, "threshold": 0.4}
    run_, _ = run(name, "dkv_cache", {"refresh_interval": 1}, decode)
    assert run_.canvas.response() == run(name, "baseline", {}, decode)[0].canvas.response()
    assert run_.counters.dense_passes == run_.counters.nfe


def test_dkv_default_intervals() -> None:
    decode = {"gen_length": 20}
    kinds = [p.kind for p in run(LLADA, "dkv_cache", {}, decode)[0].passes]
    assert [i for i, k in enumerate(kinds) if k == "dense"] == [0, 1, 8, 16]
    made = run(LLADA, "dkv_cache", {"variant": "greedy"}, {**decode, "remasking": "random"})[0]
    assert [i for i, p in enumerate(made.passes) if p.kind == "dense"] == list(range(0, 20, 2))
    assert max(p.rows for p in made.passes if p.kind == "partial") == 2 + 4


def literal_dkv(ids: Tensor, kept: dict[int, list[Tensor]], fed: list[int], layer_count: int) -> Tensor:
    """One pass over `fed` as the paper writes it: fresh keys and values of these rows, kept ones of the others."""
    net = model(LLADA).network
    x = net.embed(ids[:, fed])
    where = torch.tensor(fed)
    others = [p for p in kept if p not in fed]
    for layer in range(layer_count):
        q, k, v = net.project(layer, x)
        parts = [(net.rope(k, where), v)]
        if others:
            stored = [torch.cat([kept[p][layer][i] for p in others], dim=2) for i in (0, 1)]
            parts.append((net.rope(stored[0], torch.tensor(others)), stored[1]))
        for i, p in enumerate(fed):
            kept.setdefault(p, [None] * layer_count)  # type: ignore[list-item]
            kept[p][layer] = torch.stack((k[:, :, i : i + 1], v[:, :, i : i + 1]))
        x = x + net.out(layer, net.attend(net.rope(q, where), parts))
        x = x + net.ffn(layer, x)
    return net.head(x)[0]


def test_dkv_decode_keeps_a_token_one_pass_late() -> None:
    """Several blocks and uneven commits, which the fixtures do not have."""
    seen: list[tuple[Window, Output, Decision]] = []
    options = {"refresh_interval": 5}
    decode = {"gen_length": 24, "block_length": 12, "threshold": 0.25}
    made, _ = run(LLADA, "dkv_cache", options, decode, lambda *one: seen.append(one))
    config, length = model(LLADA).config, len(PROMPT) + 24
    ids = torch.tensor([[*PROMPT, *([config.mask_id] * 24)]])
    decoded, before = set(range(len(PROMPT))), set(range(len(PROMPT)))
    kept: dict[int, list[Tensor]] = {}
    assert len({len(d.positions) for *_, d in seen}) > 1
    for (window, output, decision), shown in zip(seen, made.passes, strict=True):
        full = window.step < 2 or window.step % 5 == 0
        fed = [p for p in range(length) if full or p not in before]
        assert shown.rows == len(fed)
        logits = literal_dkv(ids, kept, fed, config.num_layers)
        places = [fed.index(p) for p in output.positions]
        torch.testing.assert_close(output.logits, logits[places], atol=2e-4, rtol=0)
        # after the pass, only what was decoded before it stays
        kept = {p: kept[p] for p in decoded}
        before = set(decoded)
        ids[0, decision.positions] = decision.tokens
        decoded |= set(decision.positions)


def test_dkv_computes_the_rows_that_shifted_logits_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row before each candidate, and no other row that is kept already."""
    shown: list[tuple[Window, list[int]]] = []
    original = DkvCache.rows

    def watched(self: DkvCache, window: Window) -> Rows:
        rows = original(self, window)
        shown.append((window, list(range(self.request.length))[rows.span] if rows.span else rows.index.tolist()))
        return rows

    monkeypatch.setattr(DkvCache, "rows", watched)
    made, _ = run(DREAM, "dkv_cache", {}, {"gen_length": 16, "block_length": 8, "alg": "maskgit_plus"})
    start, undecoded = len(PROMPT), [set(range(len(PROMPT), len(PROMPT) + 16))]
    for p in made.passes:
        undecoded.append(undecoded[-1] - {position for position, _ in p.committed})
    partial = 0
    for i, (window, rows) in enumerate(shown):
        if 1 < window.step < 8:
            assert rows == sorted(undecoded[i - 1] | {c - 1 for c in window.candidates})
            partial += 1
    assert partial >= 6 and start - 1 in {r for _, rows in shown for r in rows}


def test_dkv_greedy_streams_of_guidance_share_the_order() -> None:
    options = {"variant": "greedy", "refresh_interval": 3}
    decode = {"gen_length": 16, "block_length": 8, "remasking": "random", "seed": 3}
    order = [[p for p, _ in one.committed] for one in run(LLADA, "dkv_cache", options, decode)[0].passes]
    guided = run(LLADA, "dkv_cache", options, {**decode, "cfg_scale": 1.0})[0]
    assert [[p for p, _ in one.committed] for one in guided.passes] == order
    other = run(LLADA, "dkv_cache", options, {**decode, "seed": 4})[0]
    assert [[p for p, _ in one.committed] for one in other.passes] != order


def test_dkv_greedy_computes_logits_of_what_it_commits_alone() -> None:
    decode = {"gen_length": 16, "steps": 8, "remasking": "random"}
    made, _ = run(LLADA, "dkv_cache", {"variant": "greedy"}, decode)
    assert made.counters.head_rows == 16
    decode = {"gen_length": 16, "tokens_per_pass": 3, "remasking": "random"}
    made, _ = run(LLADA, "dkv_cache", {"variant": "greedy"}, decode)
    assert [len(p.committed) for p in made.passes] == [3, 3, 3, 3, 3, 1]
    assert made.counters.head_rows == 16


def test_dkv_greedy_takes_neighbours_left_and_right_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed so far: 5, 4, 1. To commit: 8. Its nearest masked neighbours: 7, 9, 6, 10."""
    start = len(PROMPT)
    rows: list[Rows] = []
    order = [5, 4, 1, 8, *(p for p in range(16) if p not in (5, 4, 1, 8))]
    monkeypatch.setattr(DkvCache, "order", lambda self, window: [start + p for p in order])
    original = DkvCache.rows

    def watched(self: DkvCache, window: Window) -> Rows:
        rows.append(original(self, window))
        return rows[-1]

    monkeypatch.setattr(DkvCache, "rows", watched)
    decode = {"gen_length": 16, "remasking": "random"}
    run(LLADA, "dkv_cache", {"variant": "greedy", "refresh_interval": 8}, decode)
    assert rows[3].index is not None
    assert [p - start for p in rows[3].index.tolist()] == [1, 6, 7, 8, 9, 10]


# -- Sparse-dLLM ----------------------------------------------------------------------------------------------------


def literal_scores(q: Tensor, k: Tensor, block: list[int], outside: list[int]) -> Tensor:
    """Every head on its own, keys repeated for the heads that share them."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[0]
    mean = q[0][:, block].mean(dim=1)
    return torch.einsum("hd,hnd->hn", mean, k).mean(dim=0)[outside]


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_sparse_against_the_literal_computation(name: str) -> None:
    """The kept sets, and logits of the passes over them, with shared heads, biases and shifted logits."""
    seen: list[tuple[Window, Output, Decision]] = []
    decode = {"gen_length": 16, "block_length": 8, "steps": 16}
    decode |= {"alg": "confidence_threshold", "threshold": 0.9} if name == DREAM else {}
    made, _ = run(name, "sparse_dllm", {"keep_ratio": 0.4}, decode, lambda *one: seen.append(one))
    net = model(name).network
    c, length = net.config, len(PROMPT) + 16
    ids = torch.tensor([[*PROMPT, *([c.mask_id] * 16)]])
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    partial = 0
    for (window, output, decision), shown in zip(seen, made.passes, strict=True):
        block = list(range(window.start - c.shift, window.stop))
        rows = list(range(length)) if window.step < 2 else block
        x, where = net.embed(ids[:, rows]), torch.tensor(rows)
        for layer in range(c.num_layers):
            q, k, v = net.project(layer, x)
            q, k = net.rope(q, where), net.rope(k, where)
            parts = [(k, v)] if window.step < 2 else [kept[layer], (k, v)]
            if window.step == 1:
                outside = [p for p in range(length) if p not in block]
                scores = literal_scores(q, k, block, outside)
                pooled = torch.stack([scores[max(i - 1, 0) : i + 2].max() for i in range(len(scores))])
                told = shown.method["kept"][layer]
                places = [outside.index(p) for p in told]
                left = [i for i in range(len(outside)) if i not in places]
                assert len(told) == int(0.4 * len(outside))
                assert pooled[places].min() >= pooled[left].max() - 1e-5
                kept[layer] = (k[:, :, told], v[:, :, told])
            x = x + net.out(layer, net.attend(q, parts))
            x = x + net.ffn(layer, x)
        wanted = net.head(x)[0][[rows.index(c.row_of(p)) for p in output.positions]]
        torch.testing.assert_close(output.logits, wanted, atol=2e-4, rtol=0)
        partial += window.step >= 2
        ids[0, decision.positions] = decision.tokens
    assert partial >= 4


def test_sparse_lets_go_of_a_block_when_it_ends(bytes_by_pass: list[dict[str, int]]) -> None:
    run(LLADA, "sparse_dllm", {}, {"gen_length": 16, "block_length": 8})
    assert [sum(held.values()) > 0 for held in bytes_by_pass] == 2 * [False, *[True] * 7]


def test_sparse_bytes() -> None:
    """The half that is kept and the block, whatever the other blocks hold."""
    made, _ = run(LLADA, "sparse_dllm", {}, {"gen_length": 16, "block_length": 8})
    c = model(LLADA).config
    held = c.num_layers * ((len(PROMPT) + 8) // 2 + 8) * c.num_kv_heads * c.head_dim * 4
    indices = c.num_layers * ((len(PROMPT) + 8) // 2) * 8
    assert made.cache_bytes == {"keys": held, "values": held, "indices": indices}
    short, _ = run(LLADA, "sparse_dllm", {}, {"gen_length": 16, "block_length": 8, "steps": 4})
    assert short.counters.dense_passes == short.counters.nfe == 4
