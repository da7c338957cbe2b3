"""What README and the model's card say was measured is what the committed rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import dllm_bench
from dllm_bench.running.fidelity_schema import FIDELITY
from dllm_bench.running.schema import RESULTS, Kind
from dllm_bench.running.store import Store

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import readme_tables  # noqa: E402
import tiny_card  # noqa: E402
import tiny_export  # noqa: E402

FOLDERS = ("model", "reference")


def test_readme_shows_the_committed_rows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tables.filled(text) == text, "run scripts/readme_tables.py"
    with pytest.raises(ValueError, match="<!-- accuracy -->"):
        readme_tables.filled("no place for a table")


def test_the_card_shows_the_committed_rows() -> None:
    training = json.loads((tiny_export.FOLDER / "training.json").read_text(encoding="utf-8"))
    made = tiny_card.card(training, *(tiny_card.found_in(ROOT / "results" / name) for name in FOLDERS))
    assert (tiny_export.FOLDER / "README.md").read_text(encoding="utf-8") == made, "run scripts/tiny_card.py"


def test_two_scores_of_one_cell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tiny_card.found_in(readme_tables.MODEL)
    monkeypatch.setattr(readme_tables, "found_in", lambda folder: [*found, found[0]])
    with pytest.raises(ValueError, match="more than one score"):
        readme_tables.accuracy()


@pytest.mark.parametrize(("name", "kind"), [("model", RESULTS), ("reference", RESULTS), ("reference", FIDELITY)])
def test_rows_are_of_the_published_weights_and_of_committed_code(name: str, kind: Kind) -> None:
    rows = Store(ROOT / "results" / name, kind).read(("status", "model_fingerprint", "git_dirty"))
    assert {row["status"] for row in rows} == {"ok"} and not any(row["git_dirty"] for row in rows)
    assert {row["model_fingerprint"] for row in rows} == {dllm_bench.load_model("tiny").fingerprint}
