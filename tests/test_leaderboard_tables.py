"""What the leaderboard prints: whole at every width, the same numbers in every format."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from boards import FAST, LONG, board, entry_of, rows_of, sharing_rows
from rows import make_row

from dllm_bench.commands.leaderboard import Format, stored_rows
from dllm_bench.commands.leaderboard import leaderboard as command
from dllm_bench.commands.plot import plot
from dllm_bench.errors import UserError
from dllm_bench.reporting import tables
from dllm_bench.reporting.leaderboard import leaderboard
from dllm_bench.running.store import Store


def test_unequal_subsets_are_told_to_be_averaged_over_samples() -> None:
    said = "score: mean over samples"
    assert said in "\n".join(board(100, [*rows_of(2), *rows_of(3, subset="multi")]))
    assert said not in "\n".join(board(100, [*rows_of(2), *rows_of(2, subset="multi")]))


def test_as_many_other_subsets_are_told() -> None:
    rows = [
        row
        for names, ctx in (("abc", 512), ("def", 1024))
        for n in names
        for row in rows_of(1, subset=n, nominal_ctx=ctx)
    ]
    assert [line.split()[:3] for line in board(120, rows) if "3 subsets" in line] == [
        ["512", "3", "subsets"],
        ["1k", "3", "subsets"],
    ]


def test_a_cell_names_its_own_subsets() -> None:
    rows = [*rows_of(2), *rows_of(2, subset="multi"), *rows_of(2, nominal_ctx=1024)]
    lines = [line.split() for line in board(120, rows)]
    assert next(line for line in lines if line and line[0] == "512")[1] == "all"
    assert next(line for line in lines if line and line[0] == "1k")[1] == "single"
    assert "| 1k | single | baseline |" in tables.to_markdown(leaderboard(rows))


def test_where_the_table_is_narrow_a_subset_has_a_line_of_its_own() -> None:
    name = "multikey_with_a_long_name"
    rows = [row for subset in ("single", name) for method in ({}, LONG) for row in rows_of(2, **method, subset=subset)]
    narrow = [line.split() for line in board(80, rows, by_subset=True)]
    for subset in ("single", name):
        place = narrow.index(["512", subset])
        assert [line[0] for line in narrow[place + 1 : place + 3]] == ["baseline", "fast_dllm"]
    many = [row for i in range(6) for row in rows_of(2, subset=f"multikey_{i}", nominal_ctx=4096)]
    for width in (80, 160):
        text = "\n".join(board(width, [*rows, *many]))
        assert "…" not in text and "6 subsets" in text, "many subsets are counted, and named below"
        assert "4k: multikey_0, multikey_1, multikey_2," in text
    wide = [line.split()[:3] for line in board(160, rows, by_subset=True)]
    assert all(["512", subset, "baseline"] in wide for subset in ("single", name))


METRICS = [{"strict": 1.0, "flexible": 1.0}, {"strict": 0.0, "flexible": 1.0}]


def test_a_task_with_several_metrics_shows_them_all() -> None:
    rows = [make_row(**{**row, "scores": json.dumps(METRICS[row["index"] % 2])}) for row in rows_of(4)]
    rows += rows_of(2, **FAST, score=None, scores=None, status="oom")
    assert entry_of(rows, "baseline").metrics == {"strict": 0.5, "flexible": 1.0}
    assert entry_of(rows, "fast_dllm").metrics == {} == entry_of(rows_of(2), "baseline").metrics
    wide = [line.split() for line in board(160, rows)]
    assert any({"flexible", "strict"} <= set(line) for line in wide)
    assert next(line for line in wide if "baseline" in line)[5:7] == ["100.0", "50.0"], wide
    narrow = "\n".join(board(80, rows))
    assert "baseline 512: flexible 100.0 %, strict 50.0 %" in " ".join(narrow.split()) and "strict\n" not in narrow
    told = json.loads(tables.to_json(leaderboard(rows)))
    assert [record["metrics"] for record in told] == [{"flexible": 1.0, "strict": 0.5}, {}]
    assert "| flexible % | strict % |" in tables.to_markdown(leaderboard(rows))


def test_scores_of_several_scorer_versions_are_told() -> None:
    mixed = [*rows_of(2), *rows_of(2, **FAST, scorer_version=2)]
    said = "scored by several versions of the scorer"
    assert said in "\n".join(board(160, mixed)) and said not in "\n".join(board(160, rows_of(2, scorer_version=2)))
    failed = rows_of(2, **FAST, score=None, scores=None, scorer_version=None, status="oom")
    assert said not in "\n".join(board(160, [*rows_of(2), *failed]))


@pytest.mark.parametrize("width", [80, 120, 160])
def test_no_table_is_cut(width: int) -> None:
    rows = [*rows_of(8), *rows_of(8, **FAST, decode_seconds=0.0125), *rows_of(8, **LONG, decode_seconds=123.4)]
    rows += rows_of(2, **LONG, nominal_ctx=32768, status="oom", score=None)
    lines = board(width, rows)
    text = "\n".join(lines)
    assert max(len(line) for line in lines) <= width and "…" not in text
    for word in ("tok/s", "NFE", "cache", "×", "+wavefilter", "depthweave_kv", "32k", "failed", "68–100"):
        assert word in text, word
    assert ("canvas" in text) == (width > 80)
    heads = lines.index(next(line for line in lines if "tok/s" in line))
    ends = [line.index("NFE") + 3 for line in lines if "NFE" in line]
    figures = [line for line in lines[heads + 1 :] if line.endswith("3.00 ") or line.rstrip().endswith("3.00")]
    assert figures and all(line[: ends[0]].endswith("12.0") for line in figures), "numbers stand below their head"


@pytest.mark.parametrize("width", [80, 160])
def test_a_long_caveat_is_told_below_the_table(width: int) -> None:
    said = "adapted: another router than the paper's"
    rows = [*rows_of(4), *rows_of(4, method="fast_dllm+other", method_label=f"fast_dllm+other [{said}]")]
    rows += rows_of(4, method="third", method_label="third [short]")
    lines = [line.strip() for line in board(width, rows)]
    assert f"† {said}" in lines and "\n".join(lines).count(said) == 1
    assert any("other†" in line.split("  ")[0] for line in lines)
    assert width == 80 or any(line.startswith("third [short] ") for line in lines), "short ones stay"
    assert f"fast_dllm+other [{said}]" in tables.to_markdown(leaderboard(rows))


def test_the_formats_hold_the_same_numbers() -> None:
    sections = leaderboard([*rows_of(4), *rows_of(4, **FAST, decode_seconds=1.0, cache_bytes_peak=None)])
    told = json.loads(tables.to_json(sections))
    assert [record["method"] for record in told] == ["baseline", "fast_dllm"]
    assert (
        told[1]["speedup"] == 2.0 and told[1]["cache_bytes_peak"] is None and told[1]["useful_tokens_per_second"] == 10
    )
    listed = list(csv.DictReader(io.StringIO(tables.to_csv(sections))))
    assert listed[1]["speedup"] == "2.0" and listed[1]["cache_bytes_peak"] == ""
    lines = tables.to_markdown(sections).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 4
    assert "| 512 | single | fast_dllm | 4 | 0 | 100.0 | 51–100 | 10.00 | 64.00 | 2.00× |" in table[3]


def test_nominal_bytes_stand_beside_the_stored_ones_where_a_method_has_a_formula() -> None:
    rows = rows_of(2, cache_bytes_peak=3_000_000)
    assert "nominal" not in tables.to_markdown(leaderboard(rows)) + "\n".join(board(200, rows))
    held = {"cache_bytes_peak": 2_000_000, "cache_bytes_nominal": 1_500_000.0}
    coded = rows_of(2, method="squeezed", method_label="squeezed", **held)
    assert "| cache MB | nominal MB |" in tables.to_markdown(leaderboard([*rows, *coded]))
    (line,) = [line for line in board(200, [*rows, *coded]) if "squeezed" in line]
    assert line.split()[-2:] == ["2.00", "1.50"]


def test_the_caption_tells_the_decode_settings_that_rule() -> None:
    decode = {"gen_length": 64, "block_length": 32, "threshold": 0.9, "steps": 64, "eps": 1e-3, "temperature": 0.0}
    decode |= {"eos_stop": True, "remasking": "low_confidence", "factor": None, "confidence_dtype": "auto"}
    lines = [line.rstrip() for line in board(160, rows_of(1, decode_settings=json.dumps(decode)))]
    assert "decoded with gen_length 64, block_length 32, threshold 0.9" in lines
    zero = json.dumps({**decode, "threshold": 0.0})
    assert any(line.rstrip().endswith("threshold 0") for line in board(160, rows_of(1, decode_settings=zero)))
    off = json.dumps({**decode, "eos_stop": False})
    assert "eos_stop false" in "\n".join(board(160, rows_of(1, decode_settings=off)))


def test_folders_without_results_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no results in results/runs or results/reference"):
        stored_rows(None)
    with pytest.raises(UserError, match="no folder 'nowhere'"):
        stored_rows(Path("nowhere"))
    store = Store(tmp_path / "results" / "reference")
    store.append(make_row())
    with pytest.raises(UserError, match="there are some in 'results/reference'"):
        stored_rows(Path("results"))
    assert stored_rows(None)[0] == Path("results/reference")
    Store(tmp_path / "results" / "runs").append(make_row())
    assert stored_rows(None)[0] == Path("results/runs")


def test_the_command_prints_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    for index in range(2):
        store.append(make_row(index=index))
    starts = {Format.table: "toy · toy_task", Format.csv: "model,task", Format.json: "[", Format.md: "### toy"}
    for kind, start in starts.items():
        command(tmp_path, kind)
        assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize("width", [80, 160])
def test_shared_state_is_told_at_every_width(width: int) -> None:
    long = [{**row, "method": "acache+wavefilter", "method_label": "acache+wavefilter"} for row in sharing_rows()]
    lines = board(width, [*rows_of(5), *sharing_rows(), *long])
    text = "\n".join(lines)
    assert max(len(line) for line in lines) <= width and "…" not in text
    told = " ".join(text.split())
    assert "prep.: state that samples share" in told and "3.33" in told and "0.250" in told
    in_caption = "acache 512: 2.500 s for 2.5 samples each, 3.33 useful tok/s with it, probe 0.250 s"
    assert (in_caption in told) == (width == 80), "once, in the table or below it"
    plain = "\n".join(board(width, rows_of(5)))
    assert "prep." not in plain and "probe" not in plain


def test_every_format_tells_shared_state_and_nominal_bytes() -> None:
    sections = leaderboard([*rows_of(5), *sharing_rows(), *rows_of(2, **FAST, cache_bytes_nominal=1234.5)])
    told = {record["method"]: record for record in json.loads(tables.to_json(sections))}
    assert told["acache"]["amortised_tokens_per_second"] == pytest.approx(10 / 3)
    assert (told["acache"]["preparation_seconds"], told["acache"]["samples_per_preparation"]) == (2.5, 2.5)
    assert told["fast_dllm"]["cache_bytes_nominal"] == 1234.5 and told["acache"]["cache_bytes_nominal"] is None
    assert told["fast_dllm"]["cache_bytes_peak"] == 3_000_000
    listed = {row["method"]: row for row in csv.DictReader(io.StringIO(tables.to_csv(sections)))}
    assert listed["baseline"]["preparation_seconds"] == "" and listed["acache"]["probe_row_layers"] == "300.0"
    table = [line for line in tables.to_markdown(sections).splitlines() if line.startswith("|")]
    assert "| tok/s w. prep. |" in table[0] and len({line.count("|") for line in table}) == 1


def test_commands_show_the_part_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    for task, subset, ctx in (("toy", "a", 512), ("toy", "b", 512), ("toy", "a", 2048), ("sums", "mini", None)):
        store.append(make_row(task=task, subset=subset, nominal_ctx=ctx))

    def shown(**options: str) -> list[tuple[str, str, str]]:
        command(tmp_path, Format.csv, by_subset=True, **{name: [text] for name, text in options.items()})
        found = csv.DictReader(io.StringIO(capsys.readouterr().out))
        return [(row["task"], row["subset"], row["ctx"]) for row in found]

    assert len(shown()) == 4
    assert shown(task="sums") == [("sums", "mini", "")]
    assert shown(subset="b, mini") == [("sums", "mini", ""), ("toy", "b", "512")]
    assert shown(ctx="0.5k,2048,", subset="a") == [("toy", "a", "512"), ("toy", "a", "2048")]
    for options, said in (
        ({"task": "tiy"}, "unknown task 'tiy': did you mean 'toy'?"),
        ({"task": "toy", "subset": "mini"}, "unknown subset 'mini': valid: a, b"),
        ({"task": ","}, "unknown task '': valid: sums, toy"),
        ({"ctx": "1500"}, "no results at context length '1500': nearest valid is 2k; valid: 512, 2k"),
        ({"task": "sums", "ctx": "512"}, "these results have no context lengths: leave --ctx out"),
    ):
        with pytest.raises(UserError, match=said.replace("?", "[?]")):
            shown(**options)
    figure = tmp_path / "figure.png"
    with pytest.raises(UserError, match="unknown subset 'c'"):
        plot(figure, tmp_path, subset=["c"])
    assert not figure.exists(), "nothing is drawn"


def test_choices_of_a_command_may_be_repeated(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    store = Store(tmp_path)
    for subset in "abc":
        store.append(make_row(subset=subset))
    words = ("leaderboard", str(tmp_path), "--format", "csv", "--by-subset")
    code, out, _ = call(*words, "--subset", "a", "--subset", "c")
    assert code == 0 and [row["subset"] for row in csv.DictReader(io.StringIO(out))] == ["a", "c"]
    code, out, err = call(*words, "--subset", "a,d")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "unknown subset 'd'" in err
