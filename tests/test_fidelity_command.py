"""`dllm-bench fidelity`: rows beside the results, reruns, the table, the figure, bad input."""

from __future__ import annotations

import datetime as dt
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rows import make_row
from typer.testing import CliRunner, Result

from dllm_bench.caching.part import METHODS
from dllm_bench.caching.request import Request
from dllm_bench.cli import app
from dllm_bench.errors import UserError
from dllm_bench.methods.fast_dllm import FastDllm
from dllm_bench.models.text import TextCodec
from dllm_bench.reporting.fidelity import DRIFTS, summaries
from dllm_bench.reporting.fidelity_figure import draw, error_grids
from dllm_bench.running import fidelity as running
from dllm_bench.running.fidelity_schema import FIDELITY
from dllm_bench.running.schema import new_row
from dllm_bench.running.store import Store

FAST = ["--ctx", "256", "--gen-length", "16", "--block-length", "8", "--tokens-per-pass", "4", "--no-eos-stop"]
TAKEN = {column.name for column in FIDELITY.columns}


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["fidelity", *FAST, "--out", str(folder), *arguments], env={"COLUMNS": "140"})


def fidelity_row(step: int | None = 0, **changes: Any) -> dict[str, Any]:
    base = {name: value for name, value in make_row(index=changes.pop("index", 0)).items() if name in TAKEN}
    base.pop("schema_version", None)
    measures = {"passes": 2, "tokens_compared": 8, "tokens_agreeing": 6, "candidates": 4, "kl_mean": 0.5, "kl_max": 1.0}
    return {**base, **measures, "step": step, **changes}


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    folder, picture = tmp_path / "runs", tmp_path / "drift.svg"
    arguments = ["--method", "baseline,fast_dllm,sparse_dllm", "--samples", "2", "--plot", str(picture)]
    result = call(folder, *arguments)
    assert result.exit_code == 0, result.output
    told = [line.split() for line in result.stdout.splitlines() if line.strip()]
    lined = [words if words[0] == "256" else ["", *words] for words in told]
    assert [words[:2] for words in lined if words[1:2] == ["baseline"]] == [["256", "baseline"]]
    lines = {words[1]: words for words in lined if len(words) > 2}
    assert lines["baseline"][2:8] == ["2", "100.0", "never", "0", "0", "–"]
    assert lines["fast_dllm"][5] != "0" and float(lines["fast_dllm"][7]) > 0
    assert picture.stat().st_size > 1000 and f"wrote {picture}" in result.stdout
    rows = Store(folder, FIDELITY).read()
    assert {(row["method"], row["index"], row["step"]) for row in rows} == {
        (method, index, step)
        for method in ("baseline", "fast_dllm", "sparse_dllm")
        for index in (0, 1)
        for step in range(next(r["passes"] for r in rows if (r["method"], r["index"]) == (method, index)))
    }
    cached = [row for row in rows if row["method"] == "fast_dllm"]
    assert all(len(row[name]) == 5 for row in cached for name in DRIFTS) and cached[0]["mass_kept"] is None
    again = call(folder, *arguments)
    assert again.stderr.count("nothing to do, 2 kept") == 3 and again.stdout == result.stdout
    more = call(folder, "--method", "fast_dllm", "--samples", "3")
    assert "1 samples, 2 kept" in more.stderr and len(Store(folder, FIDELITY).files()) == 1
    assert Store(folder).files() == [], "they are no results"


