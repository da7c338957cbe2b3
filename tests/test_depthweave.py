"""DepthWeave-KV in whole runs, its options and what it stacks with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_cases import cases, model
from typer.testing import CliRunner

from dllm_bench import UserError, generate
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.spec import parse_method
from dllm_bench.cli import app
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.methods import depthweave_kv
from dllm_bench.methods.depthweave_codec import Codes
from dllm_bench.methods.depthweave_coder import Coder
from dllm_bench.methods.depthweave_kv import DepthWeaveKv
from dllm_bench.models.hub import Model
from dllm_bench.models.text import ChatTemplate, TextCodec

GQA, MHA = "llada_depthweave/gqa", "llada_depthweave/mha"
CASES = cases("llada_depthweave")


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 120, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


DECODE = {"gen_length": 16, "block_length": 8, "threshold": 0.6, "eos_stop": False}
QUOTA = {"gen_length": 16, "block_length": 8, "eos_stop": False}
NEAR = {"rank": 32, "dense_top": 1.0, "center": True, "tolerance": 10.0}


@pytest.mark.parametrize("name", [GQA, MHA])
@pytest.mark.parametrize("mode", ["dual", "prefix"])
def test_nearly_lossless_codes_decode_like_the_base(name: str, mode: str) -> None:
    prompt = CASES[1 if name == MHA else 6]["prompt_ids"]
    base = generate(model(name, "float64"), prompt, "fast_dllm", {"mode": mode}, QUOTA, trace=True)
    made = generate(model(name, "float64"), prompt, "depthweave_kv", {"mode": mode, **NEAR}, QUOTA, trace=True)
    assert made.output_ids == base.output_ids
    assert [p["committed"] for p in made.passes or []] == [p["committed"] for p in base.passes or []]
    assert made.counters.row_layers == base.counters.row_layers
    assert made.counters.attended_rows == base.counters.attended_rows


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that hold what was coded: all that is left of the memory is where rows go and when."""
    kept: dict[int, tuple[Codes, torch.Tensor]] = {}
    close = Coder.close

    def keep(self: Coder, layer: int, rest: Any) -> dict[int, Codes]:
        fresh = dict(self.fresh)
        made = close(self, layer, rest)
        for i, codes in made.items():
            kept[id(codes)] = (codes, fresh[i].raw[:, :, :, : self._prompt].flatten(1, 2).clone())
        return made

    monkeypatch.setattr(Coder, "close", keep)
    monkeypatch.setattr(depthweave_kv, "decode", lambda codes, dtype, heads: kept[id(codes)][1][:, heads])


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize("name", [GQA, MHA, "dream_fastdllm"])
@pytest.mark.parametrize("mode", ["dual", "prefix"])
@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
def test_without_loss_it_decodes_like_the_base(name: str, mode: str, cfg_scale: float) -> None:
    settings = {**DECODE, "cfg_scale": cfg_scale}
    runs = [
        generate(model(name, "float64"), ids(50), m, {"mode": mode}, settings, trace=True)
        for m in ("fast_dllm", "depthweave_kv")
    ]
    assert runs[0].output_ids == runs[1].output_ids
    committed = [[p["committed"] for p in made.passes or []] for made in runs]
    assert committed[0] == committed[1]
    assert runs[0].counters.row_layers == runs[1].counters.row_layers


def test_coarse_codes_do_change_the_run() -> None:
    case = CASES[0]
    options = {"rank": 1, "shares": [0, 0, 0]}
    base = generate(model(MHA, "float64"), case["prompt_ids"], "fast_dllm", {}, DECODE)
    made = generate(model(MHA, "float64"), case["prompt_ids"], "depthweave_kv", options, DECODE)
    assert made.output_ids != base.output_ids


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("mode", ["dual", "prefix"])
def test_shifted_logits_and_biases(shifted: bool, mode: str) -> None:
    """Shifted logits make a partial pass begin with the last row of the prompt."""
    prompt = ids(20)
    dream = model("dream_fastdllm", "float64")
    decode_settings = {"gen_length": 16, "block_length": 8, "threshold": 0.5, "eos_stop": False}
    if not shifted:
        dream = dataclasses.replace(dream)
        dream.network = dataclasses.replace(dream.network, config=dataclasses.replace(dream.config, shift=False))
    base = generate(dream, prompt, "fast_dllm", {"mode": mode}, decode_settings)
    made = generate(dream, prompt, "depthweave_kv", {"mode": mode, **NEAR, "rank": 64}, decode_settings)
    assert made.output_ids == base.output_ids
    rough = generate(dream, prompt, "depthweave_tuned", {"mode": mode}, decode_settings)
    assert rough.masks_left == 0


