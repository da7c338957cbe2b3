"""dKV-Cache and Sparse-dLLM: ids, rows of every pass, the order of commits, and the positions that eviction kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_cases import GOLDEN, model

from dllm_bench import Generation, generate
from dllm_bench.decoding.windows import Window
from dllm_bench.methods.dkv_cache import DkvCache

WEIGHTS = "llada_dllmcache"


def extra(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / "llada_extra" / f"{name}.json").read_text())["cases"]
    return found


def run(case: dict[str, Any], method: str, options: dict[str, Any], **decode: Any) -> Generation:
    lengths = {n: case["settings"][n] for n in ("gen_length", "block_length", "steps")}
    (prompt,) = case["prompt_ids"]
    made = generate(model(WEIGHTS), prompt, method, options, {**lengths, "eos_stop": False, **decode}, trace=True)
    assert [made.output_ids] == case["out_ids"]
    assert [p["rows"] for p in made.passes or []] == case["query_len_per_forward"]
    return made


def test_the_whole_sets_are_here() -> None:
    assert [len(extra(n)) for n in ("dkv_decode", "dkv_greedy", "sparse_dllm")] == [5, 4, 5]


@pytest.mark.parametrize("case", extra("dkv_decode"), ids=lambda c: c["id"])
def test_dkv_decode(case: dict[str, Any]) -> None:
    run(case, "dkv_cache", {"refresh_interval": case["settings"]["cache_reloading_step"]})


def greedy(case: dict[str, Any], seed: int) -> Generation:
    settings = case["settings"]
    options = {
        "variant": "greedy",
        "refresh_interval": settings["cache_reloading_step"],
        "neighbours": settings["window_size"],
    }
    made = run(case, "dkv_cache", options, remasking="random", seed=seed)
    start = len(case["prompt_ids"][0])
    # positions of one pass are unordered
    width = settings["gen_length"] // settings["steps"]
    order = [p for block in case["commit_order_per_block"] for p in block]
    wanted = [sorted(order[i : i + width]) for i in range(0, len(order), width)]
    assert [[p - start for p, _ in one["committed"]] for one in made.passes or []] == wanted
    return made


@pytest.mark.parametrize("case", extra("dkv_greedy"), ids=lambda c: c["id"])
def test_dkv_greedy_draws_the_recorded_order(case: dict[str, Any]) -> None:
    greedy(case, case["settings"]["seed"])


@pytest.mark.parametrize("case", extra("dkv_greedy"), ids=lambda c: c["id"])
def test_dkv_greedy_follows_a_given_order(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    start = len(case["prompt_ids"][0])

    def order(self: DkvCache, window: Window) -> list[int]:
        return [start + p for p in case["commit_order_per_block"][window.block]]

    monkeypatch.setattr(DkvCache, "order", order)
    greedy(case, seed=999)


@pytest.mark.parametrize("case", extra("sparse_dllm"), ids=lambda c: c["id"])
def test_sparse_dllm(case: dict[str, Any]) -> None:
    made = run(case, "sparse_dllm", {n: case["settings"][n] for n in ("keep_ratio", "kernel_size")})
    kept = [pair for p in made.passes or [] for pair in p["method"].get("kept", {}).items()]
    assert kept == [(one["layer"], sorted(one["index"])) for one in case["kept_positions"]]
    assert made.counters.selections == len(kept)
