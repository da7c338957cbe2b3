"""GSM8K: lm-eval's prompts and scores, shots that depend on nothing but the document, and clear errors."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from fakes import EOS, ToyCodec, ToyGenerate, ToyModel
from golden_cases import GOLDEN
from gsm8k_data import MINI, TEST, TRAIN, lines, mini, official
from hypothesis import given
from hypothesis import strategies as st
from ruler_codecs import BpeCodec, leading_space_codec, word_codec
from test_runner import HERE, Silent, one_request

from dllm_bench.errors import UserError
from dllm_bench.options import make_options
from dllm_bench.running.runner import Cell, Runner
from dllm_bench.running.spec import check, expand
from dllm_bench.running.store import Store
from dllm_bench.running.task import TASKS, Answer, Sample
from dllm_bench.tasks import gsm8k_data
from dllm_bench.tasks.gsm8k import Gsm8k, Gsm8kCot
from dllm_bench.tasks.gsm8k_scoring import (
    COT_STRICT,
    STRICT,
    extract_flexible,
    extract_strict,
    number,
    same_number,
    same_text,
)

CASES = json.loads((GOLDEN / "scoring" / "cases.json").read_text(encoding="utf-8"))["gsm8k"]["cases"]
PATTERNS = {"gsm8k": STRICT, "gsm8k_cot": COT_STRICT}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return official(tmp_path / "official")


def task(name: str = "gsm8k", codec: Any = None, **options: Any) -> Any:
    cls = TASKS.get(name)
    return cls(codec or ToyCodec(), make_options(cls.options_class, options, owner=name))


def sample(made: Any, index: int = 0, subset: str = "main", seed: int = 0) -> Sample:
    return made.sample(subset, index, ctx=None, gen_length=64, seed=seed)


def text(one: Sample) -> str:
    return ToyCodec().decode(one.prompt_ids)


# -- scores ---------------------------------------------------------------------------------------------------------


def test_all_golden_cases_are_there() -> None:
    assert len(CASES) == 36 and sum("after_stop_truncation" in case for case in CASES) >= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prediction"][:30])
def test_the_scores_of_lm_eval(case: dict[str, Any]) -> None:
    stages = [case, *([case["after_stop_truncation"]] if "after_stop_truncation" in case else [])]
    for stage in stages:
        for name in PATTERNS.keys() & stage.keys():
            graded = TASKS.get(name).grade("main", Answer(stage["prediction"], (case["answer"],)))
            found = {
                "strict-match": (extract_strict(stage["prediction"], PATTERNS[name]), graded["strict"]),
                "flexible-extract": (extract_flexible(stage["prediction"]), graded["flexible"]),
            }
            assert found == {rule: (told["extracted"], told["score"]) for rule, told in stage[name].items()}, name


@given(st.text("0123456789.,$-# answeri\n", max_size=40), st.text("0123456789.,$#-x \n", max_size=20))
def test_comparisons_are_those_of_the_regular_expressions(prediction: str, reference: str) -> None:
    """lm-eval's own words: what it deletes, as patterns, and which match it takes."""

    def bare(value: str) -> str:
        for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
            value = re.sub(pattern, "", value)
        return value.lower()

    found = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", prediction)
    last = next(part for part in found[-1] if part) if found else "[invalid]"
    assert extract_flexible(prediction) == last.strip()
    assert same_text(last, reference) == (bare(last) == bare(reference))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("29", "29"), ("$29.00", "29"), ("1,000", "1000"), ("18.0", "18"), ("-$5", "-5"), ("$-5", "-5"), ("−5", "-5"),
        ("3-5", "5"), ("(3)-5", "5"), ("10 - 4 = 6", "6"), (".5", "0.5"), ("18.", "18"), ("18, 19", "19"),
        ("#### 18 eggs at $3", "18"), ("####$ 1,234.50 for 7 days", "1234.5"), ("The answer is: 4 of 9", "4"),
        ("first #### 3 then #### 18", "18"), ("... 18 ...", "18"), ("0.1 + 0.2 = 0.30", "0.3"), ("12,34", "34"),
    ],
)  # fmt: skip
def test_numbers_as_a_person_reads_them(said: str, wanted: str) -> None:
    assert number(said) == Decimal(wanted) and same_number(said, f"so\n#### {wanted}")


def test_other_numbers_are_not_equal() -> None:
    for said in ("", "none", "#### -29", "290", "2.9", "29.000001", "1" * 5000):
        assert not same_number(said, "#### 29"), said
    assert not same_number("no number", "no number")
    assert same_number("1" * 5000 + ".0", "1" * 5000), "decimals have no largest number"