@pytest.mark.parametrize("length", [1, 2, 3, 33])
@pytest.mark.parametrize("method", ["depthweave_kv", "depthweave_tuned"])
def test_short_prompts(length: int, method: str) -> None:
    made = generate(model(GQA), ids(length), method, {}, DECODE)
    assert made.masks_left == 0 and all(i != model(GQA).config.mask_id for i in made.output_ids)


@pytest.mark.parametrize("fill", ["0:16", "8:24"])
def test_infill(fill: str) -> None:
    """Before the filled range is prompt; what stands behind it stays exact."""
    settings = {"fill": fill, "block_length": 8, "threshold": 0.6, "eos_stop": False}
    net = model(GQA, "float64")
    base = generate(net, ids(40), "fast_dllm", {}, settings)
    made = generate(net, ids(40), "depthweave_kv", NEAR, settings)
    assert made.output_ids == base.output_ids
    start = int(fill.split(":")[0])
    per_row = 8 * net.config.num_layers * net.config.num_kv_heads * net.config.head_dim
    assert made.cache_bytes["keys"] == (40 - start) * per_row
    assert (made.cache_bytes["codes"] > 0) == (made.cache_bytes["bases"] > 0) == (start > 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_precisions_finish(dtype: str) -> None:
    made = generate(model(GQA, dtype), ids(60), "depthweave_tuned", {}, DECODE)
    assert made.masks_left == 0
    again = generate(model(GQA, dtype), ids(60), "depthweave_tuned", {}, DECODE)
    assert made.output_ids == again.output_ids


def test_guidance_has_two_memories() -> None:
    settings = {**DECODE, "cfg_scale": 0.5}
    net = model(GQA, "float64")
    base = generate(net, ids(60), "fast_dllm", {}, settings)
    made = generate(net, ids(60), "depthweave_kv", NEAR, settings)
    alone = generate(net, ids(60), "depthweave_kv", NEAR, DECODE)
    assert made.output_ids == base.output_ids
    assert made.cache_bytes["codes"] == 2 * alone.cache_bytes["codes"]
    assert (made.nominal_bytes or {})["codes"] == 2 * (alone.nominal_bytes or {})["codes"]


def test_requests_do_not_touch_each_other() -> None:
    spec = parse_method("depthweave_tuned", {"rank": 8})
    method = spec.build()
    net = model(GQA, "float64")
    settings = DecodeSettings.make(DECODE, "llada")

    def go(prompt: list[int]) -> tuple[list[int], list[Any]]:
        canvas = Canvas.make(prompt, settings, net.config, net.network.device)
        run = denoise(net.network, canvas, lambda: method, settings)
        return canvas.response(), [p.method for p in run.passes]

    first = go(ids(60, 1))
    other = go(ids(50, 2))
    assert go(ids(60, 1)) == first
    assert other != first


def test_memory_grows_by_a_fraction_of_the_dense_memory() -> None:
    held = {}
    for method in ("fast_dllm", "depthweave_kv"):
        sizes = [sum(generate(model(MHA), ids(n), method, {}, DECODE).cache_bytes.values()) for n in (100, 300)]
        held[method] = sizes[1] - sizes[0]
    # float32 at rank 24 of 32 channels: about 33 of 128 bytes
    assert held["depthweave_kv"] < 0.3 * held["fast_dllm"]


def test_the_report_is_there_after_refreshes_alone() -> None:
    made = generate(model(GQA), ids(60), "depthweave_kv", {}, DECODE, trace=True)
    for step in made.passes or []:
        assert ("scale" in step["method"]) == (step["kind"] == "dense")
        assert "refresh" in step["method"]


# -- options, names, contract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sets", "message"),
    [
        ("depthweave_kv", {"shares": [0.1, 0.2]}, r"shares needs 3 values.*nearest valid: shares=\[0.1,0.2,0.0\]"),
        ("depthweave_kv", {"shares": [0.1, 0.2, 1.2]}, "at most 1"),
        ("depthweave_kv", {"rank": 0}, "at least 1"),
        ("depthweave_kv", {"window": 0}, "at least 1"),
        ("depthweave_kv", {"dense_top": 1.5}, "at most 1"),
        ("depthweave_kv", {"tolerance": -0.1}, "at least 0"),
        ("depthweave_kv", {"delimiters": "atuo"}, "delimiters"),
        ("depthweave_kv", {"delimiters": [-1]}, "at least 0"),
        ("baseline+depthweave_kv", {}, "nothing to work on"),
        ("fast_dllm+depthweave_kv+depthweave_tuned", {}, "lies lowest: put 'depthweave_kv' on it"),
    ],
)
def test_bad_options_and_stacks_are_refused(text: str, sets: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text, sets)


