"""Fast-dLLM, LLaDA and Dream, token for token: ids, passes, and the positions each pass committed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from golden_cases import cases, model

from dllm_bench import Generation, generate

LLADA, DREAM = "llada_fastdllm", "dream_fastdllm"
# these follow torch's global random stream of the official code, which a private generator does not have
llada_cases = [c for c in cases(LLADA) if not c.get("rng")]
dream_cases = [c for c in cases(DREAM) if not c.get("rng")]


def test_the_whole_sets_are_here() -> None:
    assert (len(cases(LLADA)), len(llada_cases)) == (54, 52)
    assert (len(cases(DREAM)), len(dream_cases)) == (29, 27)


def run_llada(case: dict[str, Any], prompt: list[int]) -> Generation:
    args = case["args"]
    decode = {k: args[k] for k in ("gen_length", "block_length", "steps", "temperature", "remasking")}
    decode |= {k: args[k] for k in ("threshold", "factor", "cfg_scale") if args.get(k) is not None}
    method, options = "baseline", {}
    if case["method"] in ("prefix", "dual"):
        # v1 caps a dual block at steps / blocks passes; where that leaves no mask, looping to the end is the same
        method, options = "fast_dllm", {"mode": case["method"], "step_cap": case["method"] == "dual"}
    return generate(model(LLADA), prompt, method, options, {**decode, "eos_stop": False}, trace=True)


@pytest.mark.parametrize("case", llada_cases, ids=lambda c: c["id"])
def test_llada(case: dict[str, Any]) -> None:
    runs = [run_llada(case, prompt) for prompt in case["prompt_ids"]]
    assert [r.output_ids for r in runs] == case["output_ids"]
    assert sum(r.masks_left for r in runs) == case.get("masks_left", 0)
    assert batch_nfe(runs, case["args"]["block_length"], len(case["prompt_ids"][0])) == case["nfe"]
    if "transfers" in case:
        assert [transfers(r) for r in runs] == per_row(case["transfers"], runs)
    if "calls" in case and len(runs) == 1:
        shapes = [(kind, count) for kind, _, count in case["calls"]]
        assert [(p["kind"], p["rows"]) for p in runs[0].passes or []] == [
            ("dense" if kind == "full" else "partial", count) for kind, count in shapes
        ]


def transfers(run: Generation) -> list[list[int]]:
    return [[position for position, _ in p["committed"]] for p in run.passes or []]


def per_row(recorded: list[Any], runs: list[Generation]) -> list[list[list[int]]]:
    """The official batch goes on until its slowest row is done; the empty passes of the others are left out."""
    if len(runs) == 1:
        return [[sorted(p) for p in recorded]]
    rows = [[sorted(step[i]) for step in recorded] for i in range(len(runs))]
    return [[p for p in row if p] for row in rows]


def batch_nfe(runs: list[Generation], block: int, prompt: int) -> int:
    """Passes of a batch: in each block as many as its slowest row needs."""
    worst: dict[int, int] = defaultdict(int)
    for run in runs:
        made: dict[int, int] = defaultdict(int)
        for p in run.passes or []:
            made[(p["committed"][-1][0] - prompt) // block] += 1
        for index, number in made.items():
            worst[index] = max(worst[index], number)
    return sum(worst.values()) if len(runs) > 1 else runs[0].nfe


def run_dream(case: dict[str, Any]) -> Generation:
    args = case["args"]
    decode = {"gen_length": args["max_new_tokens"], "steps": args["steps"], "alg": args["alg"], "eps": args["eps"]}
    decode |= {k: args[k] for k in ("block_length", "threshold") if args.get(k) is not None}
    method, options = "baseline", {}
    if case["method"].startswith("fastdllm_"):
        method, options = "fast_dllm", {"mode": case["method"].removeprefix("fastdllm_")}
    return generate(model(DREAM), case["prompt_ids"][0], method, options, {**decode, "eos_stop": False}, trace=True)


@pytest.mark.parametrize("case", dream_cases, ids=lambda c: c["id"])
def test_dream(case: dict[str, Any]) -> None:
    run = run_dream(case)
    assert [run.output_ids] == case["output_ids"]
    assert run.nfe == case["nfe"]
    assert run.masks_left == case["masks_left"]
    if case.get("transfers") is not None:
        assert transfers(run) == [sorted(p) for p in case["transfers"]]
    if case.get("calls") is not None:
        assert [(p["kind"], p["rows"]) for p in run.passes or []] == [
            ("dense" if kind == "full" else "partial", count) for kind, _, count in case["calls"]
        ]


@pytest.mark.parametrize(("name", "wanted"), [(LLADA, llada_cases), (DREAM, dream_cases)])
def test_float64_gives_the_same_ids(name: str, wanted: list[dict[str, Any]]) -> None:
    case = wanted[5]
    run = run_llada if name == LLADA else lambda c, _: run_dream(c)
    first = run(case, case["prompt_ids"][0])
    args = case["args"]
    decode = {
        "gen_length": args.get("gen_length") or args["max_new_tokens"],
        "steps": args["steps"],
        "block_length": args.get("block_length"),
        "alg": args.get("alg"),
        "eos_stop": False,
    }
    again = generate(model(name, "float64"), case["prompt_ids"][0], "baseline", {}, decode)
    assert again.output_ids == first.output_ids
