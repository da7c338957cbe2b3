"""RULER's qa: official files, exact length, whole documents of the question, and clear errors about data."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qa_files import ODD, hotpot, squad, write_folder
from ruler_codecs import TEMPLATE, BpeCodec, leading_space_codec, word_codec

from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.options import make_options
from dllm_bench.running.task import TASKS, Answer
from dllm_bench.tasks import qa_data
from dllm_bench.tasks.fitting import FILL
from dllm_bench.tasks.qa_data import load_qa
from dllm_bench.tasks.ruler_cwe import RulerCwe
from dllm_bench.tasks.ruler_fwe import RulerFwe
from dllm_bench.tasks.ruler_qa import QaOptions, RulerQa
from dllm_bench.tasks.ruler_vt import RulerVt

CODECS = {"bpe": BpeCodec, "word": word_codec, "leading_space": leading_space_codec}
ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
HEAD = f"{ORDER}\n\nThe following are given documents.\n\n"
SCORES = json.loads((Path(__file__).parent / "golden" / "scoring" / "cases.json").read_text(encoding="utf-8"))["ruler"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_folder(tmp_path_factory.mktemp("qa")))


def official(subset: str) -> tuple[dict[str, tuple[list[str], set[str]]], set[str]]:
    """Question ids with answers and the texts of the documents that must be there, and the pool; from the raw data."""
    asked: dict[str, tuple[list[str], set[str]]] = {}
    pool = set()
    if subset == "squad":
        for article in squad()["data"]:
            for paragraph in article["paragraphs"]:
                pool.add(paragraph["context"])
                for one in paragraph["qas"]:
                    answers = [answer["text"] for answer in one["answers"]]
                    asked.setdefault(one["id"], (answers, {paragraph["context"]}))
    else:
        for one in hotpot():
            documents = {f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]}
            pool |= documents
            asked[one["_id"]] = ([one["answer"]], documents)
    return asked, pool


def check(task: RulerQa, sample) -> str:
    """Everything that holds for each sample; returns its text."""
    codec, ctx = task.codec, sample.nominal_ctx
    assert FILL * ctx <= sample.actual_ctx <= ctx, sample.meta
    text = codec.decode(sample.prompt_ids)
    bare = text.removeprefix(TEMPLATE[0])
    assert bare.startswith(HEAD)
    context, question = bare[len(HEAD) :].split(f"\n\n{ORDER}\n\nQuestion: ")
    assert question.endswith("Answer:")
    count = sample.meta["documents"]
    titles = re.findall(r"(?:^|\n\n)Document (\d+):\n", context)
    assert titles == [str(k) for k in range(1, count + 1)]
    found = re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:]
    asked, pool = official(sample.subset)
    answers, needed = asked[sample.meta["question_id"]]
    assert needed <= set(found) and sample.references[0] == answers[0]
    broken = [document for document in found if document not in pool]
    assert len(broken) == sample.meta["cut_unit"]
    assert all(any(whole.startswith(part) for whole in pool) for part in broken)
    # the answer stands in the documents that the spans name
    marked = [codec.decode(sample.prompt_ids[start:end]).strip() for start, end in sample.spans["needle"]]
    assert any(sample.references[0] in one for one in marked)
    assert all(any(one == document.strip() for document in needed) for one in marked)
    [(start, end)] = sample.spans["question"]
    assert end == len(sample.prompt_ids) and codec.decode(sample.prompt_ids[start:end]).strip().startswith(ORDER)
    assert sample.spans["affix"] == ((0, start),)
    assert task.score(sample, f"It is {sample.references[-1].upper()}") == 1.0 and task.score(sample, "no") == 0.0
    return text


@pytest.mark.parametrize("template", [("", ""), TEMPLATE], ids=["bare", "template"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("subset", ["squad", "hotpot"])
def test_samples_fill_their_length(folder, subset, codec, template):
    task = RulerQa(CODECS[codec](template), QaOptions(folder))
    for ctx in (900, 1024, 1500, 4096, 9000):
        for index in range(3):
            check(task, task.sample(subset, index, ctx=ctx, gen_length=32, seed=1))


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=25, deadline=None)
@given(
    ctx=st.integers(280, 3000),
    gen_length=st.integers(1, 64),
    seed=st.integers(0, 1 << 40),
    index=st.integers(0, 8),
    subset=st.sampled_from(["squad", "hotpot"]),
)
def test_any_length_seed_and_budget(folder, codec, ctx, gen_length, seed, index, subset):
    task = RulerQa(CODECS[codec](TEMPLATE), QaOptions(folder))
    try:
        sample = task.sample(subset, index, ctx=ctx, gen_length=gen_length, seed=seed)
    except UserError as error:
        assert re.search(r"the minimum is \d+$|so no sample \d+ \(nearest valid: \d+\)$", str(error))
        return
    check(task, sample)


@pytest.mark.parametrize("subset", ["squad", "hotpot"])
def test_documents_are_repeated_where_the_data_are_short(folder, subset):
    task = RulerQa(word_codec(), QaOptions(folder))
    sample = task.sample(subset, 1, ctx=32768, gen_length=32, seed=0)
    check(task, sample)
    assert sample.meta["documents"] > 2 * len(load_qa(subset, folder).documents)


def test_documents_of_the_article_come_first(folder):
    task = RulerQa(word_codec(), QaOptions(folder))
    sample = task.sample("squad", 0, ctx=760, gen_length=32, seed=0)
    text = check(task, sample)
    found = re.split(r"(?:^|\n\n)Document \d+:\n", text[len(HEAD) :].split(f"\n\n{ORDER}")[0])[1:]
    article = {paragraph["context"] for paragraph in squad()["data"][0]["paragraphs"]}
    whole = [document for document in found if document in article]
    assert len(whole) >= 4 and len(found) - len(whole) == sample.meta["cut_unit"]


def test_places_are_shuffled(folder):
    task = RulerQa(word_codec(), QaOptions(folder))
    depths = [
        task.sample("squad", 0, ctx=4096, gen_length=32, seed=seed).meta["needle_depths"][0] for seed in range(60)
    ]
    assert min(depths) < 15 and max(depths) > 85 and len(set(depths)) > 40


def test_text_of_any_kind_stays_as_it_is(folder):
    task = RulerQa(BpeCodec(TEMPLATE), QaOptions(folder))
    sample = task.sample("squad", 0, ctx=2048, gen_length=32, seed=0)
    text = check(task, sample)
    assert ODD.strip(" ") in text and "Question:   Who was the keeper of house 0-0? {context}" in text
    user, prefix = text.removeprefix(TEMPLATE[0]).split(TEMPLATE[1])
    assert list(sample.prompt_ids) == task.codec.wrap(user, prefix)


def test_questions_come_in_order_and_those_without_answers_are_left_out(folder):
    data = load_qa("squad", folder)
    ids = [question.id for question in data.questions]
    assert ids == [one for a in range(6) for p in range(5) for one in [f"q{a}.{p}"] * 2]
    assert data.left_out == 31
    assert data.documents == tuple(sorted(official("squad")[1])) and "" in data.documents
    task = RulerQa(word_codec(), QaOptions(folder))
    made = [task.sample("squad", index, ctx=2048, gen_length=32, seed=0) for index in (0, 1, 2)]
    assert [sample.meta["question_id"] for sample in made] == ["q0.0", "q0.0", "q0.1"]
    assert [len(sample.references) for sample in made] == [2, 1, 2]
    assert task.size("squad") == 60 and task.size("hotpot") == 12


def test_questions_whose_documents_do_not_fit_are_left_out(folder):
    task = RulerQa(word_codec(), QaOptions(folder))
    small = [task.sample("squad", index, ctx=200, gen_length=32, seed=0) for index in range(6)]
    for sample in small:
        check(task, sample)
    ids = [sample.meta["question_id"] for sample in small]
    assert ids == sorted(ids) and ids != ["q0.0", "q0.0", "q0.1", "q0.1", "q0.2", "q0.2"]
    with pytest.raises(UserError, match=r"has \d+ questions whose documents fit into 200 tokens, so no sample 59"):
        task.sample("squad", 59, ctx=200, gen_length=32, seed=0)


@pytest.mark.parametrize("subset", ["squad", "hotpot"])
def test_too_small_a_length_names_a_minimum_that_works(folder, subset):
    task = RulerQa(BpeCodec(), QaOptions(folder))
    with pytest.raises(UserError, match=rf"too small for ruler_qa {subset} with a .* 32: the minimum is \d+") as error:
        task.sample(subset, 0, ctx=60, gen_length=32, seed=0)
    least = int(str(error.value).split()[-1])
    sample = task.sample(subset, 0, ctx=least + 4, gen_length=32, seed=0)
    check(task, sample)


def test_samples_do_not_depend_on_order_or_global_state(folder):
    codec = BpeCodec()
    asked = [(subset, index) for subset in ("squad", "hotpot") for index in (0, 1, 7)]

    def made(order, state):
        random.seed(state)
        task = RulerQa(codec, QaOptions(folder))
        return {one: task.sample(*one, ctx=1024, gen_length=32, seed=5) for one in order}

    forward = made(asked, 1)
    before = random.getstate()
    assert made(asked[::-1], 2) == forward
    random.seed(1)
    assert random.getstate() == before
    task = RulerQa(codec, QaOptions(folder))
    assert task.sample("hotpot", 7, ctx=1024, gen_length=32, seed=5) == forward["hotpot", 7]
    assert task.sample("hotpot", 7, ctx=1024, gen_length=32, seed=6).prompt_ids != forward["hotpot", 7].prompt_ids


# -- data -----------------------------------------------------------------------------------------------------------


def test_contract(folder):
    assert TASKS.get("ruler_qa") is RulerQa
    task = RulerQa(BpeCodec(), QaOptions(folder))
    assert task.budget("squad") == task.budget("hotpot") == 32
    [line] = task.fetch("hotpot")
    assert re.fullmatch(r"hotpot: 12 questions, 120 documents from file:hotpot_dev_.*json:[0-9a-f]{8}", line)
    with pytest.raises(ChoiceError, match="did you mean 'hotpot'"):
        task.sample("hotpotqa", 0, ctx=4096, gen_length=32, seed=0)
    with pytest.raises(UserError, match="ruler_qa needs a context length"):
        task.sample("squad", 0, ctx=None, gen_length=32, seed=0)
    assert RulerQa(BpeCodec()).data("squad") is None


def test_a_file_and_a_folder_give_the_same_samples(folder, tmp_path):
    file = tmp_path / "hotpotqa.json"  # as NVIDIA's download script names it
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(hotpot(), indent=1).replace("\n", "\r\n").encode())
    made = [
        RulerQa(BpeCodec(), QaOptions(path)).sample("hotpot", 3, ctx=1200, gen_length=32, seed=0)
        for path in (folder, str(file), str(tmp_path))
    ]
    assert len({sample.prompt_ids for sample in made}) == 1
    assert made[0].meta["data"].split(":")[2] == made[1].meta["data"].split(":")[2]


def test_the_content_of_the_files_belongs_to_the_key(tmp_path):
    found = []
    for count in (3, 4):
        (tmp_path / "squad.json").write_text(json.dumps(squad(count)), encoding="utf-8")
        found += [
            RulerQa(BpeCodec(), QaOptions(str(path))).data("squad") for path in (tmp_path, tmp_path / "squad.json")
        ]
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
    assert found[0].startswith("squad.json:")


def drop(content, *path):
    """The content without the field at the path."""
    *place, last = path
    at = content
    for step in place:
        at = at[step]
    del at[last]
    return content


PLACE = ("data", 0, "paragraphs", 1)


@pytest.mark.parametrize(
    ("subset", "content", "message"),
    [
        ("squad", drop(squad(), *PLACE, "context"), r"data\[0\].paragraphs\[1\] has no 'context'"),
        ("squad", drop(squad(), *PLACE, "qas", 0, "answers"), r"data\[0\].paragraphs\[1\].qas\[0\] has no 'answers'"),
        ("squad", drop(squad(), *PLACE, "qas", 1, "question"), r"qas\[1\] has no 'question'"),
        ("squad", drop(squad(), *PLACE, "qas", 1, "id"), r"qas\[1\] has no 'id'"),
        ("squad", drop(squad(), *PLACE, "qas", 0, "answers", 1, "text"), r"answers\[1\] has no 'text'"),
        ("squad", drop(squad(), "data", 1, "paragraphs"), r"data\[1\] has no 'paragraphs'"),
        ("squad", {"data": "text"}, "'data' of the file is not a list"),
        ("squad", {"data": [{"paragraphs": [{"context": 3}]}]}, "'context' of .* is not a text"),
        ("squad", hotpot(), "the file has no 'data'; it is HotpotQA's: --subset hotpot"),
        ("squad", {"data": []}, "hold no question with an answer"),
        ("hotpot", drop(hotpot(), 2, "answer"), "question 2 has no 'answer'.*with --task-set data=PATH"),
        ("hotpot", drop(hotpot(), 0, "context"), "question 0 has no 'context'"),
        ("hotpot", drop(hotpot(), 0, "supporting_facts"), "question 0 has no 'supporting_facts'"),
        ("hotpot", drop(hotpot(), 0, "context", 3, 1), r"context\[3\] of question 0 is not a pair"),
        ("hotpot", squad(), "not a list of questions; it is SQuAD 2.0's: --subset squad"),
    ],
)
def test_missing_columns_name_their_place(tmp_path, subset, content, message):
    file = tmp_path / "data.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        RulerQa(BpeCodec(), QaOptions(str(file))).sample(subset, 0, ctx=1024, gen_length=32, seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff{}", "not UTF-8 text: byte 0"), (b'{"data": [', "is not JSON: line 1: ")]
)
def test_unreadable_files(tmp_path, content, message):
    (tmp_path / "dev-v2.0.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_qa("squad", str(tmp_path))
    with pytest.raises(
        UserError, match=r"has no hotpot_dev_distractor_v1.json or hotpotqa.json; let the hub's .*data=PATH"
    ):
        load_qa("hotpot", str(tmp_path))


def test_a_missing_path_names_the_nearest(tmp_path):
    (tmp_path / "dev-v2.0.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"does not exist: did you mean '.*dev-v2.0.json'"):
        make_options(QaOptions, {"data": str(tmp_path / "dev-v2.json")}, owner="ruler_qa")
    with pytest.raises(UserError, match=r"give dev-v2.0.json or hotpot_dev_distractor_v1.json"):
        make_options(QaOptions, {"data": str(tmp_path / "no" / "file")}, owner="ruler_qa")


def as_rows(subset):
    """The hub's rows."""
    if subset == "squad":
        return [
            {
                "id": one["id"],
                "title": article["title"],
                "context": paragraph["context"],
                "question": one["question"],
                "answers": {"text": [answer["text"] for answer in one["answers"]], "answer_start": []},
            }
            for article in squad()["data"]
            for paragraph in article["paragraphs"]
            for one in paragraph["qas"]
        ]
    return [
        {
            "id": one["_id"],
            "question": one["question"],
            "answer": one["answer"],
            "supporting_facts": {"title": [title for title, _ in one["supporting_facts"]], "sent_id": []},
            "context": {
                "title": [title for title, _ in one["context"]],
                "sentences": [sentences for _, sentences in one["context"]],
            },
        }
        for one in hotpot()
    ]


