"""The leaderboard compares like with like, and its numbers are right."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rows import make_row

from dllm_bench.commands.leaderboard import Format, stored_rows
from dllm_bench.commands.leaderboard import leaderboard as command
from dllm_bench.errors import UserError
from dllm_bench.reporting import tables
from dllm_bench.reporting.leaderboard import Section, leaderboard
from dllm_bench.reporting.statistics import mean_interval, ratio, ratio_interval, t_quantile, wilson
from dllm_bench.running.measure import percentile
from dllm_bench.running.store import Store

FAST = {"method": "fast_dllm", "method_label": "fast_dllm"}


def rows_of(n: int = 4, **changes: Any) -> list[dict[str, Any]]:
    return [
        make_row(
            **{
                "index": index,
                "needle_depths": None,
                "first_block_seconds": None,
                "memory_peak_bytes": None,
                "model_revision": None,
                "rope_scaling": None,
                **changes,
            }
        )
        for index in range(n)
    ]


def only(rows: list[dict[str, Any]]) -> Section:
    (section,) = leaderboard(rows)
    return section


def entry_of(rows: list[dict[str, Any]], method: str) -> Any:
    (cell,) = only(rows).cells
    return next(entry for entry in cell.entries if entry.method == method)


# Wilson: Brown, Cai and DasGupta's formula, figures from statsmodels 0.14 proportion_confint(method="wilson")
@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 8, 0.0, 0.3244076), (8, 8, 0.6755924, 1.0), (4, 8, 0.2152161, 0.7847839), (450, 500, 0.8705781, 0.9233224)],
)
def test_wilson_intervals(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right / n, n) == pytest.approx((low, high), abs=1e-6)
    assert mean_interval([1.0] * right + [0.0] * (n - right)) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("df", "t"), [(1, 12.706205), (2, 4.302653), (3, 3.182446), (9, 2.262157), (30, 2.042272)])
def test_t_quantiles(df: int, t: float) -> None:
    assert t_quantile(0.95, df) == pytest.approx(t, abs=1e-5)


def test_intervals_of_partial_scores() -> None:
    assert mean_interval([0.25, 0.5, 0.75]) == pytest.approx((0.0, 1.0)), "0.5 ± 4.303 * 0.25 / sqrt(3), clipped"
    assert mean_interval([0.4, 0.5, 0.6, 0.5]) == pytest.approx((0.370077, 0.629923), abs=1e-6)
    assert mean_interval([0.5] * 8) == pytest.approx(wilson(0.5, 8))
    assert mean_interval([]) is None


def test_ratios_are_ratios_of_sums() -> None:
    assert ratio([1, 9], [1, 1]) == 5 and ratio([2, 3], [1, 4]) == 1, "the mean of the ratios would be 1.375"
    assert ratio([], []) is None and ratio([1], [0]) is None
    assert ratio_interval([1.0], [1.0]) is None
    assert ratio_interval([2.0, 4.0], [1.0, 2.0]) == pytest.approx((2.0, 2.0))
    assert percentile([1, 2, 3, 10], 95) == pytest.approx(8.95) and percentile([], 50) is None


def test_rates_sum_tokens_and_seconds_first() -> None:
    rows = [
        *rows_of(1, useful_tokens=3, decode_seconds=1.0),
        make_row(**{**rows_of()[1], "useful_tokens": 2, "decode_seconds": 4.0}),
    ]
    entry = entry_of(rows, "baseline")
    assert entry.useful_tokens_per_second == 1.0 and entry.canvas_tokens_per_second == 128 / 5


def test_an_empty_answer_counts_as_no_token() -> None:
    entry = entry_of(rows_of(2, useful_tokens=0, canvas_tokens=8, decode_seconds=1.0), "baseline")
    assert entry.useful_tokens_per_second == 0.0 and entry.canvas_tokens_per_second == 8.0


def test_the_speed_up_is_taken_on_the_same_samples() -> None:
    slow = [make_row(**{**row, "decode_seconds": float(row["index"] + 1)}) for row in rows_of(4)]
    fast = rows_of(3, **FAST, decode_seconds=1.0)
    fast[0]["prompt_hash"] = "another question"
    entry = entry_of([*slow, *fast], "fast_dllm")
    assert (entry.speedup, entry.speedup_samples) == ((2 + 3) / 2, 2)
    assert entry_of([*slow, *fast], "baseline").speedup == 1.0
    apart = entry_of([*rows_of(2), *rows_of(2, **FAST, seed=7)], "fast_dllm")
    assert (apart.speedup, apart.speedup_samples) == (None, 0)


def test_the_baseline_with_the_same_decode_settings_is_the_reference() -> None:
    quota = json.dumps({"gen_length": 64, "steps": 64})
    rows = [*rows_of(4, decode_seconds=8.0, decode_settings=quota), *rows_of(2, **FAST, decode_seconds=1.0)]
    entry = entry_of(rows, "fast_dllm")
    assert (entry.speedup, entry.speedup_same_decode) == (8.0, False)
    entry = entry_of([*rows, *rows_of(2, decode_seconds=2.0)], "fast_dllm")
    assert (entry.speedup, entry.speedup_same_decode) == (2.0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "Other CPU"},
        {"threads": 16},
        {"dtype": "bfloat16"},
        {"device_type": "cuda", "device_name": "GPU"},
        {"model_fingerprint": "beef"},
        {"package_version": "0.2.0"},
        {"task_options": '{"words": 2}'},
    ],
)
def test_what_differs_is_never_averaged(change: dict[str, Any]) -> None:
    sections = leaderboard([*rows_of(4, decode_seconds=1.0), *rows_of(4, **change, **FAST, decode_seconds=9.0)])
    assert len(sections) == 2 and len({section.setting.title for section in sections}) == 2
    entries = [entry for section in sections for cell in section.cells for entry in cell.entries]
    assert {(entry.method, entry.speedup) for entry in entries} == {("baseline", 1.0), ("fast_dllm", None)}


def test_threads_do_not_split_an_accelerator() -> None:
    gpu = {"device_type": "cuda", "device_name": "GPU"}
    assert len(only([*rows_of(2, **gpu, threads=4), *rows_of(2, **gpu, **FAST, threads=8)]).cells) == 1


def test_a_missing_measure_stays_missing() -> None:
    entry = entry_of(rows_of(2, cache_bytes_peak=None, decode_seconds=None, score=None, status="oom"), "baseline")
    assert (entry.n, entry.failed, entry.accuracy, entry.cache_bytes_peak) == (0, 2, None, None)
    assert entry.useful_tokens_per_second is None and entry.speedup is None
    mixed = [*rows_of(1, cache_bytes_peak=0), make_row(**{**rows_of(2)[1], "cache_bytes_peak": None})]
    assert entry_of(mixed, "baseline").cache_bytes_peak == 0


def test_subsets_are_taken_together_only_where_all_methods_ran_them() -> None:
    both = [
        *rows_of(2),
        *rows_of(2, subset="multi", score=0.0),
        *rows_of(2, **FAST),
        *rows_of(2, **FAST, subset="multi"),
    ]
    assert [(cell.subset, cell.entries[0].n) for cell in only(both).cells] == [(None, 4)]
    assert [cell.subset for cell in only(both[:6]).cells] == ["multi", "single"]
    assert [cell.subset for cell in leaderboard(both, by_subset=True)[0].cells] == ["multi", "single"]
    longer = [*rows_of(2, nominal_ctx=1024), *rows_of(2, nominal_ctx=1024, subset="multi")]
    cells = [(cell.ctx, cell.subset) for cell in only([*both[:6], *longer]).cells]
    assert cells == [(512, "multi"), (512, "single"), (1024, "multi"), (1024, "single")], "at all contexts alike"


def test_subsets_with_a_file_each_share_a_table_and_two_versions_of_one_do_not() -> None:
    files = [*rows_of(2, task_data="file:a:1"), *rows_of(2, subset="multi", task_data="file:b:2")]
    section = only(files)
    assert section.subsets == ("multi", "single") and section.setting.marks == ()
    both = leaderboard([*files, *rows_of(2, task_data="file:a:3", **FAST)])
    assert [s.setting.marks for s in both] == [(f"task_data file:{name}",) for name in ("a:1", "a:3", "b:2")]


def test_tables_on_other_data_say_so() -> None:
    old = rows_of(2, package_version="0.1", task_data="file:a:1")
    new = rows_of(2, package_version="0.2", task_data="file:a:3")
    marks = [section.setting.marks for section in leaderboard([*old, *new])]
    assert marks == [(f"package_version 0.{i}", f"task_data file:a:{d}") for i, d in ((1, 1), (2, 3))]


def test_budgets_of_subsets_are_no_part_of_a_label() -> None:
    budgets = {"short": 32, "long": 64}

    def rows(steps: dict[str, int]) -> list[dict[str, Any]]:
        return [
            row
            for subset, gen in budgets.items()
            for method in ({}, FAST)
            for row in rows_of(
                2,
                **method,
                subset=subset,
                decode_settings=json.dumps({"gen_length": gen, "block_length": 32, "steps": steps[subset]}),
            )
        ]

    def labels(rows: list[dict[str, Any]]) -> set[str]:
        section = only(rows)
        assert [cell.subset for cell in section.cells] == ["long", "short"]
        return {entry.label for cell in section.cells for entry in cell.entries}

    assert labels(rows(budgets)) == {"baseline", "fast_dllm"}
    other = labels(rows({"short": 8, "long": 64}))
    assert other == {f"{m} [steps={n}]" for m in ("baseline", "fast_dllm") for n in (8, 64)}, "another pace is told"


def test_unequal_subsets_are_told_to_be_averaged_over_samples() -> None:
    said = "score: mean over samples"
    assert said in "\n".join(board(100, [*rows_of(2), *rows_of(3, subset="multi")]))
    assert said not in "\n".join(board(100, [*rows_of(2), *rows_of(2, subset="multi")]))


def test_the_baseline_stands_first_and_alike_labels_are_told_apart() -> None:
    other = json.dumps({"block_length": 32, "gen_length": 64, "threshold": 0.5})
    rows = [*rows_of(2, **FAST), *rows_of(2, **FAST, decode_settings=other, decode_seconds=1.0), *rows_of(2, score=0.0)]
    (cell,) = only(rows).cells
    assert [entry.label for entry in cell.entries] == [
        *["baseline [threshold=0.9]", "fast_dllm [threshold=0.5]", "fast_dllm [threshold=0.9]"]
    ]


def test_labels_tell_what_rules_and_nothing_else() -> None:
    def labels(*settings: dict[str, Any]) -> set[str]:
        rows = [row for one in settings for row in rows_of(1, decode_settings=json.dumps({"gen_length": 64, **one}))]
        return {entry.label for entry in only(rows).cells[0].entries}

    quota, threshold = {"steps": 16, "threshold": None}, {"steps": 64, "threshold": 0.9}
    assert labels(quota, threshold) == {"baseline [steps=16]", "baseline [threshold=0.9]"}
    assert labels(quota, {**quota, "steps": 64}) == {"baseline [steps=16]", "baseline [steps=64]"}
    assert labels({**quota, "steps": 64}, threshold) == {"baseline [steps=64]", "baseline [threshold=0.9]"}
    # where that leaves two alike, all is told
    both = labels(quota, threshold, {**threshold, "steps": 32})
    assert both == {f"baseline [steps={s}, threshold={t}]" for s, t in ((16, None), (64, 0.9), (32, 0.9))}


def test_brief_labels_stand_where_subsets_have_their_own_budgets() -> None:
    rows = [
        row
        for subset, length in (("a", 32), ("b", 64))
        for rule in ({"threshold": 0.9, "tokens_per_pass": None}, {"threshold": None, "tokens_per_pass": 4})
        for row in rows_of(1, subset=subset, decode_settings=json.dumps({"gen_length": length, **rule}))
    ]
    labels = {entry.label for cell in only(rows).cells for entry in cell.entries}
    assert labels == {"baseline [threshold=0.9]", "baseline [tokens_per_pass=4]"}


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


def test_no_method_hides_decode_settings_that_are_not_the_same_for_all() -> None:
    settings = [{"block_length": 32, "gen_length": 64, "steps": 64, "threshold": t} for t in (0.9, 0.5)]
    rows = [
        *rows_of(2, decode_settings=json.dumps(settings[0])),
        *rows_of(2, **FAST, decode_settings=json.dumps(settings[1])),
    ]
    (cell,) = only(rows).cells
    assert [entry.label for entry in cell.entries] == ["baseline [threshold=0.9]", "fast_dllm [threshold=0.5]"]
    assert tables.describe_decode(cell.entries) == "gen_length 64, block_length 32", "steps rule nothing here"


def test_a_cell_names_its_own_subsets() -> None:
    rows = [*rows_of(2), *rows_of(2, subset="multi"), *rows_of(2, nominal_ctx=1024)]
    lines = [line.split() for line in board(120, rows)]
    assert next(line for line in lines if line and line[0] == "512")[1] == "all"
    assert next(line for line in lines if line and line[0] == "1k")[1] == "single"
    assert "| 1k | single | baseline |" in tables.to_markdown(leaderboard(rows))


def board(width: int, rows: list[dict[str, Any]], *, by_subset: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    tables.print_sections(leaderboard(rows, by_subset=by_subset), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


LONG = {"method": "fast_dllm+depthweave_kv+wavefilter", "method_label": "fast_dllm+depthweave_kv+wavefilter"}


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
        command(tmp_path, kind, False)
        assert capsys.readouterr().out.startswith(start)


# -- state that samples share ---------------------------------------------------------------------------------------

SHARING = {"method": "acache", "method_label": "acache", "probe_seconds": 0.25, "probe_row_layers": 300}


def sharing_rows() -> list[dict[str, Any]]:
    """Five samples of 10 tokens in 2 s each; two preparations of 5 s in all, for three and two of them."""
    rows = rows_of(5, **SHARING, shared_bytes=1000)
    for row, seconds, count in zip(rows, (4.0, None, None, 1.0, None), (1, 2, 3, 1, 2), strict=True):
        row |= {"preparation_seconds": seconds, "preparation_row_layers": seconds and 600, "shared_requests": count}
    return rows


def test_the_amortised_rate_bears_every_preparation_once() -> None:
    entry = entry_of([*rows_of(5), *sharing_rows()], "acache")
    assert (entry.useful_tokens_per_second, entry.amortised_tokens_per_second) == (5.0, 50 / (10 + 5))
    assert (entry.preparation_seconds, entry.preparation_row_layers, entry.samples_per_preparation) == (2.5, 600, 2.5)
    assert (entry.probe_seconds, entry.probe_row_layers, entry.shared_bytes) == (0.25, 300, 1000)
    assert entry.speedup == 1.0, "of decode seconds alone"
    other = entry_of([*rows_of(5), *sharing_rows()], "baseline")
    assert {other.amortised_tokens_per_second, other.preparation_seconds, other.samples_per_preparation} == {None}
    assert {other.probe_seconds, other.shared_bytes, other.cache_bytes_nominal} == {None}


def test_a_preparation_counts_though_its_sample_failed() -> None:
    rows = sharing_rows()
    rows[0] |= {"status": "oom", "decode_seconds": None, "useful_tokens": None, "score": None}
    assert entry_of(rows, "acache").amortised_tokens_per_second == 40 / (8 + 5)


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
