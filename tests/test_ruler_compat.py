"""lm-eval's samples and NVIDIA's scores are reproduced from golden files."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from ruler_codecs import BpeCodec

from dllm_bench.errors import UserError
from dllm_bench.tasks.ruler import RulerNiah, RulerOptions
from dllm_bench.tasks.ruler_compat import LmEvalRun, LmEvalSource, lm_eval_samples
from dllm_bench.tasks.ruler_prompt import SETTINGS
from dllm_bench.tasks.ruler_scoring import postprocess, string_match_all, string_match_part
from dllm_bench.tasks.ruler_text import split_sentences

GOLDEN = Path(__file__).parent / "golden"
SAMPLES = json.loads((GOLDEN / "ruler" / "samples.json").read_text(encoding="utf-8"))
SCORES = json.loads((GOLDEN / "scoring" / "cases.json").read_text(encoding="utf-8"))["ruler"]


def golden_source() -> LmEvalSource:
    find = re.compile(SAMPLES["tokenizer_regex"]).findall
    return LmEvalSource(lambda text: len(find(text)), SAMPLES["essay_text"].split(" "), split_sentences)


def golden_id(case: dict) -> str:
    return f"{case['task']}-{case['max_seq_length']}-{case['seed']}"


@pytest.mark.parametrize("case", SAMPLES["lm_eval"], ids=golden_id)
def test_lm_eval_samples_are_reproduced(case):
    subset = case["task"].removeprefix("niah_")
    run = LmEvalRun(subset, case["max_seq_length"], case["num_samples"], case["tokens_to_generate"])
    [made] = lm_eval_samples([run], golden_source(), seed=case["seed"])
    assert len(made) == len(case["samples"]) == case["num_samples"]
    for one, expected in zip(made, case["samples"], strict=True):
        assert one.index == expected["index"]
        assert one.input == expected["input"]
        assert list(one.outputs) == expected["outputs"]
        assert one.gen_prefix == expected["gen_prefix"]
        assert one.length == expected["length"]
        assert f"{one.input} {one.gen_prefix}" == expected["prompt_sent_to_model"]


def test_the_global_random_state_is_neither_used_nor_moved():
    random.seed(1)
    before = random.getstate()
    run = LmEvalRun("multikey_2", 600, 2)
    first = lm_eval_samples([run], golden_source(), seed=42)
    assert random.getstate() == before
    random.seed(99)
    assert lm_eval_samples([run], golden_source(), seed=42) == first


def test_runs_share_one_stream():
    """As in lm-eval, the second length's samples depend on the first's."""
    long, short = LmEvalRun("single_1", 512, 2), LmEvalRun("single_1", 400, 2)
    _, after = lm_eval_samples([long, short], golden_source(), seed=42)
    [alone] = lm_eval_samples([short], golden_source(), seed=42)
    assert len(after) == len(alone) == 2
    assert after != alone


def test_settings_are_those_of_lm_eval():
    for case in SAMPLES["lm_eval"] + SAMPLES["nvidia"]:
        setting = SETTINGS[case["task"].removeprefix("niah_")]
        haystack = {"repeat": "noise", "needle": "needles"}.get(case["type_haystack"], case["type_haystack"])
        assert setting.haystack == haystack
        assert (setting.key, setting.value) == (case["type_needle_k"], case["type_needle_v"])
        assert setting.keys == max(case["num_needle_k"], case["num_needle_q"])
        assert (setting.values, setting.queries) == (case["num_needle_v"], case["num_needle_q"])


def test_the_task_gives_the_sequence_in_any_order(tmp_path):
    text = tmp_path / "essay.txt"
    text.write_text(SAMPLES["essay_text"], encoding="utf-8")
    codec = BpeCodec()
    options = RulerOptions(haystack=str(text), compat="lm_eval")
    task = RulerNiah(codec, options)
    third = task.sample("multivalue", 2, ctx=1024, gen_length=128, seed=7)
    first = task.sample("multivalue", 0, ctx=1024, gen_length=128, seed=7)
    source = LmEvalSource(lambda text: len(codec.encode(text)), SAMPLES["essay_text"].split(" "), split_sentences)
    if third.meta["splitter"] == "regex":
        [made] = lm_eval_samples([LmEvalRun("multivalue", 1024, 3)], source, seed=7)
        assert codec.decode(third.prompt_ids) == f"{made[2].input} {made[2].gen_prefix}"
        assert codec.decode(first.prompt_ids) == f"{made[0].input} {made[0].gen_prefix}"
    assert third.meta["compat"] == "lm_eval"
    assert len(third.spans["needle"]) == len(third.references) == 4
    for reference, (start, end) in zip(third.references, third.spans["needle"], strict=True):
        assert codec.decode(third.prompt_ids[start:end]).strip().endswith(f"is: {reference}.")
    assert RulerNiah(codec, options).sample("multivalue", 0, ctx=1024, gen_length=128, seed=7) == first


def test_a_length_for_which_lm_eval_makes_nothing_is_an_error():
    task = RulerNiah(BpeCodec(), RulerOptions(compat="lm_eval"))
    with pytest.raises(UserError, match=r"makes no sample of multikey_3 .* minimum is about 3"):
        task.sample("multikey_3", 0, ctx=200, gen_length=128, seed=0)


@pytest.mark.parametrize("case", SCORES["cases"], ids=lambda case: repr(case["prediction"])[:30])
def test_nvidia_scores_are_reproduced(case):
    prediction, references = case["prediction"], case["references"]
    assert postprocess(prediction) == case["postprocessed"]
    everything, any_of = string_match_all(prediction, references), string_match_part(prediction, references)
    assert round(100 * everything, 2) == case["nvidia"]["string_match_all_pct"]
    assert round(100 * any_of, 2) == case["nvidia"]["string_match_part_pct"]
    assert everything == pytest.approx(case["lm_eval"]["string_match_all"])


def test_nvidia_aggregates_are_reproduced():
    pairs = [(case["prediction"], case["references"]) for case in SCORES["cases"]]
    everything = sum(string_match_all(*pair) for pair in pairs) / len(pairs)
    any_of = sum(string_match_part(*pair) for pair in pairs) / len(pairs)
    assert round(100 * everything, 2) == SCORES["aggregate"]["nvidia_all_pct"]
    assert round(100 * any_of, 2) == SCORES["aggregate"]["nvidia_part_pct"]


def test_the_task_scores_the_share_of_values_found():
    task = RulerNiah(BpeCodec())
    sample = task.sample("multiquery", 0, ctx=1024, gen_length=128, seed=0)
    assert task.score(sample, " and ".join(sample.references).upper()) == 1.0
    assert task.score(sample, f"\x07{sample.references[2]}") == 0.25
    assert task.score(sample, "") == 0.0


def test_no_references_is_refused():
    with pytest.raises(ValueError, match="without references"):
        string_match_all("text", [])