@pytest.mark.parametrize(
    ("subset", "name"), [("squad", ("rajpurkar/squad_v2",)), ("hotpot", ("hotpotqa/hotpot_qa", "distractor"))]
)
def test_the_hub_gives_what_the_official_file_gives(monkeypatch, folder, subset, name):
    asked = []

    def load_dataset(*given, split):
        asked.append((given, split))
        return as_rows(subset)

    monkeypatch.setattr(qa_data, "hub_rows", load_dataset)
    load_qa.cache_clear()
    hub, file = load_qa(subset, None), load_qa(subset, folder)
    load_qa.cache_clear()
    assert asked == [(name, "validation")]
    assert hub.name.startswith(f"hub:{name[0]}:")
    # the paragraph without a question is in the file alone
    known = set(hub.documents)
    assert {document for document in file.documents if document} | known == {*known, *known - {""}}
    for one, other in zip(hub.questions, file.questions, strict=True):
        assert (one.id, one.text, one.answers) == (other.id, other.text, other.answers)
        for a, b in ((one.needed, other.needed), (one.support, other.support)):
            assert [hub.documents[k] for k in a] == [file.documents[k] for k in b]
        near = {file.documents[k] for k in other.near}
        assert {hub.documents[k] for k in one.near} == near - {""}


def test_a_hub_that_cannot_be_reached_or_has_changed(monkeypatch):
    def load_dataset(*given, split):
        if given[0].startswith("hotpotqa"):
            return [{"id": "a", "question": "b"}]
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(qa_data, "hub_rows", load_dataset)
    load_qa.cache_clear()
    ways = r"let the hub's .* be fetched once with the network on, or give .*json or its folder with --task-set"
    with pytest.raises(UserError, match=r"rajpurkar/squad_v2 could not be loaded \(no network\); " + ways):
        RulerQa(BpeCodec()).fetch("squad")
    with pytest.raises(UserError, match=r"hotpot_qa has no column 'context'; " + ways):
        RulerQa(BpeCodec()).size("hotpot")
    load_qa.cache_clear()


