"""dLLM-Cache, case by case: ids, commits, passes of both streams, V-verify's selections, and logits of probed steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_cases import cases, model

from dllm_bench import Generation, generate
from dllm_bench.caching.method import Output
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import denoise
from dllm_bench.decoding.rules import Decision
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window

NAME = "llada_dllmcache"
golden = cases(NAME)


def options(case: dict[str, Any]) -> dict[str, Any]:
    s = case["settings"]
    made = {
        "prompt_interval": s["prompt_interval_steps"],
        "response_interval": s["gen_interval_steps"],
        "transfer_ratio": s["transfer_ratio"],
    }
    return made | ({"cfg_interval": s["cfg_interval_steps"]} if s["cfg_scale"] else {})


def decode(case: dict[str, Any]) -> dict[str, Any]:
    names = ("gen_length", "block_length", "steps", "temperature", "remasking", "cfg_scale")
    # the official sampler compares probabilities in the model's own precision, and never stops early
    return {**{n: case["settings"][n] for n in names}, "confidence_dtype": "model", "eos_stop": False}


def selections(run: Generation, prompt: int) -> list[tuple[int, str, int, list[int]]]:
    found = []
    for step, p in enumerate(run.passes or [], start=1):
        streams = {"no_cfg": p["method"], "cfg": p["method"].get("unconditional", {})}
        for stream, report in streams.items():
            for layer, chosen in report.get("selected", {}).items():
                found.append((step, stream, layer, [c - prompt for c in chosen]))
    return found


def forwards(run: Generation) -> int:
    return sum(1 + ("unconditional" in p["method"]) for p in run.passes or [])


def test_the_whole_set_is_here() -> None:
    assert len(golden) == 17
    assert sum(len(c["selections"]) for c in golden) > 700


@pytest.mark.parametrize("case", golden, ids=lambda c: c["id"])
def test_case(case: dict[str, Any]) -> None:
    prompts = case["prompt_ids"]
    runs = [generate(model(NAME), p, "dllm_cache", options(case), decode(case), trace=True) for p in prompts]
    assert [r.output_ids for r in runs] == case["out_ids"]
    for row, run in enumerate(runs):
        prompt = len(prompts[row])
        assert forwards(run) == case["forward_calls"]
        assert [[[p - prompt, t] for p, t in step["committed"]] for step in run.passes or []] == [
            sorted(step[row]) for step in case["commit_trace"]
        ]
        assert selections(run, prompt) == [
            (e["step"], e["pass_"], e["layer"], e["index"][row])
            for e in sorted(case["selections"], key=lambda e: (e["step"], e["pass_"] == "cfg", e["layer"]))
        ]


@pytest.mark.parametrize("case", [c for c in golden if c.get("probe_logits")], ids=lambda c: c["id"])
def test_probed_logits(case: dict[str, Any]) -> None:
    """The fixture names response positions, the loop has logits for those still masked."""
    loaded, settings = model(NAME), DecodeSettings.make(decode(case), "llada")
    canvas = Canvas.make(case["prompt_ids"][0], settings, loaded.config, loaded.network.device)
    wanted, step, compared = case["probe_logits"], 0, 0

    def probe(window: Window, output: Output, decision: Decision) -> None:
        nonlocal step, compared
        for position, expected in zip(case["probe_logits_positions"], wanted.get(str(step), []), strict=False):
            if canvas.start + position in output.positions:
                got = output.logits[output.positions.index(canvas.start + position)]
                torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=0)
                compared += 1
        step += 1

    denoise(loaded.network, canvas, parse_method("dllm_cache", options(case)).build, settings, probe)
    assert compared >= 4


def test_interval_one_is_the_baseline() -> None:
    case = next(c for c in golden if c["id"].endswith("equals_baseline"))
    run = generate(model(NAME), case["prompt_ids"][0], "dllm_cache", options(case), decode(case))
    assert [run.output_ids] == case["baseline_out_ids"]
    assert run.dense_passes == run.nfe
