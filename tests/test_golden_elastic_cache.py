"""Elastic-Cache on LLaDA, decision for decision: ids, passes, tracked tokens, similarities, triggers, commits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from golden_cases import cases, model

from dllm_bench import Generation, generate
from dllm_bench.models.hub import Model

NAME = "llada_elastic"
LAYERS = 4


@cache
def model_with(eos_id: int) -> Model:
    """The fixtures' model; each case names its own EOS."""
    plain = model(NAME)
    return replace(plain, network=replace(plain.network, config=replace(plain.config, eos_ids=(eos_id,))))


def run_case(case: dict[str, Any], **changed: Any) -> Generation:
    options = {"window": case["window_length"], "track": case["track_num"]}
    options |= {k: case[k] for k in ("gamma", "block_caching")}
    decode: dict[str, Any] = {"gen_length": case["gen_length"]}
    if case["threshold"] is None:
        decode["tokens_per_pass"] = case["tokens_per_iter"]
    else:
        decode["threshold"] = case["threshold"]
    loaded = model_with(case["eos_id"])
    return generate(loaded, case["prompt_ids"], "elastic_cache", {**options, **changed}, decode, trace=True)


def test_the_whole_set_is_here() -> None:
    assert len(cases(NAME)) == 55


@pytest.mark.parametrize("case", cases(NAME), ids=lambda c: c["id"])
def test_official_code(case: dict[str, Any]) -> None:
    run = run_case(case)
    assert case["prompt_ids"] + run.output_ids == case["output_ids"]
    assert run.nfe == case["nfe"] == len(run.passes or [])
    assert run.masks_left == 0
    reset = 0
    for made, step in zip(run.passes or [], case["steps"], strict=True):
        decided = made["method"]
        assert [p for p, _ in made["committed"]] == sorted(step["decoded"])
        assert made["rows"] == step["query_len"]
        assert made["kind"] == ("partial" if decided["track"] else "dense")
        for key in ("track", "trigger_layer", "start_reset", "layer_track"):
            assert decided[key] == step[key], key
        assert decided["sims"] == pytest.approx(step["sims"], abs=1e-4)
        reset += LAYERS - decided["start_reset"]
    assert reset / (run.nfe * LAYERS) == pytest.approx(case["update_ratio"], abs=1e-9)
