"""What README and the model's card say was measured is what the committed rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import readme_tables
import tiny_card
import tiny_export
from rows import make_row

import dllm_bench
from dllm_bench.running.fidelity_schema import FIDELITY
from dllm_bench.running.schema import RESULTS, Kind
from dllm_bench.running.store import Store

ROOT = Path(__file__).parents[1]
FOLDERS = ("model", "reference")

ASKED = {
    "single_1": {512: 98, 1024: 98, 4096: 95, 16384: 80, 32768: 60},
    **{key: {512: 95, 1024: 90, 4096: 80} for key in ("single_2", "multikey_1")},
    **{key: {512: 85, 1024: 75, 4096: 50} for key in ("multikey_2", "multivalue", "multiquery")},
    **{key: {512: 80, 1024: 70, 4096: 50} for key in ("mini_qa", "mini_retrieval")},
    "mini": {None: 70},
}
"""Least scores in percent of the embedded model without a cache, by subset and context."""


def test_readme_shows_the_committed_rows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tables.filled(text) == text, "run scripts/readme_tables.py"
    with pytest.raises(ValueError, match="<!-- accuracy -->"):
        readme_tables.filled("no place for a table")


def test_the_card_shows_the_committed_rows() -> None:
    training = json.loads((tiny_export.FOLDER / "training.json").read_text(encoding="utf-8"))
    made = tiny_card.card(training, *(tiny_card.measured(ROOT / "results" / name) for name in FOLDERS))
    assert (tiny_export.FOLDER / "README.md").read_text(encoding="utf-8") == made, "run scripts/tiny_card.py"


def test_the_model_does_what_is_asked_of_it() -> None:
    found = {(r["subset"], r["ctx"], r["rule"]): r for r in tiny_card.measured(readme_tables.MODEL)}
    for subset, least in ASKED.items():
        # a sum cannot be read off before its digits are there
        quota = "one token a pass" if subset == "mini" else "4 tokens a pass"
        for ctx, score in least.items():
            for rule in ("threshold 0.9", quota):
                if rule == quota and (ctx or 0) > 4096:
                    continue  # four times as long as with the threshold: hours on two cores
                cell = found[subset, ctx, rule]
                assert 100 * cell["accuracy"] >= score, (subset, ctx, rule)


def test_two_scores_of_one_cell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tiny_card.measured(readme_tables.MODEL)
    monkeypatch.setattr(readme_tables, "measured", lambda folder: [*found, found[0]])
    with pytest.raises(ValueError, match="more than one score"):
        readme_tables.accuracy()


def test_scores_of_two_machines_are_told_together_but_not_their_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = json.dumps({"gen_length": 48, "steps": 12})
    store = Store(tmp_path)
    for index, (machine, score) in enumerate((("One", 1.0), ("Two", 0.5))):
        store.append(make_row(index=index, device_name=machine, threads=index + 1, score=score, decode_settings=decode))
    (record,) = tiny_card.measured(tmp_path)
    assert (record["n"], record["accuracy"], record["all_right"]) == (2, 0.75, 0.5)
    assert tiny_card.line(record, "baseline")[3:6] == ("4 tokens a pass", "2", "75.0")
    monkeypatch.setattr(readme_tables, "REFERENCE", tmp_path)
    with pytest.raises(ValueError, match=r"in one setting, not of: .*One, 1 thread, .*Two, 2 threads; measure all"):
        readme_tables.board("toy_task")
    with pytest.raises(ValueError, match="not of: none"):
        readme_tables.board("other_task")


def test_a_folder_without_rows_makes_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (tiny_export.FOLDER / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tiny_card.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        tiny_card.main()
    assert ended.value.code == 2 and (tiny_export.FOLDER / "README.md").read_text(encoding="utf-8") == before


@pytest.mark.parametrize(("name", "kind"), [("model", RESULTS), ("reference", RESULTS), ("reference", FIDELITY)])
def test_rows_are_of_the_published_weights_and_of_committed_code(name: str, kind: Kind) -> None:
    rows = Store(ROOT / "results" / name, kind).read(("status", "model_fingerprint", "git_dirty"))
    assert {row["status"] for row in rows} == {"ok"} and not any(row["git_dirty"] for row in rows)
    assert {row["model_fingerprint"] for row in rows} == {dllm_bench.load_model("tiny").fingerprint}