def test_missing_data_end_a_run_before_anything_is_written(tmp_path, capsys):
    from dllm_bench import cli

    out = tmp_path / "runs"
    arguments = ["run", "--method", "baseline", "--task", "ruler_qa:hotpot", "--ctx", "1k", "--out", str(out)]
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(squad()), encoding="utf-8")
    for path, message in ((tmp_path / "gone.json", "does not exist"), (tmp_path, "has no hotpot_dev_distractor")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(sys, "argv", ["dllm-bench", *arguments, "--task-set", f"data={path}"])
            cli.main()
        assert stop.value.code == 2 and message in capsys.readouterr().err
        assert not out.exists()


# -- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SCORES["cases"], ids=lambda case: repr(case["prediction"])[:30])
def test_nvidia_scores_are_reproduced(case):
    answer = Answer(case["prediction"], tuple(case["references"]))
    for cls in (RulerVt, RulerCwe, RulerFwe):
        grade = cls.grade(cls.default_subset, answer)["score"]
        assert round(100 * grade, 2) == case["nvidia"]["string_match_all_pct"]
    for subset in RulerQa.subsets:
        assert round(100 * RulerQa.grade(subset, answer)["score"], 2) == case["nvidia"]["string_match_part_pct"]


@pytest.mark.parametrize(("cls", "key"), [(RulerVt, "nvidia_all_pct"), (RulerQa, "nvidia_part_pct")])
def test_nvidia_aggregates_are_reproduced(cls, key):
    answers = [Answer(case["prediction"], tuple(case["references"])) for case in SCORES["cases"]]
    grades = [cls.grade(cls.default_subset, answer) for answer in answers]
    assert cls.aggregate(cls.default_subset, answers, grades) == {"score": SCORES["aggregate"][key]}
