"""ACache against the official code: ids, passes, anchors, importances and what each pass ran and committed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from golden_cases import GOLDEN, model

from dllm_bench import Generation, generate

NAME = "llada_acache"
SELECTORS = {"acache": "acache", "cacheblend_l2_kv": "cacheblend"}


def all_cases() -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads((GOLDEN / NAME / "cases.json").read_text())["cases"]
    return found


def method_options(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "anchor_ratio": case["anchor_ratio"],
        "affix_start": case["affix_start"],
        "affix_end": case["affix_end"],
        "selection": case["selection_mode"],
        "selector": SELECTORS[case["selector"]],
        "drop_non_anchor": case["drop_non_anchor"],
        "step_cap": True,
    }


def decode_settings(case: dict[str, Any]) -> dict[str, Any]:
    decode = {k: case[k] for k in ("gen_length", "block_length", "steps")} | {"eos_stop": False}
    decode |= {k: case[k] for k in ("threshold", "factor") if case[k] is not None}
    if case["generation_start"] is not None:
        decode["fill"] = (case["generation_start"], case["generation_start"] + case["gen_length"])
    return decode


def run(case: dict[str, Any], dtype: str = "float32") -> Generation:
    loaded = model(NAME, dtype)
    return generate(loaded, case["prompt_ids"], "acache", method_options(case), decode_settings(case), trace=True)


def response_start(case: dict[str, Any]) -> int:
    return len(case["prompt_ids"]) if case["generation_start"] is None else int(case["generation_start"])


def test_the_whole_set_is_here() -> None:
    assert len(all_cases()) == 59


@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c["id"])
def test_case(case: dict[str, Any]) -> None:
    got = run(case)
    assert got.output_ids == case["generated_ids"]
    assert got.nfe == case["nfe"]
    assert got.masks_left == case["generated_ids"].count(model(NAME).config.mask_id)
    passes = got.passes or []
    assert [p["rows"] for p in passes] == [fed for fed, _ in case["forwards"]]
    probes, commits = [p for p in passes if "probe" in p["method"]], [p for p in passes if "probe" not in p["method"]]
    start, block = response_start(case), case["block_length"]
    assert [[(p - start) % block for p, _ in c["committed"]] for c in commits] == [
        sorted(offsets) for offsets in case["decoded_in_block"]
    ]
    assert {p["method"]["n_anchors"] for p in commits} == {case["n_anchors"]}
    if case["n_anchors"] == 0:
        assert probes == [] and got.probe is None
        return
    assert [p["committed"] for p in probes] == [[]] and passes[0] is probes[0]
    assert probes[0]["method"]["probe"] == SELECTORS[case["selector"]]
    assert probes[0]["method"]["anchors"] == case["anchor_positions"]
    assert len(case["importance"]) == case["affix_end"] - case["affix_start"]
    assert probes[0]["method"]["importance"] == pytest.approx(case["importance"], rel=1e-3)
    assert case["n_anchors"] == min(math.ceil(case["anchor_ratio"] * len(case["importance"])), len(case["importance"]))


@pytest.mark.parametrize("case", [c for c in all_cases() if c.get("dual_cache_nfe")], ids=lambda c: c["id"])
def test_ratio_one_is_the_dual_cache_with_one_pass_more(case: dict[str, Any]) -> None:
    dual = generate(
        model(NAME), case["prompt_ids"], "fast_dllm", {"mode": "dual", "step_cap": True}, decode_settings(case)
    )
    assert [*case["prompt_ids"], *dual.output_ids] == case["dual_cache_output_ids"]
    assert dual.nfe == case["dual_cache_nfe"] == case["nfe"] - 1
    assert run(case).output_ids == dual.output_ids


@pytest.mark.parametrize("case", [all_cases()[i] for i in (14, 17, 38, 41)], ids=lambda c: c["id"])
def test_float64_gives_the_same(case: dict[str, Any]) -> None:
    got = run(case, "float64")
    assert (got.output_ids, got.nfe) == (case["generated_ids"], case["nfe"])
    assert (got.passes or [])[0]["method"]["anchors"] == case["anchor_positions"]
