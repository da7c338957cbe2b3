"""Elastic-Cache beyond its fixtures: GQA, Dream, the paper's similarity, costs, memories that read a selection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_cases import model
from torch import Tensor

from dllm_bench import Generation, UserError, generate
from dllm_bench.caching.memory import DenseMemory
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Sliding
from dllm_bench.methods.elastic_cache import ElasticCache, ElasticCacheOptions
from dllm_bench.models.network import Network

LLADA, DREAM = "llada_elastic", "dream_fastdllm"
PROMPT = [(7 * i) % 101 + 3 for i in range(37)]


def run(name: str, options: dict[str, Any], dtype: str = "float32", **decode: Any) -> Generation:
    settings = {"gen_length": 24, "eos_stop": False, **decode}
    return generate(model(name, dtype), PROMPT, "elastic_cache", options, settings, trace=True)


def decided(made: Generation, key: str) -> list[Any]:
    return [p["method"][key] for p in made.passes or []]


class Literal:
    """The method as described, with whole attention matrices, repeated heads and stored queries."""

    def __init__(self, net: Network, options: ElasticCacheOptions) -> None:
        self.net, self.o, self.layers = net, options, net.config.num_layers
        self.groups = net.config.num_heads // net.config.num_kv_heads
        self.cache: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        self.track: list[int] = []

    def step(self, ids: Tensor, masked: list[int], new: list[int]) -> tuple[Tensor, dict[str, Any]]:
        """Logits of the window's rows, and the decisions."""
        net, first = self.net, not self.cache[0]
        asked = [net.config.row_of(p) for p in (masked[: self.o.window] if self.o.block_caching else masked)]
        rows = list(range(ids.shape[1])) if first else [*self.track, *new, *asked]
        reset, sims, named = (-1 if first else self.layers), [], []
        x = net.embed(ids[:, rows])
        for layer, c in enumerate(self.cache):
            if layer > reset:
                c["x"] = x
            else:
                c["x"][:, rows] = x
                if layer == reset:
                    x, rows = c["x"], list(range(ids.shape[1]))
            old = {n: t.clone() for n, t in c.items()}
            q, k, v = net.project(layer, x)
            fresh = {"q": self.turn(q, rows), "k": self.repeat(self.turn(k, rows)), "v": self.repeat(v)}
            for n, t in fresh.items():
                if layer >= reset:
                    c[n] = t.clone()
                else:
                    c[n][:, :, rows] = t
            weights = self.weights(fresh["q"], c["k"])
            if layer < reset:
                before = self.weights(old["q"][:, :, self.track], old["k"])
                after = weights[:, :, [rows.index(p) for p in self.track]]
                along = {"heads": 1, "keys": 3}[self.o.similarity]
                sims.append(float(F.cosine_similarity(before, after, dim=along).mean()))
                if sims[-1] < self.o.gamma:
                    reset = layer + 1
            score = weights[:, :, [rows.index(p) for p in asked]].sum(dim=(0, 1, 2))
            score[masked] = 0
            named.append(sorted(score.topk(self.o.track).indices.tolist()))
            x = x + net.out(layer, weights.to(v.dtype) @ c["v"])
            x = x + net.ffn(layer, x)
        self.track = sorted({p for n in named for p in n})
        places = [rows.index(p) for p in asked[: self.o.window]]
        return net.head(x[:, places])[0], {"start_reset": reset, "sims": sims, "layer_track": named}

    def turn(self, t: Tensor, rows: list[int]) -> Tensor:
        return self.net.rope(t, torch.tensor(rows))

    def repeat(self, t: Tensor) -> Tensor:
        return t.repeat_interleave(self.groups, dim=1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q.float() @ k.float().transpose(2, 3) / q.shape[-1] ** 0.5, dim=-1)


