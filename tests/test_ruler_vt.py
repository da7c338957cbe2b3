"""RULER's variable tracking: wording, its solved example, and options."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from ruler_codecs import TEMPLATE, BpeCodec, RegexCodec, word_codec
from ruler_solvers import CODECS, INSTRUCTION, check, make, solve_vt

from dllm_bench.errors import UserError
from dllm_bench.options import make_options
from dllm_bench.tasks.ruler_prompt import NOISE
from dllm_bench.tasks.ruler_vt import RulerVt, VtOptions


def test_vt_wording_example_and_spans():
    codec = BpeCodec()
    task = RulerVt(codec)
    sample = make(task, 2, 2048)
    text = check(task, sample)
    example, problem = text.split(INSTRUCTION)[1:]
    value = re.search(r"value (\d+) in", problem)[1]
    names = sample.references
    assert len(names) == 5 and all(re.fullmatch(r"[A-Z]{5}", name) for name in names)
    assert 10_000 <= int(value) <= 99_998
    assert problem.endswith(
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
    )
    body, _ = problem.split("\nQuestion")
    assert set(body.split("\n")) - {NOISE} == {f"VAR {names[0]} = {value}"} | {
        f"VAR {later} = VAR {former} " for former, later in pairwise(names)
    } | ({body.split("\n")[-1]} if sample.meta["cut_unit"] else set())
    # each span is the line that assigns its variable, and the chain stands in its order
    assert list(sample.spans["needle"]) == sorted(sample.spans["needle"])
    for name, (start, end) in zip(names, sample.spans["needle"], strict=True):
        assert codec.decode(sample.prompt_ids[start:end]).startswith(f"VAR {name} = ")
    assert sample.meta["needle_depths"] == sorted(sample.meta["needle_depths"])
    # the example is solved, and has up to 500 tokens without its answer
    question, answer = example.rsplit("they are: ", 1)
    assert answer.endswith("\n\n")
    assert set(answer.split()) == solve_vt(INSTRUCTION + question) and all(len(name) == 3 for name in answer.split())
    unsolved = INSTRUCTION + question + "they are: "
    line = len(codec.encode(NOISE + "\n"))
    assert 500 - line - 8 <= len(codec.encode(unsolved)) <= 500 + 8


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [{"chains": 3, "hops": 2}, {"chains": 2, "hops": 12}, {"shots": 0}, {"hops": 1}])
def test_vt_options(codec, options):
    chosen = make_options(VtOptions, options, owner="ruler_vt")
    task = RulerVt(CODECS[codec](TEMPLATE), chosen)
    for index in range(4):
        sample = make(task, index, 4000)
        text = check(task, sample)
        assert len(sample.references) == chosen.hops + 1 == len(sample.spans["needle"])
        assert text.count(INSTRUCTION) == 1 + chosen.shots
        problem = text.split(INSTRUCTION)[-1]
        assert len(re.findall(r"^VAR .* = \d+$", problem, re.MULTILINE)) == chosen.chains
        assert f", {chosen.hops + 1} variables" in problem


def test_vt_places_are_uniform_and_chains_are_mixed():
    task = RulerVt(word_codec(), VtOptions(chains=2, hops=3, shots=0))
    depths, mixed = [], 0
    for index in range(300):
        sample = make(task, index, 1500)
        depths += sample.meta["needle_depths"]
        order = re.findall(r"^VAR (\w+) = ", task.codec.decode(sample.prompt_ids), re.MULTILINE)
        mixed += [name in sample.references for name in order] not in (
            [True] * 4 + [False] * 4,
            [False] * 4 + [True] * 4,
        )
    quarters = Counter(min(int(depth // 25), 3) for depth in depths)
    assert all(230 <= quarters[k] <= 370 for k in range(4)), quarters
    assert mixed > 250


def test_vt_with_a_token_over_a_joint():
    """A single token for the end of a line of noise and an assignment of some variables."""
    codec = RegexCodec(r" again\.\nVAR [A-M]| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s")
    task = RulerVt(codec)
    for index in range(20):
        sample = make(task, index, 1100)
        check(task, sample)
        assert list(sample.prompt_ids) == codec.wrap(codec.decode(sample.prompt_ids))
        for name, (start, end) in zip(sample.references, sample.spans["needle"], strict=True):
            assert f"{name[1:]} = " in codec.decode(sample.prompt_ids[start:end])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chains": 0}, "nearest valid: 1"), ({"hops": 65}, "nearest valid: 64"), ({"shots": 2}, "1")],
)
def test_vt_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        make_options(VtOptions, options, owner="ruler_vt")