def test_every_row_names_its_method_however_narrow_the_console(tmp_path: Path) -> None:
    """Columns go before names do; a part's caveat belongs to its name."""
    methods = "fast_dllm+depthweave_kv+wavefilter,wavefilter_tuned,sparse_dllm"
    arguments = ["fidelity", *FAST, "--out", str(tmp_path), "--method", methods, "--samples", "1"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in result.stdout
    words = " ".join(result.stdout.split())
    for name in ("+depthweave_kv", "+wavefilter_tuned", "sparse_dllm"):
        assert name in words
    wide = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stdout
    for text in (words, wide):
        assert "+wavefilter†" in text and "† adapted: training-free router and gates" in text


def test_methods_know_the_models_tokens(tmp_path: Path) -> None:
    """As in `run`: a method that treats some tokens by their meaning must be measured as it decodes."""
    seen: list[Any] = []

    class Reader(FastDllm):
        name = "reader"

        def begin(self, request: Request) -> None:
            super().begin(request)
            seen.append(request.codec)

    METHODS.register("reader", Reader)
    try:
        assert call(tmp_path, "--method", "reader", "--samples", "1").exit_code == 0
    finally:
        del METHODS._paths["reader"], METHODS._classes["reader"]
    assert seen and all(isinstance(codec, TextCodec) for codec in seen)


def test_passes_that_ask_nothing_of_a_cache_are_told(tmp_path: Path) -> None:
    """With one pass per block every pass is a refresh, so agreement says nothing."""
    arguments = ["--method", "fast_dllm", "--samples", "1"]
    assert "every block took one pass" not in call(tmp_path, *arguments).stdout
    one = call(tmp_path, *arguments, "--tokens-per-pass", "8")
    assert "every block took one pass" in one.stdout and one.exit_code == 0


def test_fresh_drops_what_it_does_again(tmp_path: Path) -> None:
    call(tmp_path, "--method", "baseline,fast_dllm", "--samples", "1")
    before = {row["key"]: row["started_at"] for row in Store(tmp_path, FIDELITY).read()}
    result = call(tmp_path, "--method", "fast_dllm", "--samples", "1", "--fresh")
    assert "1 samples" in result.stderr
    after = {row["key"]: row["started_at"] for row in Store(tmp_path, FIDELITY).read()}
    assert before.keys() == after.keys() and sum(before[key] != after[key] for key in before) == 1


def test_a_failed_sample_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(running, "compare", fail)
        result = call(tmp_path, "--method", "baseline", "--samples", "1")
    assert result.exit_code == 1 and "1 of 1 samples failed (MemoryError: no room)" in result.stderr
    (row,) = Store(tmp_path, FIDELITY).read()
    assert (row["status"], row["step"], row["kl_mean"]) == ("oom", None, None)
    assert call(tmp_path, "--method", "baseline", "--samples", "1").exit_code == 0
    assert {row["status"] for row in Store(tmp_path, FIDELITY).read()} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fast_dlm"], "did you mean 'fast_dllm'"),
        (["--method", "fast_dllm", "--set", "moed=dual"], "did you mean 'mode'"),
        (["--method", "fast_dllm", "--task", "ruler_nia"], "did you mean 'ruler_niah'"),
        (["--method", "baseline", "--ctx", "16"], "minimum"),
        (["--method", "baseline", "--samples", "0"], "nearest valid: 1"),
        (["--method", "baseline", "--plot", "drift.pgn"], "did you mean 'drift.png'"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = call(tmp_path / "runs", *arguments)
    assert isinstance(result.exception, UserError) and message in str(result.exception)
    assert "\n" not in str(result.exception) and not (tmp_path / "runs").exists()


def test_both_kinds_of_rows_share_a_folder(tmp_path: Path) -> None:
    results, store = Store(tmp_path), Store(tmp_path, FIDELITY)
    results.append(make_row(index=0))
    store.append(fidelity_row(0), fidelity_row(1))
    results.append(make_row(index=1))
    store.append(fidelity_row(0, index=1))
    assert len(results.read()) == 2 and len(store.read()) == 3
    assert results.read()[0]["key"] in {row["key"] for row in store.read()}, "the key joins the two"
    results.compact()
    store.compact()
    assert (len(results.files()), len(store.files())) == (1, 1)
    assert len(results.read()) == 2 and len(store.read()) == 3
    assert store.drop({store.read()[0]["key"]}) == 2 and len(store.read()) == 1 and len(results.read()) == 2


def test_the_last_writing_of_a_sample_counts_as_a_whole(tmp_path: Path) -> None:
    store, first = Store(tmp_path, FIDELITY), fidelity_row()
    later = first["started_at"] + dt.timedelta(seconds=5)
    store.append(*(fidelity_row(step) for step in range(3)))
    store.append(*(fidelity_row(step, started_at=later, kl_mean=0.25) for step in range(2)))
    assert [(row["step"], row["kl_mean"]) for row in store.read()] == [(0, 0.25), (1, 0.25)]
    (tmp_path / "fidelity-part-again.parquet").write_bytes(store.files()[-1].read_bytes())
    assert len(store.read()) == 2, "a file that was copied by a compaction counts once"
    store.compact()
    assert len(store.read()) == 2


def test_a_malformed_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a fidelity row"):
        Store(tmp_path, FIDELITY).append(fidelity_row(0), {**fidelity_row(1), "score": 1.0})
    assert list(tmp_path.iterdir()) == []


def made_rows() -> list[dict[str, Any]]:
    drifts = {"key_drift_prompt": [0.0, 0.1], "value_drift_prompt": [0.0, 0.3], "key_drift_response": [0.0, 0.2]}
    one = [
        fidelity_row(1, **drifts, first_divergent_step=3, mass_kept=[None, 0.5], needles_kept=[None, 1.0]),
        fidelity_row(0, kl_mean=0.1, kl_max=7.0, candidates=12, first_divergent_step=3, mass_kept=[0.7, 0.9]),
    ]
    other = [fidelity_row(0, index=1, kl_mean=None, kl_max=None, candidates=0, tokens_agreeing=8, **drifts)]
    failed = fidelity_row(None, index=2, status="error", error="x", tokens_compared=None, kl_mean=None)
    return [new_row(row, FIDELITY) for row in (*one, *other, failed)]


def test_numbers_of_a_summary() -> None:
    (made,) = summaries(made_rows())
    assert (made.samples, made.failed) == (2, 1)
    assert made.agreement == 14 / 16 and made.first_divergent_step == math.inf
    assert made.kl_mean == pytest.approx((0.5 * 4 + 0.1 * 12) / 16) and made.kl_max == 7.0
    assert (made.drift_prompt, made.drift_response) == (0.3, 0.2)
    assert made.mass_kept == pytest.approx(0.7) and made.needles_kept == 1.0
    assert made.drift_start == (1, 0), "of the other sample"
    assert made.unread_start == (0, 0), "30 % of the attention in the lowest layer"


def test_options_are_told_apart() -> None:
    rows = made_rows() + [{**row, "decode_settings": json.dumps({"steps": 9})} for row in made_rows()]
    assert len(summaries(rows)) == 2


def test_the_figure_is_the_mean_by_layer_and_step() -> None:
    rows = [
        fidelity_row(0, key_drift_prompt=[0.0, 0.2]),
        fidelity_row(1, key_drift_prompt=[0.1, 0.4]),
        fidelity_row(0, index=1, key_drift_prompt=[0.2, None]),
    ]
    (made,) = summaries([new_row(row, FIDELITY) for row in rows])
    assert error_grids(made) == [[[0.1, 0.1], [0.2, 0.4]], [], [], [], []]
    figure = draw([made])
    assert [axes.images[0].get_array().shape for axes in figure.axes if axes.images] == [(2, 2)]
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["not held"] * 3 + ["reads all"]
    assert figure.axes[0].get_ylabel() == f"{made.label} · 512\nlayer", "one subset needs no name"
    assert figure.get_suptitle() == " · ".join(str(rows[0][name]) for name in ("model", "task", "subset"))
    two = [made, summaries([new_row({**row, "subset": "other"}, FIDELITY) for row in rows])[0]]
    told = [axes.get_ylabel().split("\n")[-2:] for axes in draw(two).axes[:10:5]]
    assert told == [["512 single", "layer"], ["512 other", "layer"]]
    with pytest.raises(UserError, match="no error to draw"):
        draw(summaries([new_row(fidelity_row(0), FIDELITY)]))


def test_what_is_not_read_is_drawn_over_all_layers_and_steps() -> None:
    rows = [fidelity_row(step, key_drift_prompt=[0.1, 0.2, 0.3]) for step in range(4)]
    rows[1]["mass_kept"] = [None, 0.75, None]
    (made,) = summaries([new_row(row, FIDELITY) for row in rows])
    drift, *_, unread = error_grids(made)
    assert [len(drift), len(drift[0])] == [len(unread), len(unread[0])] == [3, 4]
    assert unread == [[0, 0, 0, 0], [0, 0.25, 0, 0], [0, 0, 0, 0]], "a pass that reads all leaves nothing out"
    shown = [axes for axes in draw([made]).axes if axes.images]
    assert [(axes.get_xlim(), axes.get_ylim()) for axes in shown] == [((-0.5, 3.5), (-0.5, 2.5))] * 2
