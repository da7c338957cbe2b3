"""dllm-bench as a model of the real lm-eval: the answers and scores of `dllm-bench run`, and lm-eval's contract."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lm_eval_files import COLOURS
from test_light_imports import BLOCKED, python
from test_lm_eval_source import Call, call, rows  # noqa: F401

from dllm_bench import UserError
from dllm_bench.lm_eval_arguments import Arguments


@pytest.fixture(scope="module")
def model_class() -> Any:
    from dllm_bench.lm_eval_model import DllmBenchLM

    return DllmBenchLM


def evaluate(tasks: Path, names: list[str], model: Any, **options: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(tasks))
    arguments = {} if isinstance(model, dict) else {"model": model}
    if isinstance(model, dict):
        arguments = {"model": "dllm_bench", "model_args": model}
    return lm_eval.simple_evaluate(**arguments, tasks=names, task_manager=manager, bootstrap_iters=0, **options)  # type: ignore[no-any-return]


def request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, ("made_up", 0, 1))


@pytest.mark.parametrize("template", ["auto", "plain"])
@pytest.mark.parametrize(("task", "model"), [("needles", "tiny"), ("gsm_local", "bytes")])
@pytest.mark.usefixtures("model_class")
def test_the_same_answers_and_scores_both_ways(
    task: str,
    model: str,
    template: str,
    lm_eval_tasks: Path,
    byte_model: Path,
    tmp_path: Path,
    call: Call,  # noqa: F811
) -> None:
    name, out = "tiny" if model == "tiny" else str(byte_model), tmp_path / "runs"
    decode = {"gen_length": 48, "block_length": 16, "threshold": 0.4}
    flags = [part for key, value in decode.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    code = call(
        "run", "--task", f"lm_eval:{task}", "--task-set", f"include_path={lm_eval_tasks}", "--out", str(out),
        "--method", "fast_dllm+wavefilter", "--model", name, "--chat-template", template, *flags,
    )  # fmt: skip
    assert code == 0
    found = rows(out)
    arguments = {"pretrained": name, "method": "fast_dllm+wavefilter", "chat_template": template, **decode}
    results = evaluate(lm_eval_tasks, [task], arguments, apply_chat_template=template == "auto")
    samples = [one for one in results["samples"][task] if one["filter"] == "strict-match"]
    assert [one["resps"][0][0] for one in samples] == [row["text"] for row in found]
    assert any(row["text"] for row in found)
    for metric in ("exact_match,strict-match", "exact_match,flexible-extract"):
        mine = [json.loads(row["scores"])[metric] for row in found]
        assert results["results"][task][metric] == pytest.approx(sum(mine) / len(mine))
    if (task, template) == ("needles", "auto"):
        assert results["results"][task]["exact_match,flexible-extract"] == pytest.approx(2 / 3)


@pytest.mark.usefixtures("model_class")
def test_the_same_likelihoods_both_ways(lm_eval_tasks: Path, tmp_path: Path, call: Call) -> None:  # noqa: F811
    out = tmp_path / "runs"
    call(
        "run", "--task", "lm_eval:cloze,colours", "--task-set", f"include_path={lm_eval_tasks}", "--task-set",
        "mc_num=4", "--out", str(out), "--method", "baseline",
    )  # fmt: skip
    results = evaluate(
        lm_eval_tasks, ["cloze", "colours"], {"pretrained": "tiny", "mc_num": 4}, apply_chat_template=True
    )
    theirs = [
        [response[0][0] for response in one["resps"]]
        for task in ("cloze", "colours")
        for one in results["samples"][task]
    ]
    assert theirs == [pytest.approx(row["choice_loglikelihoods"]) for row in rows(out)]
    scores = [row["score"] for row in rows(out) if row["subset"] == "colours"]
    assert results["results"]["colours"]["acc,none"] == pytest.approx(sum(scores) / 2)


def test_answers_in_order_and_requests_untouched(model_class: Any, byte_model: Path) -> None:
    model = model_class(pretrained=str(byte_model), gen_length=16, threshold=0.3)
    texts = [f"Question {n}: what?" for n in (3, 1, 2, 1)]
    whole = model.generate_until([request("generate_until", text, {"until": []}) for text in texts], True)
    assert len(whole) == 4 and whole[1] == whole[3] and len(set(whole)) == 3 and all(len(text) > 3 for text in whole)
    stop = whole[0][2]
    arguments = [{"until": [stop]}, {"until": stop}, {"until": None}, {}]
    before = copy.deepcopy(arguments)
    requests = [request("generate_until", text, given) for text, given in zip(texts, arguments, strict=True)]
    cut = model.generate_until(requests, True)
    assert arguments == before, "until stays as it is"
    assert cut == [whole[0].split(stop)[0], whole[1].split(stop)[0], whole[2], whole[3]]
    assert model.generate_until([], True) == []


def test_budgets_follow_the_request(model_class: Any, byte_model: Path) -> None:
    model = model_class(pretrained=str(byte_model), threshold=0.3, eos_stop=False)
    asked = [request("generate_until", "Say", {"until": [], "max_gen_toks": n}) for n in (8, 24)]
    short, long = model.generate_until(asked, True)
    assert 0 < len(short) <= 8 < len(long) <= 24
    fixed = model_class(pretrained=str(byte_model), threshold=0.3, block_length=16)
    with pytest.raises(UserError, match="nearest valid gen_length"):
        fixed.generate_until(asked, True)


def test_sampled_repeats_differ(model_class: Any, byte_model: Path) -> None:
    model = model_class(pretrained=str(byte_model), gen_length=8, temperature=1.0, steps=8)
    asked = [request("generate_until", "Say", {"until": []})] * 3
    first = model.generate_until(asked, True)
    assert len(set(first)) == 3 and model.generate_until(asked, True) == first


def test_the_cache_knows_method_and_options(model_class: Any, byte_model: Path, tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM, hash_args

    arguments = {"pretrained": str(byte_model), "gen_length": 8, "threshold": 0.3}
    asked = [request("generate_until", f"Say {n}", {"until": []}) for n in range(3)]
    path = str(tmp_path / "cache.db")
    model = model_class(**arguments)
    cached = CachingLM(model, path)
    first = cached.generate_until(asked)
    partial_key = hash_args("generate_until", (*asked[0].args, model.identity, 0))
    assert cached.dbdict[partial_key] == first[0], "each answer is kept as soon as it is there"

    # only the partial answers are left, as after a crash: they are taken, not computed
    for one in asked:
        del cached.dbdict[hash_args("generate_until", one.args)]
    cached.dbdict[partial_key] = "kept"
    again = CachingLM(model_class(**arguments), path).generate_until(asked)
    assert again == ["kept", *first[1:]]
    for change in ({"method": "fast_dllm"}, {"threshold": 0.9}, {"seed": 1}):
        with pytest.raises(UserError, match="another path"):
            CachingLM(model_class(**{**arguments, **change}), path)


def test_prompt_begins_once_with_a_template(model_class: Any, byte_model: Path) -> None:
    model = model_class(pretrained=str(byte_model))
    history = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    opened = model.apply_chat_template(history[:1])
    assert model.codec.bare(opened) == model.codec.wrap("1+1?")
    assert model.codec.bare(model.apply_chat_template(history, add_generation_prompt=False)) == model.codec.wrap(
        "1+1?", "It is"
    )
    assert model.chat_template() is None and "{user}" in model.chat_template(True)
    assert model.chat_template("llada") == model.chat_template(True)
    with pytest.raises(UserError, match="valid: llada"):
        model.chat_template("dream")
    plain = model_class(pretrained=str(byte_model), chat_template="plain")
    assert plain.tokenizer_name != model.tokenizer_name
    with pytest.raises(UserError, match="has no turns"):
        plain.apply_chat_template(history)


def test_rolling_likelihoods(model_class: Any, byte_model: Path, lm_eval_tasks: Path) -> None:
    from dllm_bench import loglikelihood

    model = model_class(pretrained=str(byte_model), mc_num=4)
    [whole] = model.loglikelihood_rolling([request("loglikelihood_rolling", "Grass is")], True)
    ids = model.codec.encode("Grass is")
    assert whole == loglikelihood(model.model, model.codec.bare(""), ids, mc_num=4).value
    long = "ab" * 1500
    [windowed] = model.loglikelihood_rolling([request("loglikelihood_rolling", long)], True)
    assert windowed < 2 * whole
    results = evaluate(lm_eval_tasks, ["whole"], model)
    assert results["results"]["whole"]["byte_perplexity,none"] > 1


def test_likelihoods_are_uncached_and_said_to_be(
    model_class: Any, byte_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [request("loglikelihood", "The sky is", f" {one}") for one in COLOURS[0]["choices"]]
    plain = model_class(pretrained=str(byte_model), mc_num=4).loglikelihood(asked, True)
    assert "takes no part" not in caplog.text
    cached = model_class(pretrained=str(byte_model), mc_num=4, method="fast_dllm", check_greedy=False)
    assert cached.loglikelihood(asked, True) == plain and "method fast_dllm takes no part" in caplog.text
    assert all(value < 0 and greedy is False for value, greedy in plain)


def test_model_args() -> None:
    made = Arguments.parse(
        {"pretrained": "tiny", "method": "fast_dllm+wavefilter", "wavefilter.levels": 3, "set": "mode=prefix"}
    )
    options = made.method.options
    assert (options["wavefilter.levels"], options["fast_dllm.mode"]) == (3, "prefix")
    assert Arguments.parse({"pretrained": "x", "threshold": "0.5"}).decode == {"threshold": "0.5"}
    for given, message in [
        ({}, "pretrained=tiny"),
        ({"pretrained": "tiny", "treshold": 1}, "did you mean 'threshold'"),
        ({"pretrained": "tiny", "method": "fast_dllm", "mode": "dual"}, "did you mean 'fast_dllm.mode'"),
        ({"pretrained": "tiny", "method": "fast_dlm"}, "did you mean 'fast_dllm'"),
        ({"pretrained": "tiny", "method": "fast_dllm", "fast_dllm.mode": "dul"}, "did you mean 'dual'"),
        ({"pretrained": "tiny", "method": "fast_dllm", "fast_dllm.mode": "dual", "set": "mode=dual"}, "set twice"),
        ({"pretrained": "tiny", "batch_size": 8}, "nearest valid is --batch_size 1"),
        ({"pretrained": "tiny", "threshold": "high"}, "must be a number"),
        ({"pretrained": "tiny", "fill": "1:3"}, "unknown argument 'fill'"),
    ]:
        with pytest.raises(UserError, match=message):
            Arguments.parse(given)


@pytest.mark.usefixtures("model_class")
def test_the_command_is_lm_evals_own(
    lm_eval_tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: Call,  # noqa: F811
) -> None:
    import lm_eval.tasks

    # its index of all tasks takes many seconds
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    code = call(
        "lm-eval", "run", "--model", "dllm_bench", "--model_args", "pretrained=tiny,method=fast_dllm,threshold=0.9",
        "--tasks", "needles", "--include_path", str(lm_eval_tasks), "--limit", "2", "--apply_chat_template",
    )  # fmt: skip
    told = capsys.readouterr()
    assert code == 0, told.err
    line = next(one for one in told.out.splitlines() if "flexible-extract" in one)
    assert "1" in line.split("|")[7] and sys.argv[0] == "dllm-bench"
    assert call("lm-eval", "--help") == 0 and "usage: lm-eval" in capsys.readouterr().out
    code = call(
        "lm-eval", "run", "--model", "dllm_bench", "--model_args", "pretrained=tiny,metod=baseline",
        "--tasks", "needles", "--include_path", str(lm_eval_tasks),
    )  # fmt: skip
    assert code == 2 and "did you mean 'method'" in capsys.readouterr().err.splitlines()[-1]


def test_without_lm_eval() -> None:
    for arguments in (["lm-eval", "--help"], ["run", "--task", "lm_eval:gsm8k", "--method", "baseline"]):
        done = python(BLOCKED.format(blocked=("lm_eval",)), *arguments)
        assert (done.returncode, done.stderr) == (
            2, "dllm-bench: lm-eval is not installed: pip install 'dllm-bench[lm-eval]'\n",
        )  # fmt: skip