@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize("similarity", ["heads", "keys"])
@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.97])
@pytest.mark.parametrize(("block_caching", "track", "number"), [(True, 1, 1), (True, 3, 2), (False, 2, 3)])
def test_it_equals_the_literal_method(
    name: str, similarity: Any, gamma: float, block_caching: bool, track: int, number: int
) -> None:
    options: dict[str, Any] = {"window": 8, "gamma": gamma, "track": track, "similarity": similarity}
    options["block_caching"] = block_caching
    made = run(name, options, tokens_per_pass=number, dtype="float64")
    assert made.masks_left == 0
    net = model(name, "float64").network
    literal, mask = Literal(net, ElasticCacheOptions(**options)), net.config.mask_id
    ids = torch.tensor([[*PROMPT, *[mask] * 24]])
    masked, new = list(range(len(PROMPT), ids.shape[1])), list[int]()
    with torch.inference_mode():
        for p in made.passes or []:
            track_now = literal.track
            logits, wanted = literal.step(ids, masked, new)
            assert p["method"]["track"] == track_now and p["method"]["window"] == masked[:8]
            assert p["method"]["sims"] == pytest.approx(wanted.pop("sims"), abs=1e-5)
            assert wanted == {key: p["method"][key] for key in wanted}
            new = [position for position, _ in p["committed"]]
            logits[:, mask] = -torch.inf
            best = logits[[masked.index(n) for n in new]].argmax(dim=-1).tolist()
            assert best == [token for _, token in p["committed"]]
            ids[0, new] = torch.tensor(best)
            masked = [m for m in masked if m not in new]
    assert ids[0, len(PROMPT) :].tolist() == made.output_ids


def test_the_cases_above_trigger_in_every_way() -> None:
    resets = set()
    for name in (LLADA, DREAM):
        for gamma in (0.5, 0.9, 0.97):
            resets |= set(decided(run(name, {"window": 8, "gamma": gamma}, tokens_per_pass=1), "start_reset"))
    assert resets >= {-1, 2, 3, 4}


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_the_first_pass_is_the_uncached_one(name: str) -> None:
    decode = {"gen_length": 24, "tokens_per_pass": 24, "eos_stop": False}
    plain = generate(model(name), PROMPT, "baseline", {}, decode)
    assert run(name, {"window": 24}, tokens_per_pass=24).output_ids == plain.output_ids


def test_gamma_zero_never_refreshes_and_layer_zero_only_knows_new_keys() -> None:
    made = run(LLADA, {"gamma": 0.0}, threshold=0.9)
    assert set(decided(made, "trigger_layer")) == {None} and made.dense_passes == 1
    assert set(decided(made, "start_reset")[1:]) == {4} and made.nfe <= 24


@pytest.mark.parametrize("options", [{}, {"gamma": 0.97, "track": 2}, {"block_caching": False, "window": 8}])
def test_counters_follow_from_the_decisions(options: dict[str, Any]) -> None:
    made, layers, length = run(LLADA, options, steps=12), 4, len(PROMPT) + 24
    rows = [p["rows"] for p in made.passes or []]
    starts, tests = [max(s, 0) for s in decided(made, "start_reset")], [len(s) for s in decided(made, "sims")]
    tracked = [len(t) for t in decided(made, "track")]
    c = made.counters
    passes = list(zip(rows, starts, tests, tracked, strict=True))
    work = sum(r * s + length * (layers - s) for r, s, _, _ in passes)
    assert made.row_layers == c.row_layers == c.attended_rows == work
    # queries of tracked rows from before the pass, in every layer tested but the first
    assert c.projected_rows == work + sum(max(t - 1, 0) * n for _, _, t, n in passes)
    asked = [24 - 2 * i if options.get("block_caching") is False else min(16, 24 - 2 * i) for i in range(12)]
    assert c.weight_rows == sum(layers * a + 2 * t * n for a, (_, _, t, n) in zip(asked, passes, strict=True))
    assert c.head_rows == sum(min(options.get("window", 16), 24 - 2 * i) for i in range(12))
    assert made.nfe == 12


@pytest.mark.parametrize(("name", "heads"), [(LLADA, 4), (DREAM, 2)])
def test_bytes_are_those_of_keys_values_and_layer_inputs(name: str, heads: int) -> None:
    config, length = model(name).config, len(PROMPT) + 24
    made = run(name, {}, tokens_per_pass=4)
    kv = config.num_layers * length * heads * config.head_dim * 4
    inputs = (config.num_layers - 1) * length * config.hidden_size * 4
    assert made.cache_bytes == {"keys": kv, "values": kv, "layer_inputs": inputs}


