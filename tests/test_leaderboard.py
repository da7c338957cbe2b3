"""The leaderboard compares like with like, and its numbers are right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from boards import FAST, entry_of, only, rows_of, sharing_rows
from rows import make_row

from dllm_bench.reporting import tables
from dllm_bench.reporting.leaderboard import leaderboard
from dllm_bench.reporting.statistics import mean_interval, ratio, ratio_interval, t_quantile, wilson
from dllm_bench.running.measure import percentile


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


def test_no_method_hides_decode_settings_that_are_not_the_same_for_all() -> None:
    settings = [{"block_length": 32, "gen_length": 64, "steps": 64, "threshold": t} for t in (0.9, 0.5)]
    rows = [
        *rows_of(2, decode_settings=json.dumps(settings[0])),
        *rows_of(2, **FAST, decode_settings=json.dumps(settings[1])),
    ]
    (cell,) = only(rows).cells
    assert [entry.label for entry in cell.entries] == ["baseline [threshold=0.9]", "fast_dllm [threshold=0.5]"]
    assert tables.describe_decode(cell.entries) == "gen_length 64, block_length 32", "steps rule nothing here"


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