def test_the_best_reference_counts() -> None:
    graded = Gsm8k.grade("main", Answer("#### 7", ("#### 8", "#### 7")))
    assert graded == {"strict": 1.0, "flexible": 1.0, "numeric": 1.0} and Gsm8k.metrics[0] == "strict"
    answers = [Answer("#### 7.0", ("7",)), Answer("#### 7", ("7",)), Answer("7", ("7",))]
    grades = [Gsm8k.grade("main", one) for one in answers]
    assert Gsm8k.aggregate("main", answers, grades) == {"strict": 33.33, "flexible": 66.67, "numeric": 100.0}


# -- prompts --------------------------------------------------------------------------------------------------------


def test_a_prompt_without_shots_is_the_question(folder: Path) -> None:
    one = sample(task(data=str(folder), shots=0), 1)
    assert text(one) == f"Question: {TEST[1][0]}\nAnswer:", "braces and double spaces as they are"
    assert (one.references, one.until) == ((TEST[1][1],), ("Question:", "</s>", "<|im_end|>"))
    assert (one.nominal_ctx, one.gen_length, one.spans, one.meta) == (None, 64, {}, {"shot_rows": []})


def test_five_solved_problems_stand_before_the_question(folder: Path) -> None:
    one = sample(task(data=str(folder)))
    rows = one.meta["shot_rows"]
    assert len(set(rows)) == 5 and set(rows) <= set(range(20))
    solved = [f"Question: {TRAIN[row][0]}\nAnswer: {TRAIN[row][1]}" for row in rows]
    assert text(one) == "\n\n".join([*solved, f"Question: {TEST[0][0]}\nAnswer:"])
    assert one.spans == {}, "nothing that all samples share"


def test_shots_depend_on_the_document_and_the_seed_alone(folder: Path) -> None:
    made = task(data=str(folder))
    random.seed(7)
    forward = [sample(made, i) for i in range(3)]
    random.seed(8)
    again = task(data=str(folder))
    assert [sample(again, i) for i in (2, 0, 1)] == [forward[2], forward[0], forward[1]]
    rows = [one.meta["shot_rows"] for one in forward]
    assert len({tuple(one) for one in rows}) == 3
    assert sample(made, 0, seed=1).meta["shot_rows"] != rows[0]
    fewer = task(data=str(folder), shots=2)
    assert [sample(fewer, i).meta["shot_rows"] for i in range(3)] == [one[:2] for one in rows]


def test_shots_are_pinned(folder: Path) -> None:
    """A change of the draw is a new version of the task."""
    made = task(data=str(folder))
    assert [sample(made, i).meta["shot_rows"] for i in range(3)] == [
        *([16, 4, 8, 12, 2], [5, 2, 14, 16, 19], [12, 10, 18, 8, 14])
    ]
    assert Gsm8k.version == 1


def test_a_question_is_never_its_own_shot(folder: Path) -> None:
    made = task(data=str(folder / "train.jsonl"), shots=19)
    for index in (0, 11):
        rows = sample(made, index).meta["shot_rows"]
        assert sorted([*rows, index]) == list(range(20))
    with pytest.raises(UserError, match="19 problems to draw 20 shots from: nearest valid is 19"):
        sample(task(data=str(folder / "train.jsonl"), shots=20))


def test_the_eight_shots_of_the_paper(folder: Path) -> None:
    one = sample(task("gsm8k_cot", data=str(folder)))
    asked = text(one)
    assert asked.count("Q: ") == 9 and asked.endswith(f"Q: {TEST[0][0]}\nA:")
    assert asked.startswith("Q: There are 15 trees in the grove.")
    assert one.until == ("Q:", "</s>", "<|im_end|>")
    # the prompt of lm-eval 0.4.13 for a question of three words
    bare = asked.replace(TEST[0][0], "How many?")
    assert hashlib.sha256(bare.encode()).hexdigest().startswith("6b14c4d235e15899")
    two = text(sample(task("gsm8k_cot", data=str(folder), shots=2)))
    assert two.count("Q: ") == 3 and asked.startswith(two.removesuffix(f"Q: {TEST[0][0]}\nA:"))


@pytest.mark.parametrize(
    "codec", [ToyCodec(), word_codec(("<user>\n", "</user>\n")), leading_space_codec(), BpeCodec()]
)
def test_the_fixed_shots_are_an_affix_of_all_samples(folder: Path, codec: Any) -> None:
    questions = ["1 2 3", "Ann", "\u00e9t\u00e9", "(x) is 4", " blank", "Q: why?", "\nline"]
    (folder / "test.jsonl").write_text(lines([(q, "#### 1") for q in questions]), encoding="utf-8")
    made = task("gsm8k_cot", codec, data=str(folder))
    found = [sample(made, index) for index in range(len(questions))]
    spans = {one.spans["affix"] for one in found}
    assert len(spans) == 1, "one state serves all of them"
    (((start, stop),),) = spans
    assert start == 0 and len({one.prompt_ids[:stop] for one in found}) == 1
    assert codec.decode(found[0].prompt_ids[:stop]).rstrip(":").endswith("The answer is 8.\n\nQ")
    assert sample(task("gsm8k_cot", codec, data=str(folder), shots=0)).spans == {}


