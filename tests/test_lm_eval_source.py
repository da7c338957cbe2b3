"""lm-eval's tasks under `dllm-bench run`: prompts, likelihoods, rows, scoring alone, refusals."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval_files import COLOURS, GSM_TEST, GSM_TRAIN, write_lines

from dllm_bench import UserError, cli, load_model, loglikelihood
from dllm_bench.lm_eval_requests import answer_pair, budget_of, lm_eval_folder, stops_of
from dllm_bench.running.store import Store
from dllm_bench.running.task import TASKS, Answer
from dllm_bench.tasks.lm_eval_names import find
from dllm_bench.tasks.lm_eval_source import LmEval, LmEvalOptions

Call = Callable[..., int]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the command line; returns its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dllm-bench", *arguments])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


def rows(folder: Path) -> list[dict[str, Any]]:
    return sorted(Store(folder).read(), key=lambda row: (row["subset"], row["index"]))


def source(tasks: Path, model: str | Path = "tiny", template: str = "auto", **options: Any) -> LmEval:
    codec = load_model(str(model), chat_template=template).codec
    return LmEval(codec, LmEvalOptions(include_path=str(tasks), **options))


def test_run_answers_and_scores(lm_eval_tasks: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "runs"
    arguments = ["run", "--task", "lm_eval:needles", "--task-set", f"include_path={lm_eval_tasks}", "--out", str(out)]
    assert call(*arguments, "--method", "fast_dllm", "--set", "mode=prefix") == 0
    found = rows(out)
    assert [row["text"].strip(" .") for row in found] == ["4718253", "7352946", "1928374"]
    assert [row["score"] for row in found] == [0.0, 0.0, 0.0], "strict-match comes first: no #### in the answers"
    assert [json.loads(row["scores"])["exact_match,flexible-extract"] for row in found] == [1.0, 1.0, 0.0]
    assert {row["subset"] for row in found} == {"needles"} and {row["nominal_ctx"] for row in found} == {None}
    assert found[0]["references"] == ["#### 4718253"] and found[0]["task_data"].startswith("lm-eval 0.4")
    assert call(*arguments, "--method", "fast_dllm", "--set", "mode=prefix") == 0
    assert len(Store(out)) == 3, "a rerun has nothing to do"


def test_a_row_is_scored_again_without_model_and_data(lm_eval_tasks: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "runs"
    call(
        "run", "--task", "lm_eval:needles,cloze", "--task-set", f"include_path={lm_eval_tasks}",
        "--task-set", "mc_num=4", "--out", str(out), "--method", "baseline",
    )  # fmt: skip
    found = rows(out)
    moved = tmp_path / "definitions"
    moved.mkdir()
    for name in ("needles", "cloze"):
        text = (lm_eval_tasks / f"{name}.yaml").read_text().replace(str(lm_eval_tasks / "data"), "/nowhere")
        (moved / f"{name}.yaml").write_text(text)
    assert {row["subset"] for row in found} == {"needles", "cloze"}
    for row in found:
        facts = {**json.loads(row["sample_meta"]), "include_path": str(moved)}
        task = TASKS.get(row["task"])
        assert task.grade(row["subset"], Answer(row["text"], tuple(row["references"]), facts)) == json.loads(
            row["scores"]
        )


def test_prompts_are_those_of_lm_eval(lm_eval_tasks: Path) -> None:
    from lm_eval.tasks import TaskManager

    plain = source(lm_eval_tasks, template="plain")
    theirs = TaskManager(include_defaults=False, include_path=str(lm_eval_tasks)).load("gsm_local")["tasks"][
        "gsm_local"
    ]
    theirs.set_fewshot_seed(1234)
    theirs.build_all_requests()
    state = random.getstate()
    # the last one first: a sample does not depend on the order in which samples are asked for
    mine = {i: plain.sample("gsm_local", i, ctx=None, gen_length=32, seed=0) for i in (2, 0, 1)}
    assert random.getstate() == state, "the global stream is as it was"
    assert plain.size("gsm_local") == 3 and plain.budget("gsm_local") == 256
    for instance in theirs.instances:
        sample = mine[instance.doc_id]
        assert list(sample.prompt_ids) == plain.codec.encode("<|startoftext|>" + instance.args[0])
        assert sample.until == tuple(instance.args[1]["until"]) == ("Question:", "</s>", "<|im_end|>")
    assert mine[0].prompt_ids != mine[2].prompt_ids, "equal documents, and each its own examples"
    again = source(lm_eval_tasks, template="plain").sample("gsm_local", 1, ctx=None, gen_length=32, seed=9)
    assert again.prompt_ids == mine[1].prompt_ids
    assert mine[1].meta["doc"] == GSM_TEST[1] and mine[1].references == (GSM_TEST[1]["answer"],)


def test_chat_templates_hold_examples_as_turns(lm_eval_tasks: Path) -> None:
    task = source(lm_eval_tasks, num_fewshot=1, system_instruction="Be brief.")
    assert isinstance(task, LmEval)
    ids = task.sample("gsm_local", 0, ctx=None, gen_length=32, seed=0).prompt_ids
    text = task._codec.tokenizer.decode(list(ids), skip_special_tokens=False)
    header = "<|start_header_id|>{}<|end_header_id|>"
    assert text.count("<|startoftext|>") == 1 and text.startswith("<|startoftext|>" + header.format("system"))
    assert [text.count(header.format(role)) for role in ("system", "user", "assistant")] == [1, 2, 2]
    assert text.endswith(header.format("assistant") + "\n\n")
    one = source(lm_eval_tasks, num_fewshot=1, fewshot_as_multiturn=False)
    text = one._codec.tokenizer.decode(
        list(one.sample("gsm_local", 0, ctx=None, gen_length=32, seed=0).prompt_ids), skip_special_tokens=False
    )
    assert [text.count(header.format(role)) for role in ("user", "assistant")] == [1, 1]
    prefixed = source(lm_eval_tasks).sample("needles", 0, ctx=None, gen_length=32, seed=0).prompt_ids
    assert list(prefixed)[-3:] == task.codec.encode(" provided text is")[-3:]


def test_choices_are_judged_by_likelihood(lm_eval_tasks: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "runs"
    code = call(
        "run", "--task", "lm_eval:colours,cloze", "--task-set", f"include_path={lm_eval_tasks}", "--task-set",
        "mc_num=6", "--task-set", "mc_batch=4", "--out", str(out), "--method", "baseline", "--chat-template", "plain",
    )  # fmt: skip
    assert code == 0
    model = load_model("tiny", chat_template="plain")
    for row in rows(out):
        colour = COLOURS[row["index"]]
        answers = colour["choices"] if row["subset"] == "colours" else [colour["choices"][colour["gold"]]]
        joint = " " if row["subset"] == "colours" else ""  # lm-eval joins a cloze's target as it is
        pairs = [answer_pair(model.codec, colour["question"], joint + answer) for answer in answers]
        expected = [loglikelihood(model, *pair, mc_num=6, batch=4) for pair in pairs]
        assert row["choice_loglikelihoods"] == pytest.approx([one.value for one in expected])
        greedy_passes = sum(len(answer) for _, answer in pairs) if row["subset"] == "cloze" else 0
        assert row["nfe"] == sum(one.counters.nfe for one in expected) + greedy_passes
        assert row["nfe"] == row["dense_passes"] and row["decode_seconds"] > 0
        assert row["useful_tokens"] is None and row["canvas_tokens"] is None and row["output_ids"] is None
        if row["subset"] == "colours":
            best = max(range(2), key=lambda i, values=row["choice_loglikelihoods"]: values[i])
            assert json.loads(row["scores"])["acc,none"] == row["score"] == float(best == colour["gold"])
            assert row["references"] == [colour["choices"][colour["gold"]]]
        else:
            assert row["score"] == 0.0, "no greedy answer of this model says a colour"


def test_greedy_answers_are_seen(lm_eval_tasks: Path, byte_model: Path) -> None:
    from dllm_bench import generate
    from dllm_bench.caching.spec import parse_method
    from dllm_bench.running.choices import Judge, greedy_settings

    model = load_model(str(byte_model), dtype="float64")
    judge, spec = Judge(model, loglikelihood, generate), parse_method("baseline")
    context = model.codec.bare("The sky is")
    truth = generate(model, context, spec, decode=greedy_settings(5, "llada")).output_ids
    assert judge.greedy(context, truth, spec)[0] is True
    assert judge.greedy(context, [*truth[:4], (truth[4] + 1) % 250], spec)[0] is False
    assert judge.greedy(context, [], spec) == (True, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lm_eval:needels"], "did you mean 'needles'"),
        (["lm_eval:family"], "is a group of lm-eval tasks"),
        (["lm_eval"], "name an lm-eval task"),
        (["lm_eval:all"], "name an lm-eval task"),
        (["lm_eval:votes"], "asks each question 4 times"),
        (["lm_eval:code"], "--confirm_run_unsafe_code"),
        (["lm_eval:whole"], "likelihood of whole texts"),
        (["lm_eval:corpus"], "no score per answer, only chrf"),
        (["lm_eval:needles", "--ctx", "2k"], "leave --ctx out"),
        (["lm_eval:needles", "--task-set", "num_fewshot=2"], "fixes num_fewshot at 0"),
        (["lm_eval:needles", "--task-set", "metadata=[1]"], "must be a JSON object"),
        (["lm_eval:needles", "--task-set", "data=/nowhere"], "/nowhere/test.jsonl, which does not exist"),
        (["lm_eval:needles", "--task-set", "mcnum=3"], "did you mean 'mc_num'"),
        (["lm_eval:colours", "--method", "fast_dllm"], "nearest valid: --method baseline"),
        (["lm_eval:colours", "--gen-length", "32"], "leave --gen-length out"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str], message: str, lm_eval_tasks: Path, tmp_path: Path, call: Call,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "runs"
    given = [] if "--method" in arguments else ["--method", "baseline"]
    path = ["--task-set", f"include_path={lm_eval_tasks}"]
    assert call("run", "--task", *arguments, *given, *path, "--out", str(out)) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dllm-bench:")]
    assert len(told) == 1 and message in told[0]
    assert not out.exists()


def test_local_data_for_a_task_of_lm_eval(lm_eval_tasks: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", GSM_TRAIN[:4])
    write_lines(tmp_path / "test.jsonl", GSM_TEST[:2])
    local = source(lm_eval_tasks, template="plain", data=str(tmp_path))
    assert local.size("gsm_local") == 2 and local.fetch("gsm_local") == ["lm-eval task gsm_local: 2 documents"]
    assert local.data("gsm_local") != source(lm_eval_tasks).data("gsm_local")
    before = local.data("gsm_local")
    write_lines(tmp_path / "train.jsonl", GSM_TRAIN[1:5])
    assert source(lm_eval_tasks, template="plain", data=str(tmp_path)).data("gsm_local") != before
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"train\.jsonl, which does not exist"):
        source(lm_eval_tasks, data=str(tmp_path)).size("gsm_local")
    single = source(lm_eval_tasks, data=str(tmp_path / "test.jsonl"), num_fewshot=0)
    assert single.size("gsm_local") == 2


def test_names_of_lm_eval_itself() -> None:
    assert find("gsm8k", None) == lm_eval_folder() / "tasks" / "gsm8k" / "gsm8k.yaml"
    with pytest.raises(UserError, match="did you mean 'gsm8k_cot'"):
        find("gsm8k_cott", None)
    with pytest.raises(UserError, match="is a group"):
        find("mmlu", None)
    with pytest.raises(UserError, match="is no folder"):
        find("gsm8k", "/nowhere")


def test_grades_of_official_rules(lm_eval_tasks: Path) -> None:
    facts = {"doc": GSM_TEST[1], "include_path": str(lm_eval_tasks)}

    def grade(text: str) -> tuple[float, float]:
        grades = LmEval.grade("gsm_local", Answer(text, (), facts))
        assert grades["score"] == grades["exact_match,strict-match"]
        return grades["exact_match,strict-match"], grades["exact_match,flexible-extract"]

    assert grade("2*1,000.\n#### 2,000") == (1.0, 1.0)
    assert grade("so it is $2000.") == (0.0, 1.0)
    assert grade("") == (0.0, 0.0)
    answers = [Answer("#### 2000", (), facts), Answer("2000", (), facts), Answer("1", (), facts)]
    found = LmEval.aggregate("gsm_local", answers, [LmEval.grade("gsm_local", one) for one in answers])
    assert found == {"score": 33.33, "exact_match,strict-match": 33.33, "exact_match,flexible-extract": 66.67}
    with pytest.raises(UserError, match="field 'doc'"):
        LmEval.grade("gsm_local", Answer("1", ()))
    with pytest.raises(UserError, match="JSON list of"):
        LmEval.grade("colours", Answer("blue", (), {"doc": COLOURS[0], "include_path": str(lm_eval_tasks)}))


def test_requests_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    until = ["a"]
    arguments = {"until": until, "max_new_tokens": 7, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert stops_of(arguments) == ("a",) and budget_of(arguments) == 7 and until == ["a"]
    assert "top_p=0.9 is not used" in caplog.text and "temperature=0.5" in caplog.text
    assert (stops_of({"until": "ab"}), stops_of({"until": None}), stops_of({})) == (("ab",), (), ())
    assert (budget_of({}), budget_of({"max_gen_toks": 3, "max_tokens": 5})) == (256, 3)
    with pytest.raises(UserError, match="max_gen_toks"):
        budget_of({"max_gen_toks": 0})


def test_fidelity_needs_a_trajectory(
    lm_eval_tasks: Path, tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ["--task-set", f"include_path={lm_eval_tasks}", "--out", str(tmp_path / "runs")]
    assert call("fidelity", "--task", "lm_eval:colours", "--method", "fast_dllm", *path) == 2
    assert "no trajectory to compare" in capsys.readouterr().err and not (tmp_path / "runs").exists()
