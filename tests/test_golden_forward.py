"""Logits, hidden states and cached passes of the official codes, to 2e-4."""

from __future__ import annotations

import pytest
import torch
from golden_cases import GOLDEN, cases_meta, model
from safetensors.torch import load_file
from torch import Tensor

from dllm_bench.caching.method import Method
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.methods.fast_dllm import FastDllm, FastDllmOptions
from dllm_bench.models.config import scale_rope
from dllm_bench.models.network import Network

SETS = ("llada_fastdllm", "dream_fastdllm")
TOLERANCE = 2e-4


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / name / "forward.safetensors")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SETS)
def test_full_pass(name: str) -> None:
    golden, net = tensors(name), model(name).network
    ids = golden["full.input_ids"]
    x = net.embed(ids)
    for layer in range(net.config.num_layers):
        close(x, golden["full.hidden_states"][layer : layer + 1])
        k, v = net.project(layer, x, "kv")
        if layer == 0:
            recorded_k, recorded_v = golden["full.k_layer0_pre_rope"], golden["full.v_layer0"]
            close(k, recorded_k if recorded_k.ndim == 4 else split_heads(recorded_k, net))
            close(v, recorded_v if recorded_v.ndim == 4 else split_heads(recorded_v, net))
        q = net.rope(net.project(layer, x, "q")[0], slice(0, ids.shape[1]))
        x = x + net.out(layer, net.attend(q, [(net.rope(k, slice(0, ids.shape[1])), v)]))
        x = x + net.ffn(layer, x)
    close(net.final(x), golden["full.hidden_states"][-1:])
    close(net.head(x), golden.get("full.logits", golden.get("full.logits_unshifted")))
    close(net.hidden(ids), x)


def split_heads(t: Tensor, net: Network) -> Tensor:
    return t.view(*t.shape[:2], -1, net.config.head_dim).transpose(1, 2)


@pytest.mark.parametrize("name", SETS)
def test_longer_than_the_nominal_maximum(name: str) -> None:
    golden, net = tensors(name), model(name).network
    ids = golden["long.input_ids"]
    assert ids.shape[1] > net.config.max_positions
    logits = net.head(net.hidden(ids)[:, -32:])
    close(logits, golden.get("long.logits_last32", golden.get("long.logits_unshifted_last32")))


def test_a_batch_of_rows() -> None:
    golden, net = tensors("llada_fastdllm"), model("llada_fastdllm").network
    close(net.head(net.hidden(golden["batch2.input_ids"])), golden["batch2.logits"])


def test_shifted_logits_read_the_row_before() -> None:
    golden, config = tensors("dream_fastdllm"), model("dream_fastdllm").network.config
    rows = [config.row_of(p) for p in range(golden["full.input_ids"].shape[1])]
    close(golden["full.logits_unshifted"][:, rows], golden["full.logits_shifted"])


class Probe(FastDllm):
    """Gives the logits of all rows of a pass, as the fixtures record them."""

    def rows(self, window: Window) -> Rows:
        super().rows(window)
        stop = window.stop if self.options.mode == "dual" else self.request.length
        return Rows.range(0 if self._refresh else window.start, self.request.length if self._refresh else stop)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        assert rows.span is not None
        return tuple(range(rows.span.start + self.network.config.shift, rows.span.stop + self.network.config.shift))


@pytest.mark.parametrize("mode", ["prefix", "dual"])
@pytest.mark.parametrize("name", SETS)
def test_cached_passes(name: str, mode: str) -> None:
    """The cache of one state of the canvas, read after half a block was filled."""
    golden, net, meta = tensors(name), model(name).network, cases_meta(name)["forward"]
    start, stop = meta["block_start"], meta["block_end"]
    ids = golden["full.input_ids"].clone()
    method: Method = Probe(FastDllmOptions(mode=mode))  # type: ignore[arg-type]
    canvas = Canvas(ids, start, stop, net.config.mask_id, net.config.eos_ids)
    method.begin(Request(net, canvas, ids, DecodeSettings.make({"gen_length": stop - start})))
    masked = tuple(range(start, stop))
    method.forward(Window(0, start, stop, 0, 8, masked))
    ids.copy_(golden["cached.input_ids"])
    logits = method.forward(Window(0, start, stop, 1, 8, masked)).logits[None]
    suffix = "logits" if name == "llada_fastdllm" else "logits_unshifted"
    close(logits, golden[f"cached.{mode}_{suffix}"])
    fresh = net.head(net.hidden(ids))
    close(fresh, golden[f"cached.full_{suffix}"])
    assert (logits - fresh[:, start : start + logits.shape[1]]).abs().max() > 1, "a stale cache must show"


def test_ntk_scaling_multiplies_theta() -> None:
    config = model("llada_fastdllm").network.config
    assert scale_rope(config, "ntk:13.6").rope_theta == pytest.approx(13.6 * config.rope_theta)
    scaled = Network(scale_rope(config, "ntk:13.6"), model("llada_fastdllm").network.weights)
    ids = tensors("llada_fastdllm")["full.input_ids"]
    assert (scaled.hidden(ids) - model("llada_fastdllm").network.hidden(ids)).abs().max() > 1e-3