def test_sizes_and_budgets(folder: Path) -> None:
    made = task(data=str(folder))
    assert (made.size("main"), made.budget("main"), made.ctx) == (3, 256, "none")
    assert made.fetch("main") == [f"{folder / 'test.jsonl'}: 3 problems", f"{folder / 'train.jsonl'}: 20 problems"]
    assert task("gsm8k_cot", data=str(folder)).fetch("main") == [f"{folder / 'test.jsonl'}: 3 problems"]


# -- data -----------------------------------------------------------------------------------------------------------


def test_the_content_of_the_files_belongs_to_the_key(folder: Path) -> None:
    named = task(data=str(folder)).data("main")
    assert re.fullmatch(r"test\.jsonl:[0-9a-f]{8}\+train\.jsonl:[0-9a-f]{8}", named)
    alone = named.partition("+")[0]
    assert task(data=str(folder), shots=0).data("main") == alone == task("gsm8k_cot", data=str(folder)).data("main")
    assert task(data=str(folder / "test.jsonl")).data("main") == named, "a file finds train.jsonl beside it"
    spread = (folder / "test.jsonl").read_text(encoding="utf-8").replace("\n", "\r\n\r\n")
    (folder / "test.jsonl").write_bytes(b"\xef\xbb\xbf" + spread.encode())
    assert task(data=str(folder)).data("main") == named, "line ends, blank lines and a byte-order mark do not matter"
    (folder / "train.jsonl").write_text(lines(TRAIN[:-1]), encoding="utf-8")
    assert task(data=str(folder)).data("main") != named
    assert task().data("main") is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q"}', "line 2 has no field 'answer': it has question"),
        ('{"question": "", "answer": "#### 1"}', "line 2: the field 'question' must be a text that is not empty"),
        ('{"question": "q", "answer": null}', "line 2: the field 'answer' must be a text"),
        ('{"question": "q", "answer": "1"}', "line 2: the answer has no '#### N'"),
        ("[1]", "line 2 is no JSON object"),
        ('{"question": ', "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_named(folder: Path, line: str, said: str) -> None:
    (folder / "test.jsonl").write_text(lines(TEST[:1]) + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(said)):
        task(data=str(folder)).size("main")


def test_files_that_are_not_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data '.*offical' does not exist: did you mean '.*official'\?"):
        task(data=str(folder.parent / "offical"))
    (folder / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl', which does not exist.*--task-set shots=0"):
        sample(task(data=str(folder)))
    assert sample(task(data=str(folder), shots=0)).meta == {"shot_rows": []}
    (folder / "test.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no problems"):
        task(data=str(folder)).size("main")


def test_an_index_or_a_length_that_does_not_exist(folder: Path) -> None:
    made = task(data=str(folder))
    with pytest.raises(UserError, match="3 problems: the last index is 2"):
        sample(made, 3)
    with pytest.raises(UserError, match="no context lengths"):
        made.sample("main", 0, ctx=2048, gen_length=64, seed=0)
    with pytest.raises(UserError, match="did you mean 'mini'"):
        made.size("minni")
    with pytest.raises(UserError, match="no context lengths"):
        check(one_request(task="gsm8k"))


def stub_hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    monkeypatch.setattr(gsm8k_data, "hub_rows", load)


def test_the_hub_gives_what_the_files_give(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str, *, split: str) -> list[dict[str, str]]:
        assert (name, config) == ("openai/gsm8k", "main")
        return [{"question": q, "answer": a} for q, a in {"test": TEST, "train": TRAIN}[split]]

    stub_hub(monkeypatch, load)
    assert sample(task(), 2) == sample(task(data=str(folder)), 2)
    assert task().fetch("main") == ["openai/gsm8k test: 3 problems", "openai/gsm8k train: 20 problems"]


def test_without_hub_and_files_the_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **more: Any) -> Any:
        raise ConnectionError("no route\nto host")

    stub_hub(monkeypatch, load)
    for name in ("gsm8k", "gsm8k_cot"):
        with pytest.raises(UserError) as raised:
            task(name).size("main")
        for word in ("openai/gsm8k", "hub", "--data DIR", "data=DIR", "test.jsonl", "--subset mini"):
            assert word in str(raised.value)


# -- the mini set ---------------------------------------------------------------------------------------------------


def test_the_mini_set_needs_no_shots_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsm8k_data, "MINI", mini(tmp_path / "mini.jsonl.gz"))
    made = task()
    assert (made.size("mini"), made.data("mini"), made.fetch("mini")) == (9, None, [])
    assert text(sample(made, 4, "mini")) == f"Question: {MINI[4][0]}\nAnswer:"
    three = sample(task(shots=3), 4, "mini")
    assert len(three.meta["shot_rows"]) == 3 and 4 not in three.meta["shot_rows"]
    with pytest.raises(UserError, match="mini is built in: leave data out"):
        task(data=str(tmp_path)).size("mini")


