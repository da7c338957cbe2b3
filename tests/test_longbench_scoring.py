"""LongBench's scores against those of the official code."""

from __future__ import annotations

import json
import math
import sys
from difflib import SequenceMatcher
from typing import Any

import pytest
from golden_cases import GOLDEN

from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.running.task import Answer
from dllm_bench.tasks.longbench import LongBench
from dllm_bench.tasks.longbench_scoring import METRICS, best, bucket, first_line
from dllm_bench.tasks.longbench_sets import SETS

CASES: dict[str, Any] = json.loads((GOLDEN / "scoring" / "cases.json").read_text(encoding="utf-8"))
KINDS = {name: one["metric"].removesuffix("_score") for name, one in CASES["longbench"].items()}


@pytest.fixture(scope="module")
def scored() -> dict[tuple[str, ...], float]:
    """Scores so far: the data sets of one metric share slow cases."""
    return {}


@pytest.mark.parametrize("name", CASES["longbench"])
def test_every_official_case(name: str, scored: dict[tuple[str, ...], float]) -> None:
    golden = CASES["longbench"][name]
    answers, grades = [], []
    for case in golden["cases"]:
        answer = Answer(case["prediction"], tuple(case["references"]), {"all_classes": golden["all_classes"]})
        key = (KINDS[name], str(SETS[name].first_line), answer.prediction, *answer.references)
        if key not in scored:
            scored[key] = LongBench.grade(name, answer)["score"]
        assert scored[key] == pytest.approx(case["official"], abs=1e-9), case["prediction"][:80]
        answers.append(answer)
        grades.append({"score": scored[key]})
    assert LongBench.aggregate(name, answers, grades) == {"score": golden["dataset_score_pct"]}


def test_the_cases_cover_all_sets_by_their_metrics() -> None:
    assert {name: one.metric for name, one in SETS.items()} == KINDS
    assert sum(len(one["cases"]) for one in CASES["longbench"].values()) == 238


def test_extended_sets_are_scored_in_buckets() -> None:
    golden = CASES["longbench_e"]
    rows = zip(golden["predictions"], golden["references"], golden["lengths"], strict=True)
    answers = [Answer(text, tuple(references), {"length": length}) for text, references, length in rows]
    grades = [LongBench.grade("qasper_e", answer) for answer in answers]
    made = LongBench.aggregate("qasper_e", answers, grades)
    assert {name: made[name] for name in golden["official_buckets"]} == golden["official_buckets"]
    assert made["score"] == round(100 * sum(one["score"] for one in grades) / 6, 2)
    short = LongBench.aggregate("qasper_e", answers[:1], grades[:1])
    assert (short["0-4k"], short["4-8k"], short["8k+"]) == (100.0, None, None)
    assert [bucket(n) for n in (3999, 4000, 7999, 8000)] == ["0-4k", "4-8k", "4-8k", "8k+"]


def test_extended_sets_have_the_rules_of_their_plain_ones() -> None:
    facts = {"all_classes": ["Food", "Date"]}
    assert LongBench.grade("trec_e", Answer("\n\nFood\nDate", ("Food",), facts)) == {"score": 1.0}
    assert LongBench.grade("mini_retrieval", Answer(" 12.", ("Paragraph 12",))) == {"score": 1.0}
    assert LongBench.grade("mini_qa", Answer(" quiet harbor.", ("quiet harbor",))) == {"score": 1.0}


def test_what_a_score_needs() -> None:
    for facts in (
        {},
        {"all_classes": None},
        {"all_classes": "Food"},
        {"all_classes": []},
        {"all_classes": ["Food", 1]},
    ):
        with pytest.raises(UserError, match="'all_classes' must list them as texts"):
            LongBench.grade("trec", Answer("Food", ("Food",), facts))
    for facts in ({}, {"length": "4k"}, {"length": True}, {"length": math.nan}):
        with pytest.raises(UserError, match="'length' must be a number"):
            LongBench.aggregate("lcc_e", [Answer("x", ("x",), facts)], [{"score": 1.0}])
    with pytest.raises(UserError, match="names no paragraph"):
        LongBench.grade("passage_retrieval_en", Answer("7", ("seven",)))
    with pytest.raises(ChoiceError, match="did you mean 'hotpotqa'"):
        LongBench.grade("hotpotq", Answer("x", ("x",)))
    assert best("qa_f1", "x", ()) == 0.0


def test_the_one_behind_a_removed_class_is_passed_over() -> None:
    # of the two names inside the right one only the first is taken out
    assert METRICS["classification"]("a ab abc", "abc", ["a", "ab", "abc"]) == 1 / 2
    assert METRICS["classification"]("a ab abc", "abc", ["a", "abc", "ab"]) == 1.0


def test_code_similarity_is_difflibs() -> None:
    long, other = "a" * 200 + "b", "b" + "a" * 200
    assert METRICS["code_sim"](long, other, ()) == round(100 * SequenceMatcher(None, long, other).ratio()) / 100 < 0.1
    assert METRICS["code_sim"]("", "", ()) == 1.0


def test_first_line() -> None:
    assert [first_line(text) for text in ("", "\n\n a\nb", " \na", "a\r\nb")] == ["", " a", " ", "a\r"]


def deep(call: Any, calls: int) -> float:
    """The call, from so many calls further down."""
    return deep(call, calls - 1) if calls else call()


def test_rouge_does_not_depend_on_who_asks() -> None:
    # without a common word all words of both are walked through, one call each
    def pair(words: int) -> tuple[str, str]:
        same = [f"s{i}" for i in range(10)]
        return " ".join([*same, *(f"a{i}" for i in range(words))]), " ".join([*same, *(f"b{i}" for i in range(words))])

    assert sys.getrecursionlimit() == 1000
    good, bad = pair(470), pair(500)
    expected = 2 * (10 / 480) ** 2 / (2 * 10 / 480 + 1e-8)
    for calls in (0, 300):
        assert math.isclose(deep(lambda: METRICS["rouge"](*good, ()), calls), expected, rel_tol=1e-12)
        assert deep(lambda: METRICS["rouge"](*bad, ()), calls) == 0.0


def test_jieba_is_fresh_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert METRICS["qa_f1_zh"]("厦门大学", "厦门大学。", ()) == 1.0
    assert capfd.readouterr().err == ""
