"""dLLM-Cache beyond the fixtures: against a literal computation of every row, its costs, its state, its refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from golden_cases import model
from torch import Tensor

from dllm_bench import generate
from dllm_bench.caching.memory import DenseMemory, Memory
from dllm_bench.caching.method import Output
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.errors import UserError
from dllm_bench.methods.dllm_cache import DllmCache, DllmCacheOptions
from dllm_bench.models.network import Network

LLADA, DREAM = "llada_dllmcache", "dream_fastdllm"


@dataclass
class Literal:
    """The released code's arithmetic, row by row: every row of every layer is computed, then what is not due is thrown
    away in favour of the cache; keys are cached before RoPE and all of them are rotated in every layer.

    It follows the selection that is told, once that is checked: where nothing was committed, or in layer 0,
    similarities are equal but for rounding.
    """

    network: Network
    inside: list[int]
    options: DllmCacheOptions
    step: int = 0
    caches: list[dict[str, Tensor]] = field(default_factory=list)

    def logits(self, ids: Tensor, told: dict[int, list[int]]) -> Tensor:
        net, o, length = self.network, self.options, ids.shape[1]
        outside = [p for p in range(length) if p not in self.inside]
        due = {"outside": self.step % o.prompt_interval == 0, "inside": self.step % o.response_interval == 0}
        if self.step == 0:
            self.caches = [{} for _ in range(net.config.num_layers)]
        self.step += 1
        verified = []
        x, everywhere = net.embed(ids), slice(0, length)
        for layer, cache in enumerate(self.caches):
            q, k, v = net.project(layer, x)
            forced = layer == 0 and o.refresh_first_layer
            rows = [p for p in outside if due["outside"] or forced] + [
                p for p in self.inside if due["inside"] or forced
            ]
            if not cache:
                cache.update(k=k.clone(), v=v.clone())
            elif not due["inside"] and not forced and o.transfer_ratio > 0:
                verified.append(layer)
                rows += self.verify(told[layer], cache, v)
                cache["v"][:, :, self.inside] = v[:, :, self.inside]
            cache["k"][:, :, rows], cache["v"][:, :, rows] = k[:, :, rows], v[:, :, rows]
            o_ = net.attend(net.rope(q, everywhere), [(net.rope(cache["k"], everywhere), cache["v"])])
            x = x + self.cached(cache, "attention", net.out(layer, o_), rows)
            x = x + self.cached(cache, "ffn", net.ffn(layer, x), rows)
        assert list(told) == verified
        return net.head(x)[0]

    def verify(self, chosen: list[int], cache: dict[str, Tensor], v: Tensor) -> list[int]:
        joint = [t[0].transpose(0, 1).flatten(1)[self.inside] for t in (v, cache["v"])]
        similarity = dict(zip(self.inside, F.cosine_similarity(*joint, dim=-1, eps=1e-8).tolist(), strict=True))
        number = int(len(self.inside) * self.options.transfer_ratio)
        assert chosen == sorted(set(chosen)) and len(chosen) == number
        left = [similarity[p] for p in self.inside if p not in chosen]
        if chosen and left:
            assert max(similarity[p] for p in chosen) <= min(left) + 1e-6
        return chosen

    def cached(self, cache: dict[str, Tensor], name: str, fresh: Tensor, rows: list[int]) -> Tensor:
        kept = cache.setdefault(name, fresh.clone())
        kept[:, rows] = fresh[:, rows]
        return kept


@dataclass
class Study:
    """A run, with ids before each pass, the loop's logits and the method's report."""

    run: Run
    canvas_start: Tensor
    seen: list[tuple[Window, Output, Decision]]


def study(name: str, prompt: list[int], options: dict[str, Any], decode: dict[str, Any]) -> Study:
    loaded = model(name)
    settings = DecodeSettings.make({"eos_stop": False, **decode}, loaded.family)
    canvas = Canvas.make(prompt, settings, loaded.config, loaded.network.device)
    seen: list[tuple[Window, Output, Decision]] = []
    before = canvas.ids.clone()
    build = parse_method("dllm_cache", options).build
    run = denoise(loaded.network, canvas, build, settings, lambda *one: seen.append(one))
    return Study(run, before, seen)


PROMPT = [5, 77, 31, 8, 99, 12, 64, 3, 41, 18, 110]
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DREAM, {}, {"gen_length": 16, "block_length": 8}),
    (DREAM, {}, {"gen_length": 16, "alg": "entropy"}),
    (DREAM, {"refresh_first_layer": False}, {"gen_length": 16, "block_length": 4}),
    (DREAM, {"transfer_ratio": 0}, {"gen_length": 16, "block_length": 8}),
    (DREAM, {}, {"fill": "3:9", "block_length": 3}),
    (DREAM, {"prompt_interval": 3, "response_interval": 100}, {"gen_length": 16, "block_length": 8}),
    (LLADA, {"refresh_first_layer": False}, {"gen_length": 16, "threshold": 0.3}),
    (LLADA, {}, {"fill": "3:9"}),
    (LLADA, {"prompt_interval": 3, "response_interval": 100}, {"fill": "0:6"}),
    (LLADA, {"transfer_ratio": 1.0}, {"gen_length": 12, "block_length": 4}),
]


@pytest.mark.parametrize(("name", "changed", "decode"), VARIANTS)
def test_equals_the_literal_computation(name: str, changed: dict[str, Any], decode: dict[str, Any]) -> None:
    """Prompt rows that nobody reads are left out, keys are kept rotated; the numbers stay."""
    options = {"prompt_interval": 5, "response_interval": 3, "transfer_ratio": 0.3, **changed}
    made = study(name, PROMPT, options, decode)
    net, ids, canvas = model(name).network, made.canvas_start, made.run.canvas
    literal = Literal(net, list(range(canvas.start, canvas.stop)), DllmCacheOptions(**options))
    for i, (_, output, decision) in enumerate(made.seen):
        rows = [net.config.row_of(p) for p in output.positions]
        told = made.run.passes[i].method["selected"]
        torch.testing.assert_close(output.logits, literal.logits(ids, told)[rows], atol=2e-4, rtol=0)
        ids[0, decision.positions] = decision.tokens
    assert len(made.seen) >= 3


def test_guidance_reuses_its_difference_across_blocks() -> None:
    """With blocks of two tokens, passes that reuse the difference come to blocks that were not yet open before."""
    options = {"prompt_interval": 4, "response_interval": 3, "transfer_ratio": 0.3, "cfg_interval": 4}
    made = study(LLADA, PROMPT, options, {"gen_length": 16, "block_length": 2, "cfg_scale": 1.5, "threshold": 0.2})
    net, ids, canvas = model(LLADA).network, made.canvas_start, made.run.canvas
    free_ids, inside = canvas.unconditional(), list(range(canvas.start, canvas.stop))
    free_ids[0, inside] = canvas.mask_id
    streams = [Literal(net, inside, DllmCacheOptions(**options)) for _ in range(2)]
    fresh = []
    for step, (window, output, decision) in enumerate(made.seen, start=1):
        report = made.run.passes[step - 1].method
        logits = streams[0].logits(ids, report["selected"])
        if step <= 5 or (step - 1) % 4 == 0:
            difference = logits - streams[1].logits(free_ids, report["unconditional"]["selected"])
            fresh.append(step)
        assert output.positions == window.candidates
        rows = list(output.positions)
        guided = (logits - difference + 2.5 * difference)[rows]
        torch.testing.assert_close(output.logits, guided, atol=5e-4, rtol=0)
        ids[0, decision.positions], free_ids[0, decision.positions] = decision.tokens, decision.tokens
    assert [i for i, p in enumerate(made.run.passes, 1) if "unconditional" in p.method] == fresh
    assert len(fresh) < len(made.seen)
    assert "guidance" not in study(LLADA, PROMPT, {}, {"gen_length": 8, "cfg_scale": 1.5}).run.cache_bytes


def test_the_difference_is_let_go_after_its_last_use(bytes_by_pass: list[dict[str, int]]) -> None:
    study(LLADA, PROMPT, {"cfg_interval": 3}, {"gen_length": 12, "cfg_scale": 0.5})
    # both streams run in passes 1 to 5, 7 and 10
    assert [i for i, held in enumerate(bytes_by_pass, 1) if "guidance" in held] == [5, 7, 8, 10, 11]


@pytest.mark.parametrize(("interval", "forwards"), [(1, 32), (2, 26), (3, 25), (100, 21)])
def test_schedule_of_guidance(interval: int, forwards: int) -> None:
    options = {"cfg_interval": interval}
    made = study(LLADA, PROMPT, options, {"gen_length": 16, "cfg_scale": 0.5})
    assert sum(1 + ("unconditional" in p.method) for p in made.run.passes) == forwards


def test_costs() -> None:
    """16 passes: one dense, two more of the response, the others verify: 4 rows in the layers above the first."""
    options = {"prompt_interval": 100, "response_interval": 6, "transfer_ratio": 0.25}
    run = study(LLADA, PROMPT, options, {"gen_length": 16}).run
    layers, prompt, response, chosen = 4, len(PROMPT), 16, 4
    verified = 13 * (response + (layers - 1) * chosen)
    dense, partial = layers * (prompt + response), 2 * layers * response
    assert run.counters.row_layers == run.counters.attended_rows == dense + partial + verified
    assert run.counters.projected_rows == dense + partial + 13 * (response + (layers - 1) * (response + chosen))
    assert run.counters.head_rows == sum(range(1, 17))
    assert (run.counters.nfe, run.counters.dense_passes) == (16, 1)
    assert [p.rows for p in run.passes] == [prompt + response] + [response] * 15


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_bytes_by_kind(name: str) -> None:
    """Keys and values of all positions; branches of the response alone (and of the row that predicts its first token),
    in the layers that are not refreshed anyway."""
    c = model(name).config
    held = study(name, PROMPT, {}, {"gen_length": 16}).run.cache_bytes
    kv = c.num_layers * (len(PROMPT) + 16) * c.num_kv_heads * c.head_dim * 4
    branch = (c.num_layers - 1) * (16 + c.shift) * c.hidden_size * 4
    values = (c.num_layers - 1) * 16 * c.num_kv_heads * c.head_dim * 4
    assert held == {
        "keys": kv,
        "values": kv,
        "attention_branch": branch,
        "ffn_branch": branch,
        "verified_values": values,
    }
    without = study(name, PROMPT, {"transfer_ratio": 0}, {"gen_length": 16}).run.cache_bytes
    assert without["verified_values"] == 0


def test_no_state_is_left() -> None:
    built: list[DllmCache] = []

    def build() -> DllmCache:
        built.append(DllmCache())
        return built[-1]

    loaded = model(LLADA)
    settings = DecodeSettings.make({"gen_length": 8}, "llada")
    for _ in range(2):
        denoise(loaded.network, Canvas.make(PROMPT, settings, loaded.config, loaded.network.device), build, settings)
    assert all(sum(m.bytes().values()) == 0 for m in built)
    assert not any(isinstance(v, Tensor) for m in built for v in vars(m).values())


def test_the_same_instance_serves_again() -> None:
    one = DllmCache()
    loaded, outputs = model(LLADA), []
    settings = DecodeSettings.make({"gen_length": 12}, "llada")
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        canvas = Canvas.make(prompt, settings, loaded.config, loaded.network.device)
        denoise(loaded.network, canvas, lambda: one, settings)
        outputs.append(canvas.response())
    assert outputs[0] == outputs[2] != outputs[1]


def test_decisions_are_recorded_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = {"gen_length": 8}
    passes = generate(model(LLADA), PROMPT, "dllm_cache", {}, decode, trace=True).passes or []
    assert [p["method"]["refresh_prompt"] for p in passes] == [True] + [False] * 7
    assert [i for i, p in enumerate(passes) if p["method"]["refresh_response"]] == [0, 7]
    monkeypatch.setattr(DllmCache, "report", lambda self: pytest.fail("asked for a report"))
    assert generate(model(LLADA), PROMPT, "dllm_cache", {}, decode).passes is None


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_bfloat16(name: str) -> None:
    run = generate(model(name, "bfloat16"), PROMPT, "dllm_cache", {"prompt_interval": 4}, {"gen_length": 12})
    assert run.masks_left == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_ratio": 1.5}, "at most 1"),
        ({"transfer_ratio": -0.1}, "at least 0"),
        ({"prompt_interval": 0}, "at least 1"),
        ({"response_interval": 0}, "at least 1"),
        ({"cfg_interval": 0}, "at least 1"),
        ({"cfg_interval": 3}, "has no effect without guidance"),
        ({"transfer_rate": 0.5}, "transfer_ratio"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        generate(model(LLADA), PROMPT, "dllm_cache", options, {"gen_length": 8})
    assert "\n" not in str(caught.value)


class Stacked(DenseMemory):
    """A memory that lies on another and does not take values alone."""

    name = "stacked"
    takes_values: ClassVar[bool] = False

    def __init__(self, options: Any = None, lower: Memory | None = None) -> None:
        Memory.__init__(self, options, lower)


def test_memories_that_want_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = METHODS.get
    monkeypatch.setattr(METHODS, "get", lambda name: Stacked if name == "stacked" else known(name))
    assert parse_method("fast_dllm+stacked").name == "fast_dllm+stacked"
    with pytest.raises(UserError, match="renews values without their keys"):
        parse_method("dllm_cache+stacked")
    with pytest.raises(UserError, match="does not keep the keys and values of all positions"):
        parse_method("sparse_dllm+stacked")
    with pytest.raises(TypeError, match="without keys"):
        Memory.write_values(Stacked(), 0, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [1, 2])
def test_memories_are_told_of_a_refresh_only_where_the_prompt_is_renewed(prompt: int) -> None:
    """With shifted logits and a prompt of one token the rows kept are all rows, and yet most passes renew a part."""
    told: list[bool] = []

    class Told(DenseMemory):
        def begin_pass(self, window: Window, refresh: bool) -> None:
            told.append(refresh)
            super().begin_pass(window, refresh)

    settings = DecodeSettings.make({"gen_length": 8, "block_length": 8, "tokens_per_pass": 1}, "dream")
    loaded = model(DREAM)
    canvas = Canvas.make([5] * prompt, settings, loaded.config, loaded.network.device)
    options = DllmCacheOptions(prompt_interval=3, response_interval=2)
    run = denoise(loaded.network, canvas, lambda: DllmCache(options, Told()), settings)
    assert told == [i % 3 == 0 for i in range(run.counters.nfe)] and len(told) == 8
