"""Stored answers are scored without a model; stored rows are scored again without losing what they held."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import ToyTask
from golden_cases import GOLDEN
from rows import make_row

from dllm_bench.running.store import Store
from dllm_bench.running.task import TASKS, Answer

TESTS = Path(__file__).parent
RULER = json.loads((GOLDEN / "scoring" / "cases.json").read_text(encoding="utf-8"))["ruler"]["cases"]
Call = Callable[..., tuple[int, str, str]]


def jsonl(*objects: dict[str, Any]) -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects).encode()


def one_line(called: tuple[int, str, str], *said: str) -> None:
    code, out, err = called
    assert (code, out) == (2, ""), called
    assert err.startswith("dllm-bench: ") and err.count("\n") == 1, err
    for word in said:
        assert word in err, err


# -- score ----------------------------------------------------------------------------------------------------------


def test_ruler_values_are_shares_and_the_aggregate_is_in_percent(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_bytes(jsonl(*({name: case[name] for name in ("prediction", "references")} for case in RULER)))
    code, out, err = call("score", "--task", "ruler_niah", "--predictions", str(file), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    wanted = [case["nvidia"]["string_match_all_pct"] for case in RULER]
    assert [round(100 * value, 2) for value in told["values"]] == wanted and len(set(wanted)) > 2
    assert told["aggregate"] == pytest.approx(sum(wanted) / len(wanted), abs=0.01)


def test_gsm8k_gives_all_its_metrics(call: Call) -> None:
    given = jsonl(
        {"prediction": "so\n#### $29.00", "answer": "x\n#### 29"},
        {"prediction": "so\n#### 1,000", "references": ["#### 1000"], "answer": "ignored"},
        {"prediction": "18.0", "references": "18", "length": 7},
    )
    code, out, _ = call("score", "--task", "gsm8k", "--subset", "main", "--predictions", "-", "--json", stdin=given)
    names = ("strict", "flexible", "numeric")
    values = [dict(zip(names, row, strict=True)) for row in ((0, 0, 1), (1, 1, 1), (0, 0, 1))]
    assert code == 0 and json.loads(out)["values"] == values
    assert json.loads(out)["aggregate"] == {"strict": 33.33, "flexible": 33.33, "numeric": 100.0}
    again = call("score", "--task", "gsm8k:mini", "--predictions", "-", "--json", stdin=b"\xef\xbb\xbf\r\n" + given)
    assert again[1] == out, "a byte-order mark and blank lines do not matter"
    code, out, _ = call("score", "--task", "gsm8k", "--predictions", "-", stdin=b"\n" + given)
    table = [line.split() for line in out.splitlines()]
    assert ["line", "strict", "flexible", "numeric"] in table and ["2", "0.0000", "0.0000", "1.0000"] in table
    assert code == 0 and "3 answers, in percent: strict 33.33, flexible 33.33, numeric 100.0" in out
    assert out.startswith("gsm8k · main (scorer version 1)\n"), "the title is one line, however narrow the table is"


def test_a_line_separator_inside_a_text_is_no_new_line(call: Call) -> None:
    given = jsonl({"prediction": "a\u2028b\u0085 7", "references": ["b\u0085 7"]})
    code, out, _ = call("score", "--task", "ruler_niah", "--predictions", "-", "--json", stdin=given)
    assert (code, json.loads(out)) == (0, {"values": [1.0], "aggregate": 100.0})


GOOD = b'{"prediction": "8", "references": ["8"]}\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"prediction", "line 3 is not JSON"),
        (b"[" * 100_000, "line 3 is not JSON"),
        (b'{"prediction": "\xff"}', "line 3 is not UTF-8 text"),
        (b'["8"]', "line 3 is no JSON object"),
        (b'{"references": ["8"]}', "line 3 has no field 'prediction': it has references"),
        (b'{"prediction": "8"}', "line 3 has no field 'references' or 'answer': it has prediction"),
        (b'{"prediction": "8", "references": []}', "line 3: the references are empty"),
        (b'{"prediction": "8", "references": [" "]}', "line 3: the references are empty"),
        (b'{"prediction": "8", "answer": ""}', "line 3: the references are empty"),
        (b'{"prediction": "8", "references": [8]}', "line 3: the references must be a text or a list of texts"),
        (b'{"prediction": null, "references": ["8"]}', "line 3: the prediction must be a text, got None"),
    ],
)
def test_a_bad_line_is_one_line_with_its_number(call: Call, tmp_path: Path, line: bytes, said: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    one_line(call("score", "--task", "gsm8k", "--predictions", str(file)), f"{file}, {said}")
    one_line(call("score", "--task", "gsm8k", "--predictions", "-", stdin=file.read_bytes()), f"standard input, {said}")


def test_mistakes_name_the_nearest_choice(call: Call, tmp_path: Path) -> None:
    base = ("--predictions", "-")
    one_line(call("score", "--task", "gsm9k", *base), "did you mean 'gsm8k'?")
    one_line(call("score", "--task", "gsm8k:minni", *base), "did you mean 'mini'?")
    one_line(call("score", "--task", "ruler_niah", "--subset", "singel_1", *base), "did you mean 'single_")
    one_line(call("score", "--task", "gsm8k", "--subset", "all", *base), "one subset at a time", "--subset main")
    one_line(call("score", "--task", "longbench:zh", *base), "zh stands for several", "--subset multifieldqa_zh")
    one_line(call("score", "--task", "gsm8k:mini", "--subset", "main", *base), "name two subsets")
    one_line(call("score", "--task", "gsm8k", *base), "standard input holds no predictions")
    one_line(call("score", "--task", "gsm8k", "--predictions", str(tmp_path / "no")), "cannot be read: No such file")


class Fields(ToyTask):
    """Scored by a field that must be there; its aggregate is by parts, one of them empty."""

    name = "fields_task"

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        return {"score": answer.facts["weight"] * (answer.prediction == answer.references[0])}

    @classmethod
    def aggregate(cls, subset: str, answers: Any, grades: Any) -> dict[str, Any]:
        return {"short": 100 * grades[0]["score"], "long": float("nan")}


if "fields_task" not in TASKS.names():
    TASKS.register("fields_task", Fields)


def test_other_fields_are_facts(call: Call) -> None:
    base = ("score", "--task", "fields_task", "--predictions", "-", "--json")
    given = {"prediction": "egg", "references": ["egg"]}
    code, out, _ = call(*base, stdin=jsonl({**given, "weight": 0.5}))
    assert (code, json.loads(out)) == (0, {"values": [0.5], "aggregate": {"short": 50.0, "long": None}})
    one_line(call(*base, stdin=jsonl(given)), "line 1 has no field 'weight', by which fields_task/single is scored")


def test_scoring_loads_neither_torch_nor_pyarrow(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(GOOD)
    script = (
        "import sys; from dllm_bench.cli import main\n"
        f"sys.argv = ['dllm-bench', 'score', '--task', 'gsm8k', '--predictions', {str(file)!r}, '--json']\n"
        "main(); print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=TESTS.parent, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


# -- rescore --------------------------------------------------------------------------------------------------------


class Kinder(ToyTask):
    """A scorer with a new version: case does not matter any more, and there is a second metric."""

    name = "kinder_task"
    scorer_version = 2
    metrics = ("score", "length")

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        if answer.facts.get("broken"):
            raise ValueError("a fact is broken")
        same = answer.prediction.lower() == answer.references[0].lower()
        return {"score": float(same), "length": len(answer.prediction) / 10}


if "kinder_task" not in TASKS.names():
    TASKS.register("kinder_task", Kinder)


def stored(index: int, text: str | None, **changes: Any) -> dict[str, Any]:
    base = {"task": "kinder_task", "index": index, "text": text, "references": ["egg"], "sample_meta": "{}"}
    score = None if text is None else float(text == "egg")
    told = None if score is None else json.dumps({"score": score})
    return make_row(**{**base, "score": score, "scores": told, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    store = Store(tmp_path / "runs")
    rows = [
        stored(0, "egg"),
        stored(1, "EGG"),
        stored(2, None, status="oom", scorer_version=None),
        stored(3, "egg", status="masks_left", score=0.0, scores='{"score": 0.0}'),
        stored(4, "Egg", scores=None, scorer_version=None),
        stored(5, "Egg", score=1.0, scores='{"length": 0.3, "score": 1.0}', scorer_version=2),
        stored(6, "Egg", sample_meta='{"broken": true}'),
        stored(7, "Egg", subset="gone"),
        stored(8, "Egg", task="other_task"),
    ]
    for row in rows:
        store.append(row)
    yield store.root


def by_index(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["index"]: row for row in Store(folder).read()}


def test_rows_get_the_scores_of_today_and_keep_the_former_ones(call: Call, folder: Path) -> None:
    before = by_index(folder)
    code, out, err = call("rescore", str(folder))
    after = by_index(folder)
    assert (code, err) == (0, "") and after.keys() == before.keys()
    assert out.splitlines() == [
        "kinder_task/single: 4 rows scored by version 2, 4 changed (mean score 25.00 % before, 75.00 % now)",
        "scored by the current version already: 1 row (--all scores them again)",
        "without an answer: 1 row",
        "kept as it is: 1 row, kinder_task/single does not score it: a fact is broken",
        *(line for line in out.splitlines() if "/gone does not score it: unknown subset" in line),
        "kept as it is: 1 row, task 'other_task' is unknown here",
    ]
    told = {i: (row["score"], row["scores"], row["scorer_version"], row["former_scores"]) for i, row in after.items()}
    assert told[1] == (1.0, '{"length": 0.3, "score": 1.0}', 2, '{"1": {"score": 0.0}}')
    assert told[3] == (0.0, '{"length": 0.0, "score": 0.0}', 2, '{"1": {"score": 0.0}}'), "masks left are no answer"
    assert told[4] == (1.0, '{"length": 0.3, "score": 1.0}', 2, '{"none": {"score": 0.0}}')
    for index in (2, 5, 6, 7, 8):
        assert after[index] == {**before[index]}, index
    scored = ("score", "scores", "scorer_version", "former_scores")
    for index in after:
        rest = [{**row[index], **dict.fromkeys(scored)} for row in (before, after)]
        assert rest[0] == rest[1], "nothing but the scores changes, the time of its beginning neither"
    assert len(Store(folder).files()) == 1
    assert call("rescore", str(folder))[1].startswith("scored by the current version already: 5 rows")


def test_all_scores_current_rows_too(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("rescore", str(folder))
    files = Store(folder).files()
    assert "5 rows scored by version 2, 0 changed\n" in call("rescore", str(folder), "--all")[1]
    assert Store(folder).files() == files, "nothing changed, nothing is written"
    monkeypatch.setattr(Kinder, "metrics", ("score",))
    monkeypatch.setattr(Kinder, "grade", classmethod(lambda cls, subset, answer: {"score": 0.5}))
    assert "6 rows scored by version 2, 6 changed" in call("rescore", str(folder), "--all")[1]
    row = by_index(folder)[1]
    former = json.loads(row["former_scores"])
    assert (row["score"], former) == (0.5, {"1": {"score": 0.0}, "2": {"length": 0.3, "score": 1.0}})
    monkeypatch.setattr(Kinder, "scorer_version", 1)
    call("rescore", str(folder))
    assert json.loads(by_index(folder)[1]["former_scores"]) == {"2": {"score": 0.5}}, "version 1 is the current one"


def test_one_task_alone(call: Call, folder: Path) -> None:
    one_line(call("rescore", str(folder), "--task", "kinder_tsk"), "did you mean 'kinder_task'?")
    one_line(call("rescore", str(folder), "--task", "gsm8k"), "holds no rows of gsm8k: it has kinder_task, other_task")
    one_line(call("rescore", str(folder / "no")), "there is no folder")
    assert "other_task" not in call("rescore", str(folder), "--task", "kinder_task")[1]


# -- the store ------------------------------------------------------------------------------------------------------


def test_replace_takes_the_place_of_the_same_row_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for index in range(3):
        store.append(make_row(index=index))
    rows = store.read()
    gone = make_row(index=9)
    late = {**rows[1], "started_at": rows[1]["started_at"].replace(year=2025), "score": 0.25}
    assert store.replace({**rows[0], "score": 0.5}, gone, late) == 1
    assert sorted((row["index"], row["score"]) for row in store.read()) == [(0, 0.5), (1, 1.0), (2, 1.0)]
    files = store.files()
    assert store.replace(gone) == 0 and store.files() == files
    with pytest.raises(ValueError, match="colour"):
        store.replace({**rows[0], "colour": "red"})
    assert store.files() == files


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from dllm_bench.running import store as module
unlink = Path.unlink
def killing(self, missing_ok=False):
    if self.name.startswith(".tmp") == {early!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(self, missing_ok=missing_ok)
Path.unlink = killing
store = module.Store({root!r})
store.replace(*({{**row, "score": 0.5}} for row in store.read()))
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 needs a POSIX system")
@pytest.mark.parametrize("rename_fails", [False, True])
def test_a_kill_leaves_every_row_in_its_old_or_its_new_form(tmp_path: Path, rename_fails: bool) -> None:
    store = Store(tmp_path / "runs")
    for index in range(3):
        store.append(make_row(index=index))
    code = textwrap.dedent(KILLED).format(tests=str(TESTS), root=str(store.root), early=rename_fails)
    if rename_fails:  # killed while the new file still has its temporary name
        code = code.replace("store.replace(*", "Path.replace = killing_replace\nstore.replace(*").replace(
            "store = module", "def killing_replace(self, target): os.kill(os.getpid(), signal.SIGKILL)\nstore = module"
        )
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [row["score"] for row in store.read()] == [1.0 if rename_fails else 0.5] * 3
    store.compact()
    assert len(store.files()) == 1 and [row["score"] for row in store.read()] == [1.0 if rename_fails else 0.5] * 3
