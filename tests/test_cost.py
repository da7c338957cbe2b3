"""What a decode really computes: rows and logits counted independently, and no tensor that grows with N x N."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from golden_cases import model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_bench import generate
from dllm_bench.models.network import Network

LLADA, DREAM = "llada_fastdllm", "dream_fastdllm"


class Watch(TorchDispatchMode):
    """Remembers the largest tensor that any operation made, and the shapes of those over a bound."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound, self.operations, self.large = bound, 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for t in out if isinstance(out, tuple | list) else (out,):
            # a tensor of the RoPE table or a view costs nothing new; what counts is the number of elements
            if isinstance(t, Tensor) and t.numel() > self.bound:
                self.large.append((str(func), tuple(t.shape)))
        return out


PROMPT = [(7 * i) % 120 for i in range(692)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize(
    ("method", "options"), [("baseline", {}), ("fast_dllm", {}), ("fast_dllm", {"mode": "prefix"})]
)
def test_nothing_grows_with_the_square_of_the_length(
    method: str, options: dict[str, Any], name: str, dtype: str
) -> None:
    """Neither N x N nor N x vocabulary: the widest thing of a pass is N rows of gate and up (256 columns here)."""
    net = model(name, dtype).network
    length = len(PROMPT) + 8
    with Watch(bound=length * 256) as watch:
        run = generate(model(name, dtype), PROMPT, method, options, {"gen_length": 8, "block_length": 8, "steps": 2})
    assert run.masks_left == 0 and watch.operations > 50
    assert watch.large == []
    assert length > 256 and 4 * length * length > watch.bound, "the bound must be below all heads' N x N"
    assert run.counters.head_rows <= 8 * run.nfe < length
    assert net.counters is run.counters


def test_the_watch_sees_a_square() -> None:
    x = torch.randn(700, 16)
    with torch.inference_mode(), Watch(bound=700 * 256) as watch:
        _ = x @ x.T
    assert watch.large and watch.large[0][1] == (700, 700)


def test_no_logits_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    genuine = Network.head
    monkeypatch.setattr(Network, "head", lambda self, x: rows.append(x.shape[1]) or genuine(self, x))
    run = generate(model(LLADA), PROMPT, "baseline", {}, {"gen_length": 8, "block_length": 4, "threshold": 2.0})
    assert rows == [4, 3, 2, 1, 4, 3, 2, 1]
    assert run.counters.head_rows == sum(rows)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Rows that pass the primitives, counted from outside."""
    seen = {"embedded": 0, "passes": 0, "attended": 0, "ffn": 0, "projected": 0}
    genuine = {n: getattr(Network, n) for n in ("embed", "attend", "ffn", "project")}

    def embed(self: Network, ids: Tensor) -> Tensor:
        seen["embedded"] += ids.shape[1]
        seen["passes"] += 1
        return genuine["embed"](self, ids)

    def attend(self: Network, q: Tensor, parts: Any) -> Tensor:
        seen["attended"] += q.shape[2]
        return genuine["attend"](self, q, parts)

    def ffn(self: Network, layer: int, x: Tensor) -> Tensor:
        seen["ffn"] += x.shape[1]
        return genuine["ffn"](self, layer, x)

    def project(self: Network, layer: int, x: Tensor, want: str = "qkv") -> Any:
        seen["projected"] += x.shape[1]
        return genuine["project"](self, layer, x, want)

    with monkeypatch.context() as patch:
        for n, f in (("embed", embed), ("attend", attend), ("ffn", ffn), ("project", project)):
            patch.setattr(Network, n, f)
        yield seen


@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize(
    ("method", "options"), [("baseline", {}), ("fast_dllm", {}), ("fast_dllm", {"mode": "prefix"})]
)
@pytest.mark.parametrize("cfg", [0.0, 1.0])
def test_counters_equal_an_independent_count(
    method: str, options: dict[str, Any], name: str, cfg: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = {"gen_length": 16, "block_length": 8, "threshold": 0.6, "cfg_scale": cfg, "eos_stop": False}
    with counted(monkeypatch) as seen:
        run = generate(model(name), [5, 6, 7, 8, 9], method, options, decode, trace=True)
    layers, streams = model(name).config.num_layers, 2 if cfg else 1
    assert run.passes is not None
    assert run.nfe == len(run.passes) == len(run.pass_seconds) == seen["passes"] // streams
    assert run.dense_passes == sum(p["rows"] == 21 for p in run.passes)
    assert sum(p["rows"] for p in run.passes) * streams == seen["embedded"]
    assert run.row_layers == seen["ffn"] == seen["embedded"] * layers
    assert run.counters.attended_rows == seen["attended"] == run.row_layers
    assert run.counters.projected_rows == seen["projected"]
    committed = [position for p in run.passes for position, _ in p["committed"]]
    assert sorted(committed) == list(range(5, 21)), "each position is committed once"


def test_rows_of_fast_dllm() -> None:
    """Dual recomputes the block, prefix the block and all behind it, and each block starts dense."""
    decode = {"gen_length": 12, "block_length": 4, "threshold": 2.0, "eos_stop": False}
    dual = generate(model(LLADA), [1] * 9, "fast_dllm", {}, decode, trace=True)
    prefix = generate(model(LLADA), [1] * 9, "fast_dllm", {"mode": "prefix"}, decode, trace=True)
    assert [p["rows"] for p in dual.passes or []] == [21, 4, 4, 4] * 3
    assert [p["rows"] for p in prefix.passes or []] == [21, 12, 12, 12, 21, 8, 8, 8, 21, 4, 4, 4]
    assert [p["method"]["refresh"] for p in dual.passes or []] == [True, False, False, False] * 3
    assert dual.dense_passes == prefix.dense_passes == 3


def test_cache_bytes_are_those_of_the_keys_and_values() -> None:
    decode = {"gen_length": 8, "block_length": 8, "threshold": 2.0}
    run = generate(model(DREAM), [1] * 12, "fast_dllm", {}, decode)
    c = model(DREAM).config
    one = 20 * c.num_kv_heads * c.head_dim * 4 * c.num_layers
    assert run.cache_bytes == {"keys": one, "values": one} and run.cache_bytes_peak == 2 * one
    assert generate(model(DREAM), [1] * 12, "baseline", {}, decode).cache_bytes_peak == 0
    half = generate(model(DREAM, "bfloat16"), [1] * 12, "fast_dllm", {}, decode)
    assert half.cache_bytes_peak == one
    guided = generate(model(DREAM), [1] * 12, "fast_dllm", {}, {**decode, "cfg_scale": 0.5})
    assert guided.cache_bytes_peak == 4 * one, "the second stream of guidance has a cache of its own"


def test_seconds_add_up() -> None:
    run = generate(model(LLADA), [1] * 12, "fast_dllm", {}, {"gen_length": 8, "block_length": 4, "threshold": 2.0})
    parts = run.seconds
    assert 0 < parts["dense"] + parts["partial"] + parts["commit"] <= parts["total"]
    assert sum(s for kind, s in run.pass_seconds if kind == "dense") == pytest.approx(parts["dense"])
    assert run.first_commit_seconds is not None and run.first_block_seconds is not None
    assert 0 < run.first_commit_seconds <= run.first_block_seconds <= parts["total"]