def test_options_and_presets() -> None:
    assert parse_method("depthweave_kv").name == "fast_dllm+depthweave_kv"
    plain = {k.split(".")[1]: v for k, v in parse_method("depthweave_kv").options.items() if k.startswith("depthweave")}
    assert plain == {
        "rank": 24, "window": 4, "center": False, "salience": False, "dense_top": 0.0, "shares": (0.05, 0.15, 0.3),
        "tolerance": 0.1, "delimiters": "auto",
    }  # fmt: skip
    tuned = parse_method("depthweave_tuned").options
    changed = {k: v for k, v in plain.items() if tuned[f"depthweave_tuned.{k}"] != v}
    assert sorted(changed) == ["center", "dense_top", "salience"]
    assert tuned["depthweave_tuned.dense_top"] == 0.02
    assert parse_method("depthweave_kv", ["delimiters=3,17"]).options["depthweave_kv.delimiters"] == (3, 17)
    assert parse_method("depthweave_kv", ["delimiters=[]"]).options["depthweave_kv.delimiters"] == ()


@pytest.mark.parametrize("name", ["depthweave_kv", "depthweave_tuned"])
def test_it_says_that_it_is_adapted(name: str) -> None:
    for arguments in (["list", "methods"], ["show", name], ["show", f"elastic_cache+{name}"]):
        shown = " ".join(CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout.split())
        assert f"{METHODS.get(name).summary} [adapted: training-free router and gates]" in shown
    assert parse_method(name, {"rank": 8}).label == (
        f"fast_dllm+{name}({name}.rank=8) [adapted: training-free router and gates]"
    )
    assert parse_method("fast_dllm").label == "fast_dllm"


def test_delimiters_beyond_the_models_ids_are_refused() -> None:
    loaded = model("llada_fastdllm")
    last = loaded.config.embedding_size - 1
    decode = {"gen_length": 8, "block_length": 8, "tokens_per_pass": 8}
    generate(loaded, [3, 4, 5], "depthweave_kv", {"delimiters": [4, last]}, decode)
    with pytest.raises(UserError, match=rf"token ids end at {last} \(nearest valid\), got {last + 1}"):
        generate(loaded, [3, 4, 5], "depthweave_kv", {"delimiters": [4, last + 1]}, decode)


def test_too_wide_heads_are_refused() -> None:
    net = SimpleNamespace(config=SimpleNamespace(head_dim=258, num_layers=1))
    with pytest.raises(UserError, match="at most 256 channels"):
        DepthWeaveKv().begin(SimpleNamespace(network=net))  # type: ignore[arg-type]


def test_no_formula_no_nominal_bytes() -> None:
    assert generate(model(GQA), ids(8), "fast_dllm", {}, DECODE).nominal_bytes is None


# -- delimiters -------------------------------------------------------------------------------------------------------


def codec() -> TextCodec:
    from tokenizers import AddedToken, Tokenizer, models

    words = ["a", "b.", ".", ",", "\n", " \n\n", " ", "!?\n", "<", "word", "。", "１"]
    made: Any = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    made.add_special_tokens([AddedToken("<|eot|>", special=True)])
    made.add_tokens([AddedToken("plain")])
    return TextCodec(made, ChatTemplate("plain", "", "", "", ""))


def test_delimiters_are_breaks_punctuation_and_special_tokens() -> None:
    made = codec()
    assert made.delimiter_ids == {2, 3, 4, 5, 7, 8, 10, 12}
    assert made.delimiter_ids is made.delimiter_ids, "the vocabulary is read once"


def with_codec(given: Model, text: TextCodec | None) -> Model:
    return dataclasses.replace(given, _codec=text)


def test_auto_takes_the_delimiters_of_the_models_tokenizer() -> None:
    prompt = [i % 13 for i in range(60)]
    runs = []
    for text, delimiters in ((codec(), "auto"), (None, sorted(codec().delimiter_ids)), (None, "auto"), (codec(), [])):
        made = generate(
            with_codec(model(GQA, "float64"), text), prompt, "depthweave_kv", {"rank": 8, "delimiters": delimiters},
            DECODE, trace=True,
        )  # fmt: skip
        runs.append([p["method"].get("probe_error") for p in made.passes or []])
    assert runs[0] == runs[1] and runs[2] == runs[3] and runs[0] != runs[2]