@pytest.mark.skipif(not gsm8k_data.MINI.exists(), reason="the set is not made yet")
def test_the_built_in_problems_are_right() -> None:
    problems = gsm8k_data.from_file(gsm8k_data.MINI).problems
    assert len(problems) >= 500 and len({problem.question for problem in problems}) == len(problems)
    signs: dict[str, Callable[[int, int], int]] = {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a // b,
    }  # fmt: skip
    for problem in problems:
        *steps, last = problem.answer.split("\n")
        assert re.fullmatch(r"#### -?\d+", last) and steps
        for step in steps:
            found = re.fullmatch(r"(\d+)([-+*/])(\d+)=(-?\d+)", step)
            assert found is not None, step
            a, sign, b, result = found.groups()
            assert signs[sign](int(a), int(b)) == int(result), step
            assert sign != "/" or int(a) % int(b) == 0, step
        assert number(steps[-1].partition("=")[2]) == number(last)


# -- runs -----------------------------------------------------------------------------------------------------------


class Says(ToyGenerate):
    """Gives one text, whatever the question."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids = [ord(letter) for letter in text]

    def __call__(self, model: Any, prompt_ids: Sequence[int], *, method: Any, decode: Any) -> Any:
        self.calls.append(decode.gen_length)
        return self._made((self.ids + [EOS] * decode.gen_length)[: decode.gen_length])


def run(folder: Path, data: Path, generate: Any, **changes: Any) -> list[dict[str, Any]]:
    model = ToyModel(**changes)
    request = one_request(task="gsm8k", ctxs=(), task_sets=[f"data={data}"])
    plan = check(request)
    made = plan.task_class(model.codec, plan.task_options)
    store = Store(folder)
    cells = [Cell(spec, 1) for spec in expand(plan, model, made, "0")]  # type: ignore[arg-type]
    Runner(model, made, store, generate, HERE, Silent()).run(cells)  # type: ignore[arg-type]
    return store.read()


def test_eos_then_stop_strings_then_extraction(tmp_path: Path, folder: Path) -> None:
    said = " 5+3=8\n#### 8\n\nQuestion: more\n#### 99" + chr(EOS) + "#### 7"
    (row,) = run(tmp_path / "runs", folder, Says(said))
    assert (row["text"], row["stopped_by"], row["nominal_ctx"]) == (" 5+3=8\n#### 8\n\n", "stop_string", None)
    assert json.loads(row["scores"]) == {"strict": 1.0, "flexible": 1.0, "numeric": 1.0}
    assert (row["score"], row["scorer_version"], row["references"]) == (1.0, 1, [TEST[0][1]])
    assert json.loads(row["sample_meta"]).keys() == {"shot_rows"} and "test.jsonl:" in row["task_data"]


def test_a_prompt_longer_than_the_model_is_an_error_before_anything_runs(tmp_path: Path, folder: Path) -> None:
    length = len(sample(task(data=str(folder))).prompt_ids) + 256
    said = f"sample 0 of gsm8k/main has {length - 256} tokens and 256 to generate, more than the {length - 1} positions"
    with pytest.raises(UserError, match=said):
        run(tmp_path / "runs", folder, generate := Says("8"), max_positions=length - 1)
    assert generate.calls == [] and not (tmp_path / "runs").exists()
    assert len(run(tmp_path / "runs", folder, Says("8"), max_positions=length)) == 1
    scaled = run(tmp_path / "scaled", folder, Says("8"), max_positions=length - 1, rope_scaling="ntk:2")
    assert [row["beyond_max_positions"] for row in scaled] == [True]


def test_the_chain_of_thought_task_is_another_class() -> None:
    assert (Gsm8kCot.metrics, Gsm8kCot.subsets) == (Gsm8k.metrics, ("main",))
    with pytest.raises(UserError, match="at most 8"):
        task("gsm8k_cot", shots=9)
    with pytest.raises(UserError, match="at least 0"):
        task(shots=-1)