def test_attention_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plain = Network.scores

    def spy(self: Network, q: Tensor, keys: Sequence[Tensor]) -> Tensor:
        asked.append(q.shape[2])
        return plain(self, q, keys)

    monkeypatch.setattr(Network, "scores", spy)
    run(LLADA, {"block_caching": False, "gamma": 0.97}, gen_length=160, tokens_per_pass=40)
    assert max(asked) == 64 and {32, 64} <= set(asked)  # 160 masks: 64 + 64 + 32


def test_the_window_slides_over_the_first_masks_left() -> None:
    net = model(LLADA).network
    settings = DecodeSettings.make({"gen_length": 6, "steps": 3}, "llada")
    canvas = Canvas.make([1, 2], settings, net.config, net.device)
    windows = Sliding(canvas, 3, 3)
    first = windows.next()
    assert first is not None and (first.candidates, first.masks, first.step) == ((2, 3, 4), 6, 0)
    canvas.commit([3], torch.tensor([9]))
    second = windows.next()
    assert second is not None and (second.candidates, second.masks, second.step) == ((2, 4, 5), 5, 1)
    assert second.inner == second.candidates and (second.start, second.stop) == (2, 8)
    canvas.commit([2, 4, 5, 6, 7], torch.tensor([9] * 5))
    assert windows.next() is None


def test_a_quota_is_spread_over_the_whole_response() -> None:
    for block in (None, 6):
        made = run(LLADA, {"window": 8}, steps=8, **({"block_length": block} if block else {}))
        assert [len(p["committed"]) for p in made.passes or []] == [3] * 8
    # a quota beyond the window waits for the next passes
    made = run(LLADA, {"window": 2}, steps=4)
    assert [len(p["committed"]) for p in made.passes or []][:4] == [2] * 4 and made.masks_left == 0


def test_dream_commits_all_that_reach_the_threshold() -> None:
    made = run(DREAM, {"window": 8}, threshold=0.0, steps=24)
    assert [len(p["committed"]) for p in made.passes or []] == [8, 8, 8]
    assert run(DREAM, {"window": 8}, threshold=0.99, steps=24).nfe == 24


@pytest.mark.parametrize(
    ("alg", "heat"),
    [(a, h) for a in ("entropy", "maskgit_plus", "topk_margin") for h in (0.0, 0.5)] + [("origin", 0.0)],
)
def test_dreams_schedules_fill_the_response(alg: str, heat: float) -> None:
    made = run(DREAM, {"window": 5}, alg=alg, alg_temp=heat, steps=6)
    counts = [len(p["committed"]) for p in made.passes or []]
    assert made.masks_left == 0 and max(counts) <= 5
    if alg != "origin":  # a sixth of all masks, not of those in the window; what the last step leaves comes behind it
        assert counts[:4] == [3, 4, 4, 4]
    # a share beyond the window waits
    hasty = [len(p["committed"]) for p in run(DREAM, {"window": 5}, alg=alg, alg_temp=heat, steps=2).passes or []]
    assert sum(hasty) == 24 and max(hasty) == 5
    # tokens are computed once behind their commit, also when a pass committed none in between
    slow = run(DREAM, {"window": 5}, alg=alg, alg_temp=heat, steps=96).passes or []
    for before, now in pairwise(slow):
        new = {p for p, _ in before["committed"]}
        wanted = {*now["method"]["track"], *new, *(p - 1 for p in now["method"]["window"])}
        assert now["rows"] == len(wanted)


def test_infill_and_guidance_work() -> None:
    ids = [*PROMPT[:10], *[0] * 12, *PROMPT[10:]]
    decode = {"fill": "10:22", "tokens_per_pass": 2, "eos_stop": False}
    made = generate(model(LLADA), ids, "elastic_cache", {"window": 4}, decode, trace=True)
    assert made.masks_left == 0 and made.nfe == 6
    assert all(10 <= p < 22 for window in decided(made, "window") for p in window)
    guided = run(LLADA, {"window": 4}, tokens_per_pass=2, cfg_scale=1.0)
    assert guided.masks_left == 0 and guided.nfe == 12 and guided.output_ids != run(LLADA, {"window": 4}).output_ids


