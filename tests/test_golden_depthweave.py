"""DepthWeave-KV on the dual cache: tokens, bytes, reconstruction errors, probes and scales of the fixtures."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from golden_cases import cases, model

from dllm_bench import Generation, generate
from dllm_bench.methods.depthweave_codec import decode
from dllm_bench.methods.depthweave_coder import Coder

NAME = "llada_depthweave"
ALL = cases(NAME)
ERRORS = ("k_rel_err", "v_rel_err", "k_norm", "v_norm")
Refreshes = list[dict[str, list[float]]]


def test_the_whole_set_is_here() -> None:
    assert len(ALL) == 22
    assert sum(c["strict"] for c in ALL) == 19


@cache
def run(number: int, dtype: str) -> tuple[Generation, Refreshes]:
    """The run of a case, and how far the codes of each refresh are from what was coded."""
    case = ALL[number]
    given = case["depthweave"]
    options = {k: given[k] for k in ("center", "salience", "dense_top", "shares")}
    options |= {"rank": given["r"], "window": given["w"], "tolerance": given["tol"]}
    options |= {"delimiters": given["delimiter_ids"]}
    decode_settings = {k: v for k, v in case["args"].items() if v is not None} | {"eos_stop": False}
    layers = model(f"{NAME}/{case['model']}", dtype).config.num_layers
    refreshes: Refreshes = []
    found: dict[int, tuple[float, ...]] = {}
    close = Coder.close

    def measured(self: Coder, layer: int, rest: Any) -> Any:
        exact = dict(self.fresh)
        made = close(self, layer, rest)
        for i, codes in made.items():
            x = exact[i].raw[:, :, :, : case["prompt_len"]].flatten(1, 2)
            y = decode(codes, x.dtype)
            pairs = [(float((a - b).norm() / a.norm()), float(b.norm())) for a, b in zip(x, y, strict=True)]
            found[i] = (pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
        if len(found) == layers:
            refreshes.append({name: [found[i][n] for i in range(layers)] for n, name in enumerate(ERRORS)})
            found.clear()
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coder, "close", measured)
        net = model(f"{NAME}/{case['model']}", dtype)
        made = generate(net, case["prompt_ids"], "depthweave_kv", options, decode_settings, trace=True)
    return made, refreshes


def same_tokens(case: dict[str, Any], made: Generation) -> bool:
    transfers = [[p for p, _ in step["committed"]] for step in made.passes or []]
    wanted = (case["output_ids"], case["nfe"], [sorted(t) for t in case["transfers"]])
    return (made.output_ids, made.nfe, transfers) == wanted


def reports(made: Generation) -> list[dict[str, Any]]:
    return [step["method"] for step in made.passes or [] if "scale" in step["method"]]


def check_refresh(wanted: dict[str, Any], shown: dict[str, Any], errors: dict[str, list[float]]) -> None:
    assert shown["scale"] == wanted["scale"]
    for name in ("code_bytes", "basis_bytes", "mean_bytes", "raw_bytes"):
        assert shown[name] == wanted[name], name
    assert shown["probe_error"] == pytest.approx(wanted["probe_err"], rel=4e-2)
    for name in ERRORS:
        assert errors[name] == pytest.approx(wanted[name], rel=2e-3), name


@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda n: ALL[n]["id"])
def test_float64(number: int) -> None:
    case = ALL[number]
    made, refreshes = run(number, "float64")
    assert same_tokens(case, made)
    assert len(reports(made)) == len(refreshes) == len(case["refreshes"])
    for wanted, shown, errors in zip(case["refreshes"], reports(made), refreshes, strict=True):
        check_refresh(wanted, shown, errors)


@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda n: ALL[n]["id"])
def test_float32_codes_the_first_refresh_alike(number: int) -> None:
    made, refreshes = run(number, "float32")
    check_refresh(ALL[number]["refreshes"][0], reports(made)[0], refreshes[0])


def test_float32_decodes_most_strict_cases_alike() -> None:
    strict = [n for n, case in enumerate(ALL) if case["strict"]]
    assert sum(same_tokens(ALL[n], run(n, "float32")[0]) for n in strict) >= len(strict) - 2


@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda n: ALL[n]["id"])
def test_stored_bytes_are_the_formula(number: int) -> None:
    """Codes, scales and indices take what the formula says, but for the last byte of a packed row."""
    case = ALL[number]
    made, _ = run(number, "float64")
    held, nominal = made.cache_bytes, made.nominal_bytes or {}
    stored = held["codes"] + held["scales"] + held["indices"]
    assert nominal["codes"] == max(r["code_bytes"] for r in case["refreshes"])
    config = model(f"{NAME}/{case['model']}").config
    rows = config.num_layers * config.num_kv_heads
    channels = 8 * math.log2(config.head_dim) * 3 * config.num_layers
    assert 0 <= stored - nominal["codes"] <= rows + channels
    assert (held["bases"], held["means"]) == (nominal["bases"], nominal["means"])
    generated = case["args"]["gen_length"] * rows * config.head_dim * 8
    assert held["keys"] == held["values"] == nominal["keys"] == nominal["values"] == generated
