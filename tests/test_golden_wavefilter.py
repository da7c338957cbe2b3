"""WaveFilter on Fast-dLLM, token for token: ids, passes, kept positions and counts."""

from __future__ import annotations

from typing import Any

import pytest
from golden_cases import GOLDEN, cases, model
from safetensors.torch import load_file

from dllm_bench.caching.method import Method
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.methods.wavefilter import WaveFilter

NAME = "llada_wavefilter"
KEPT = load_file(GOLDEN / NAME / "kept.safetensors")
fast_dllm_cases = [c for c in cases(NAME) if c["method"] in ("dual", "prefix")]

elastic_cases = [c for c in cases(NAME) if c["method"] == "elastic"]


def test_the_whole_set_is_here() -> None:
    assert len(cases(NAME)) == 53
    assert len(fast_dllm_cases) == 38 and len(elastic_cases) == 15


def options(case: dict[str, Any]) -> dict[str, Any]:
    its = case["wavefilter"]
    forced = its["force_keep"]
    assert forced == list(range(len(forced)))
    return {
        "wavefilter.levels": its["levels"],
        "wavefilter.keep": its["props"],
        "wavefilter.norm": its["norm"],
        "wavefilter.force_keep": len(forced),
        "wavefilter.min_prompt": 0,
    }


def run(case: dict[str, Any], name: str, sets: dict[str, Any], dtype: str = "float32") -> tuple[Run, list[Any]]:
    """The run, and per pass the kept positions of each layer and key head."""
    names = {"gen_length": "gen_length", "block_length": "block_length", "steps": "steps", "threshold": "threshold"}
    names["tokens_per_iter"] = "tokens_per_pass"
    args = {names[k]: v for k, v in case["args"].items() if k in names}
    if args.get("threshold") is not None:
        args.pop("tokens_per_pass", None)
    loaded = model(f"{NAME}/{case['model']}", dtype)
    settings = DecodeSettings.make({**args, "eos_stop": False}, "llada")
    canvas = Canvas.make(case["prompt_ids"], settings, loaded.config, loaded.network.device)
    made: list[Method] = []
    kept: list[Any] = []

    def build() -> Method:
        made.append(parse_method(name, sets).build())
        return made[-1]

    def look(*_: Any) -> None:
        memory = made[0].memory
        assert isinstance(memory, WaveFilter)
        kept.append([memory.kept(layer) for layer in range(loaded.config.num_layers)])

    return denoise(loaded.network, canvas, build, settings, look), kept


def check(case: dict[str, Any], done: Run, kept: list[Any]) -> None:
    assert done.canvas.response() == case["output_ids"]
    assert done.counters.nfe == case["nfe"]
    assert [[p for p, _ in one.committed] for one in done.passes] == case["transfers"]
    counters = done.counters
    assert {
        "selections": counters.selections,
        "tokens_kept": counters.kept_keys,
        "tokens_seen": counters.seen_keys,
    } == case["counters"]
    recorded = KEPT.get(case["id"])
    if recorded is None:
        assert not any(head for one in kept for head in one)
        return
    found = [one for one in kept if any(layer is not None for layer in one)][: recorded.shape[0]]
    wanted = [
        [None if (layer < 0).all() else [[p for p in head if p >= 0] for head in layer.tolist()] for layer in one]
        for one in recorded
    ]
    assert found == wanted


@pytest.mark.parametrize("literal", [False, True], ids=["pyramid", "literal"])
@pytest.mark.parametrize("case", fast_dllm_cases, ids=lambda c: f"{c['id']}-{c['model']}-{c['method']}")
def test_fast_dllm(case: dict[str, Any], literal: bool) -> None:
    sets = {**options(case), "fast_dllm.mode": case["method"], "wavefilter.literal": literal}
    check(case, *run(case, "fast_dllm+wavefilter", sets))


@pytest.mark.parametrize("case", elastic_cases, ids=lambda c: c["id"])
def test_elastic_cache(case: dict[str, Any]) -> None:
    args = case["args"]
    sets = {**options(case), "window": args["window_length"], "gamma": args["gamma"], "track": args["track_num"]}
    done, kept = run(case, "elastic_cache+wavefilter", sets)
    check(case, done, kept)
    for one, wanted in zip(done.passes, case["steps"], strict=True):
        assert one.rows == wanted["query_len"]
        assert one.method["track"] == wanted["track"]
        assert one.method["trigger_layer"] == wanted["trigger_layer"]
        assert one.method["sims"] == pytest.approx(wanted["sims"], abs=1e-4)