def test_bfloat16_and_tiny_prompts() -> None:
    assert run(LLADA, {}, dtype="bfloat16", threshold=0.9).masks_left == 0
    # more tokens to track than there are: all that are not masked
    decode = {"gen_length": 8, "tokens_per_pass": 1, "eos_stop": False}
    made = generate(model(LLADA), [5], "elastic_cache", {"track": 4}, decode, trace=True)
    assert decided(made, "track")[:3] == [[], [0], [0, *[p for p, _ in (made.passes or [])[0]["committed"]]]]


def test_options_out_of_range_are_refused() -> None:
    for options, words in [
        ({"gamma": 1.5}, "at most 1"),
        ({"gamma": -0.1}, "at least 0"),
        ({"window": 0}, "at least 1"),
        ({"track": 0}, "at least 1"),
        ({"similarity": "head"}, "heads"),
    ]:
        with pytest.raises(UserError, match=words):
            parse_method("elastic_cache", options)


class Recorder(DenseMemory):
    """Writes down the calls; lets queries read only some keys, when told to."""

    hidden: tuple[int, ...] = ()

    def __init__(self, options: Any = None, lower: Any = None) -> None:
        super().__init__(options, lower)
        self.calls: list[tuple[Any, ...]] = []

    def begin_pass(self, window: Any, refresh: bool) -> None:
        self.calls.append(("pass", refresh))

    def begin_refresh(self, layer: int) -> None:
        self.calls.append(("refresh", layer))

    def require(self, positions: Sequence[int]) -> None:
        self.calls.append(("require", list(positions)))

    def scores(self, layer: int, q: Tensor) -> Tensor:
        self.calls.append(("scores", layer))
        return super().scores(layer, q)

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self.calls.append(("write", layer, rows.count))
        super().write(layer, rows, k, v)

    def weights(self, layer: int, scores: Tensor) -> Tensor:
        rows = super().weights(layer, scores)
        rows[..., list(self.hidden)] = 0
        return rows

    def readable(self, layer: int) -> Tensor | None:
        if not self.hidden:
            return None
        return torch.tensor([p for p in range(self.request.length) if p not in self.hidden])


def recorded(memory: Recorder, options: dict[str, Any]) -> Run:
    loaded = model(LLADA)
    settings = DecodeSettings.make({"gen_length": 12, "tokens_per_pass": 2, "eos_stop": False}, "llada")
    canvas = Canvas.make(PROMPT, settings, loaded.config, loaded.network.device)
    return denoise(loaded.network, canvas, lambda: ElasticCache(ElasticCacheOptions(**options), memory), settings)


def test_memories_learn_what_is_tracked_and_where_a_refresh_starts() -> None:
    memory = Recorder()
    made = recorded(memory, {"gamma": 0.95, "window": 6})
    calls, length = memory.calls, len(PROMPT) + 12
    starts = [i for i, c in enumerate(calls) if c[0] == "require"]
    passes = [calls[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert any(p.method["start_reset"] in (1, 2, 3) for p in made.passes)
    for p, seen in zip(made.passes, passes, strict=True):
        wanted: list[tuple[Any, ...]] = [("require", p.method["track"]), ("pass", p.kind == "dense")]
        reset = p.method["start_reset"]
        for layer in range(4):
            wanted += [("refresh", layer)] * (layer == reset)
            wanted += [("scores", layer)] * (layer < reset)
            wanted.append(("write", layer, p.rows if layer < reset else length))
            wanted += [("scores", layer)] * (1 + (layer < reset))
        assert seen == wanted


def test_what_no_query_can_read_does_not_count_as_drift() -> None:
    narrow = Recorder()
    narrow.hidden = tuple(range(4, 34))
    sims = []
    for memory in (narrow, Recorder()):
        passes = recorded(memory, {"gamma": 0.0, "window": 6}).passes
        assert not {p for made in passes for p in made.method["track"]} & set(memory.hidden)
        sims.append(min(s for made in passes for s in made.method["sims"]))
    assert sims[0] > 0.8 * sims[1]  # zeros for more than half of the keys would more than halve the mean
