"""LongBench: prompts, sizes, data files, the hub, and the command line."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import ToyCodec, ToyGenerate, padded
from hypothesis import given, settings
from hypothesis import strategies as st
from longbench_data import CLASSES, mini_rows, row, write
from ruler_codecs import BpeCodec, word_codec

from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.options import make_options
from dllm_bench.running.rows import answer_columns
from dllm_bench.running.spec import Request, check
from dllm_bench.running.task import TASKS, Answer, Sample
from dllm_bench.tasks import longbench_data
from dllm_bench.tasks.longbench import LongBench, LongBenchOptions
from dllm_bench.tasks.longbench_sets import EXTENDED, GROUPS, SETS
from dllm_bench.tasks.middle_cut import TooShort, fitted

TEMPLATE = ("<user>\n", "</user>\n<assistant>\n")
EXTENDED_OF = {"qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa"}
EXTENDED_OF |= {"samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"}
BARE = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def task(folder: Path, codec: Any = None) -> LongBench:
    options = make_options(LongBenchOptions, {"data": str(folder)}, owner="longbench")
    return LongBench(codec or ToyCodec(), options)


def sample(made: LongBench, subset: str, index: int = 0, ctx: int | None = None, gen_length: int = 32) -> Sample:
    return made.sample(subset, index, ctx=ctx, gen_length=gen_length, seed=0)


def asked(name: str, **fields: Any) -> dict[str, Any]:
    """An item that fits the data set."""
    classes = CLASSES if SETS[name].metric == "classification" else None
    return row(dataset=name, all_classes=classes, input="q {0}" if SETS[name].asks else "", **fields)


# the sets


def test_sets_groups_and_budgets() -> None:
    assert len(SETS) == 21 and len(EXTENDED) == 13
    assert {name: len(members) for name, members in GROUPS.items()} == {
        "all": 21,
        "en": 14,
        "zh": 5,
        "code": 2,
        "e": 13,
    }
    assert {name.removesuffix("_e") for name in EXTENDED} == EXTENDED_OF
    budgets = {512: 4, 128: 4, 64: 6, 32: 7}
    found = [one.budget for one in SETS.values()]
    assert {budget: found.count(budget) for budget in budgets} == budgets
    assert LongBench(ToyCodec()).budget("gov_report_e") == 512 and LongBench(ToyCodec()).budget("mini_qa") == 32
    assert {name for name, one in SETS.items() if not one.template} == BARE
    assert {name for name, one in SETS.items() if one.first_line} == {"trec", "triviaqa", "samsum", "lsht"}


def test_prompts_are_lm_evals_but_where_that_differs_from_the_official_ones() -> None:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "tasks" / "longbench"
    changed = {
        "triviaqa": ("}\n{", "}\n\n{"),
        "samsum": ("}\n{", "}\n\n{"),
        "passage_count": ("is:", "is: "),
        "passage_retrieval_en": ("The answer is:", "The answer is: "),
        "lcc": ("code:", "code:\n"),
        "repobench-p": ("code:", "code:\n"),
    }
    for name, one in SETS.items():
        text = (folder / f"{name}.yaml").read_text(encoding="utf-8").replace("!function", "")
        theirs = (
            yaml.safe_load(text)["doc_to_text"].replace("{{question}}", "{input}").replace("{{context}}", "{context}")
        )
        assert one.prompt == theirs.replace(*changed.get(name, ("", ""))), name
        assert one.budget == yaml.safe_load(text)["generation_kwargs"]["max_gen_toks"], name


def test_subsets_on_the_command_line() -> None:
    def subsets(*names: str, task: str = "longbench") -> tuple[str, ...]:
        return check(Request(["baseline"], task, subsets=names)).subsets

    assert subsets("all") == tuple(SETS) and subsets("e") == EXTENDED and subsets() == ("hotpotqa",)
    assert subsets("code", "lcc", "mini") == ("lcc", "repobench-p", "mini_qa", "mini_retrieval")
    assert subsets(task="longbench:zh") == GROUPS["zh"]
    with pytest.raises(ChoiceError, match="did you mean 'hotpotqa_e'"):
        subsets("hotpotqae")
    with pytest.raises(ChoiceError, match=r", mini_qa, mini_retrieval, all, en, zh, code, e, mini$"):
        subsets("fr")
    assert (
        check(Request(["baseline"], "ruler_niah", ["2k"], ["single_1", "all"])).subsets
        == TASKS.get("ruler_niah").subsets
    )


# prompts


@pytest.mark.parametrize("name", SETS)
def test_the_prompt_of_every_set(name: str, tmp_path: Path) -> None:
    item = asked(name, context='{"a": {input}, %s} {context}', answers=["x"])
    write(tmp_path, name, [item])
    codec = word_codec(TEMPLATE)
    made = sample(task(tmp_path, codec), name)
    text = SETS[name].prompt.replace("{input}", item["input"]).replace("{context}", item["context"], 1)
    whole = text if name in BARE else TEMPLATE[0] + text + TEMPLATE[1]
    assert codec.decode(made.prompt_ids) == whole
    assert (made.until, made.lead) == ((("\n",), "\n") if name == "samsum" else ((), ""))
    assert made.references == ("x",) and made.nominal_ctx is None


def test_facts_for_rescoring(tmp_path: Path) -> None:
    write(tmp_path, "trec_e", [asked("trec", length=4500, answers=["Food"])])
    made = sample(task(tmp_path), "trec_e")
    assert made.meta == {
        "id": "id-0",
        "dataset": "trec",
        "language": "en",
        "length": 4500,
        "all_classes": CLASSES,
        "truncated": False,
        "original_tokens": len(made.prompt_ids),
    }
    stored = json.loads(json.dumps(made.meta))
    answers = [Answer("Food\nDate", made.references, stored)]
    grades = [LongBench.grade("trec_e", answer) for answer in answers]
    assert LongBench.aggregate("trec_e", answers, grades) == {"score": 100.0, "0-4k": None, "4-8k": 100.0, "8k+": None}


def test_samsums_answer_ends_at_a_newline_but_not_at_its_first_token(tmp_path: Path) -> None:
    write(tmp_path, "samsum", [asked("samsum", answers=["Amy will come."])])
    made = task(tmp_path)
    one = sample(made, "samsum")
    said = ToyGenerate(lambda index: padded("\n\nAmy will come.\nBob", 64))
    decode = DecodeSettings.make({"gen_length": 64, "threshold": 0.9})
    columns = answer_columns(made, one, said(None, made.codec.encode("say egg 0"), method="baseline", decode=decode))
    assert (columns["text"], columns["stopped_by"]) == ("\n\nAmy will come.", "stop_string")
    assert columns["score"] == pytest.approx(1, abs=1e-8)


# the middle cut


@pytest.mark.parametrize("codec", [ToyCodec(), BpeCodec(TEMPLATE), word_codec(TEMPLATE)], ids=["toy", "bpe", "words"])
@pytest.mark.parametrize("name", ["hotpotqa", "lcc", "passage_count", "multifieldqa_zh"])
def test_a_long_prompt_is_cut_in_the_middle(name: str, codec: Any, tmp_path: Path) -> None:
    zh = SETS[name].language == "zh"
    story = "".join(f"第{i}天下雨，河水涨了。" for i in range(400)) if zh else row()["context"]
    write(tmp_path, name, [asked(name, context=story)])
    made = task(tmp_path, codec)
    whole = sample(made, name)
    total = len(whole.prompt_ids)
    for ctx in (total // 2, total - 1, total + 31):
        cut = sample(made, name, ctx=ctx)
        assert ctx - 4 <= cut.actual_ctx <= ctx
        assert (cut.meta["truncated"], cut.meta["original_tokens"]) == (True, total)
        text = codec.decode(cut.prompt_ids)
        before, after = SETS[name].around("q {0}" if SETS[name].asks else "")
        inner = text.partition(before)[2].rpartition(after)[0]
        half = len(inner) // 3
        assert inner and story.startswith(inner[:half]) and story.endswith(inner[-half:])
        if not SETS[name].template:
            assert text.startswith(before) and text.endswith(after)
    assert sample(made, name, ctx=total + 32).prompt_ids == whole.prompt_ids


@given(
    context=st.text(st.characters(codec="utf-8"), min_size=1, max_size=400),
    question=st.text(st.characters(codec="utf-8"), max_size=30),
    limit=st.integers(1, 300),
    template=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_text_fits_or_tells_the_least_size(context: str, question: str, limit: int, template: bool) -> None:
    codec, before, after = BpeCodec(TEMPLATE), "Read this.\n", f"\nQuestion: {question}\nAnswer:"

    def make(size: int) -> list[int]:
        return fitted(codec, before, context, after, limit=size, template=template).ids

    whole = codec.wrap(before + context + after, template=template)
    try:
        ids = make(limit)
    except TooShort as error:
        assert limit < error.minimum <= len(whole)
        ids = make(error.minimum)
        limit = error.minimum
    assert len(ids) <= limit
    text = codec.decode(ids)
    assert before in text and text.removesuffix(TEMPLATE[1] if template else "").endswith(after)
    if len(whole) <= limit:
        assert ids == whole
    if "\ufffd" not in context + question:
        assert "\ufffd" not in text


def test_a_question_is_never_cut(tmp_path: Path) -> None:
    question = "why " * 300
    write(tmp_path, "hotpotqa", [row(input=question)])
    made = task(tmp_path, BpeCodec(TEMPLATE))
    with pytest.raises(UserError, match=r"hotpotqa, item 0: a context of 500 tokens .* the minimum is (\d+)") as error:
        sample(made, "hotpotqa", ctx=500)
    least = int(str(error.value).rsplit(" ", 1)[1])
    assert question in BpeCodec().decode(sample(made, "hotpotqa", ctx=least).prompt_ids)
    with pytest.raises(UserError, match=f"the minimum is {least}"):
        sample(made, "hotpotqa", ctx=least - 1)
    # without a long context nothing has to be cut to hold the question
    write(tmp_path, "musique", [row(input=question, context="Rain.")])
    with pytest.raises(UserError) as error:
        sample(made, "musique", ctx=500)
    short = int(str(error.value).rsplit(" ", 1)[1])
    assert short < least and not sample(made, "musique", ctx=short).meta["truncated"]


# data files


def test_files_as_they_may_come(tmp_path: Path) -> None:
    rows = [row(0, context="a\u2028b\r\nc\x85 {d} é"), row(1, answers=["", "naïve"])]
    path = write(tmp_path, "hotpotqa", rows, newline="\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n \n")
    made = task(tmp_path)
    assert made.size("hotpotqa") == 2
    assert rows[0]["context"] in ToyCodec().decode(sample(made, "hotpotqa").prompt_ids)
    assert sample(made, "hotpotqa", 1).references == ("", "naïve")
    with pytest.raises(UserError, match="has 2 items: the nearest valid index is 1"):
        sample(made, "hotpotqa", 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{k: v for k, v in row().items() if k != "context"}], "line 1 lacks the column 'context': it has input, answ"),
        (
            [row(), {("question" if k == "input" else k): v for k, v in row(1).items()}],
            "line 2 lacks the column 'input'",
        ),
        ([row(), row(1), row()], "lines 1 and 3 have the same _id 'id-0'"),
        ([row(answers=[])], "'answers' is empty"),
        ([row(answers="Ada")], "'answers' must be a list of texts, got 'Ada'"),
        ([row(answers=[3])], "'answers' must be a list of texts"),
        ([row(context=" \n")], "'context' is empty"),
        ([row(input="")], "'input' is empty, but the prompt needs it"),
        ([row(input=None)], "'input' must be a text, got None"),
        ([row(_id="")], "'_id' is empty"),
        ([row(length="long")], "'length' must be a whole number from 0 on, got 'long'"),
        ([row(length=-1)], "'length' must be a whole number"),
        ([row(all_classes="Food")], "'all_classes' must be a list of texts"),
        ([], "holds no item"),
    ],
)
def test_bad_rows_are_named(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", rows)
    with pytest.raises(UserError) as error:
        task(tmp_path).size("hotpotqa")
    assert message in str(error.value) and "hotpotqa.jsonl" in str(error.value)


def test_what_only_some_sets_need(tmp_path: Path) -> None:
    write(tmp_path, "gov_report", [row(input="")])
    write(tmp_path, "lsht", [row(all_classes=[])])
    made = task(tmp_path)
    assert made.size("gov_report") == 1
    with pytest.raises(UserError, match=r"lsht.jsonl, line 1: 'all_classes' is empty"):
        made.size("lsht")


@pytest.mark.parametrize(
    ("text", "message"), [(b"{", "line 1 is not JSON"), (b"[]", "no JSON object"), (b"\xff", "UTF-8")]
)
def test_no_json_lines(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "hotpotqa.jsonl").write_bytes(text)
    with pytest.raises(UserError, match=message):
        task(tmp_path).size("hotpotqa")


def test_the_folder(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa_e", [row()])
    made = task(tmp_path)
    with pytest.raises(UserError, match=r"has no hotpotqa.jsonl \(nearest there: hotpotqa_e.jsonl\)"):
        made.size("hotpotqa")
    assert made.fetch("hotpotqa_e") == [f"longbench hotpotqa_e: 1 items ({tmp_path})"]
    with pytest.raises(UserError, match="is no folder"):
        task(tmp_path / "gone")


def test_a_changed_file_changes_the_key_of_its_subset_alone(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", [row()])
    write(tmp_path, "musique", [row()])
    first = [task(tmp_path).data(name) for name in ("hotpotqa", "musique")]
    write(tmp_path, "hotpotqa", [row(answers=["Eve"])])
    second = [task(tmp_path).data(name) for name in ("hotpotqa", "musique")]
    assert first[0] != second[0] and first[1] == second[1] and str(first[0]).startswith("file:hotpotqa.jsonl:")
    assert LongBench(ToyCodec()).data("hotpotqa") is None


# the hub


def test_the_hubs_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "lcc_e", [row(input="", context="x = 1")])
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(tmp_path / "lcc_e.jsonl", "data/lcc_e.jsonl")
    monkeypatch.setattr(longbench_data, "_archive", lambda: str(tmp_path / "data.zip"))
    made = LongBench(ToyCodec())
    assert made.fetch("lcc_e") == ["longbench lcc_e: 1 items (hub THUDM/LongBench)"]
    with pytest.raises(UserError, match="could not be had from the hub"):
        made.size("lcc")


def test_offline_all_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def refuse(*args: Any, **given: Any) -> str:
        calls.append(given)
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(UserError) as error:
        LongBench(ToyCodec()).size("hotpotqa")
    for part in (
        "longbench hotpotqa",
        "no network here",
        "--data DIR",
        "--task-set data=DIR",
        "mini_qa",
        "THUDM/LongBench",
    ):
        assert part in str(error.value)
    assert calls[0]["local_files_only"] is True, "a cached copy needs no network"


# the command line


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    from dllm_bench import cli

    monkeypatch.setattr("sys.argv", ["dllm-bench", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_run_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dllm_bench.running.store import Store

    write(tmp_path, "hotpotqa_e", [row(), row(1)])
    write(tmp_path, "mini_qa", mini_rows("mini_qa"))
    base = ["run", "--method", "baseline", "--task", "longbench", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
    assert run(monkeypatch, *base, "--subset", "hotpotqa_e,mini_qa", "--ctx", "384", "-n", "1") == 0
    rows = {one["subset"]: one for one in Store(tmp_path / "o").read()}
    cut = rows["hotpotqa_e"]
    assert cut["truncated"] and cut["original_tokens"] > 384 >= cut["actual_ctx"] >= 376
    assert json.loads(cut["sample_meta"])["length"] == 3000 and cut["task_data"].startswith("file:hotpotqa_e.jsonl:")
    assert rows["mini_qa"]["nominal_ctx"] == 384 and rows["mini_qa"]["needle_starts"]
    assert run(monkeypatch, *base, "--subset", "mini_qa", "-n", "1") == 0
    assert [one["nominal_ctx"] for one in Store(tmp_path / "o").read() if one["subset"] == "mini_qa"].count(None) == 1
    capsys.readouterr()


def test_a_later_question_that_does_not_fit_is_told_of_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "hotpotqa", [row(), row(1, input="Who? " * 100), row(2)])
    base = ["run", "--method", "baseline", "--task", "longbench", "--data", str(tmp_path), "--out", str(tmp_path / "o")]
    assert run(monkeypatch, *base, "--ctx", "512,256") == 2
    told = capsys.readouterr().err.splitlines()
    assert "item 1: a context of 512 tokens does not hold" in told[-1] and not (tmp_path / "o").exists()
    assert run(monkeypatch, *base, "--ctx", "256", "-n", "1") == 0, "only what is asked for has to fit"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "ruler_niah", "--ctx", "1k", "--data", "."], "unknown option of task 'ruler_niah' 'data'"),
        (["--task", "longbench", "--data", "gone"], "'gone' is no folder"),
        (["--task", "longbench", "--data", ".", "--task-set", "data=."], "option 'data' is set twice"),
        (["--task", "longbench", "--subset", "hotpot_qa"], "did you mean 'hotpotqa'"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "o"
    assert run(monkeypatch, "run", "--method", "baseline", "--out", str(out), *arguments) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1 and not out.exists()
