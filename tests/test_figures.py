"""Figures are real pictures, and they show what the rows say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rows import make_row

from dllm_bench.commands.plot import plot
from dllm_bench.errors import UserError
from dllm_bench.reporting import figures
from dllm_bench.reporting.figures import check_ending, draw, needle_grid
from dllm_bench.reporting.leaderboard import Section, leaderboard
from dllm_bench.reporting.style import looks, spread, stacked
from dllm_bench.running.store import Store

METHODS = ("baseline", "fast_dllm", "fast_dllm+wavefilter")


def result_rows(needles: bool = True) -> list[dict[str, Any]]:
    rows = []
    for place, method in enumerate(METHODS):
        for ctx in (512, 2048):
            for index in range(3):
                changes: dict[str, Any] = {"method": method, "method_label": method, "nominal_ctx": ctx, "index": index}
                changes |= {"actual_ctx": ctx - 12 * index, "decode_seconds": ctx / 512 / (place + 1) + 0.01 * index}
                changes |= {"needle_depths": [45.0 * index] if needles else None, "score": float(index != place)}
                rows.append(make_row(**changes))
    return rows


def stored(folder: Path, rows: list[dict[str, Any]], by_subset: bool = False) -> list[Section]:
    store = Store(folder)
    for row in rows:
        store.append(row)
    store.compact()
    return leaderboard(store.read(), by_subset=by_subset)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    stored(made, result_rows())
    return made


@pytest.mark.parametrize(("ending", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_each_ending_gives_its_kind_of_picture(folder: Path, tmp_path: Path, ending: str, head: bytes) -> None:
    file = tmp_path / "new" / f"figure.{ending}"
    plot(file, folder)
    assert file.read_bytes().startswith(head) and file.stat().st_size > 10_000
    if ending == "png":
        pixels = matplotlib.image.imread(file)
        assert pixels.shape[:2] == (1200, 2000)
        assert len({tuple(pixel) for pixel in pixels[::7, ::7, :3].reshape(-1, 3).round(2)}) > 50, "an empty picture"
    if ending == "svg":
        assert "fast_dllm" in file.read_text(encoding="utf-8") or "<use" in file.read_text(encoding="utf-8")


def test_equal_results_give_an_equal_file(folder: Path, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot(tmp_path / name, folder)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def panels(sections: list[Section]) -> list[Any]:
    figure = draw(sections)
    found: list[Any] = list(figure.axes)
    for part in figure.subfigs:
        found += [axes for axes in _axes(part) if axes not in found]
    return found


def _axes(part: Any) -> list[Any]:
    return [*part.axes, *(axes for inner in part.subfigs for axes in _axes(inner))]


def test_lines_stand_over_the_actual_context(folder: Path) -> None:
    axes = panels(leaderboard(Store(folder).read()))
    score = next(a for a in axes if a.get_ylabel() == "score in %")
    speed = next(a for a in axes if a.get_ylabel().startswith("useful tokens"))
    lines = {line.get_color(): line for line in score.lines}
    assert len(lines) == 3 and "#000000" in lines
    assert list(lines["#000000"].get_xdata()) == [500.0, 2036.0], "means of the actual lengths"
    assert list(lines["#000000"].get_ydata()) == pytest.approx([200 / 3] * 2)
    assert list(speed.lines[0].get_ydata()) == pytest.approx([30 / 3.03, 30 / 12.03])
    assert [tick.get_text() for tick in score.get_xticklabels()] == ["256", "512", "1k", "2k", "4k"]
    names = {text.get_text().replace("\n", "") for text in score.texts}
    assert names == set(METHODS)
    assert len(score.collections) == 3, "a band per method"


def test_heat_maps_share_one_scale(folder: Path) -> None:
    axes = panels(leaderboard(Store(folder).read()))
    images = [image for one in axes for image in one.images]
    assert len(images) == 3 and {image.get_clim() for image in images} == {(0, 100)}


def test_a_needle_counts_in_its_own_bin() -> None:
    rows = [
        make_row(index=0, needle_depths=[0.0, 99.9], score=1.0),
        make_row(index=1, needle_depths=[5.0], score=0.0),
        make_row(index=2, needle_depths=[100.0], score=1.0),
        make_row(index=3, needle_depths=[50.0], score=None, status="oom"),
    ]
    filled = [{**dict.fromkeys(COLUMNS), **row} for row in rows]
    grid = needle_grid(leaderboard(filled)[0].cells[0].entries)
    assert grid is not None and grid.contexts == (512,)
    assert [row[0] for row in grid.values] == [50.0, *[None] * 8, 100.0]


COLUMNS = ("model_revision", "rope_scaling", "first_block_seconds", "memory_peak_bytes")


def test_tasks_without_needles_have_no_heat_map(tmp_path: Path) -> None:
    sections = stored(tmp_path, result_rows(needles=False))
    assert not [image for axes in panels(sections) for image in axes.images]


def test_samples_that_all_failed_leave_no_point(tmp_path: Path) -> None:
    gone = {"score": None, "decode_seconds": None, "useful_tokens": None, "status": "oom", "needle_depths": None}
    sections = stored(tmp_path, [make_row(index=0), make_row(index=0, nominal_ctx=1024, actual_ctx=1000, **gone)])
    score = panels(sections)[0]
    assert [list(line.get_xdata()) for line in score.lines] == [[500.0]]


def test_contexts_with_other_subsets_are_no_curve(tmp_path: Path) -> None:
    sections = stored(
        tmp_path,
        [
            *(make_row(subset=subset) for subset in ("a", "b", "c", "d")),
            make_row(subset="a", nominal_ctx=2048, actual_ctx=2000),
        ],
    )
    titles = [block.title.rpartition(" · ")[2] for section in sections for block in figures._blocks(section)]
    assert titles == ["4 subsets", "a"]


def test_results_of_one_method_have_a_line_per_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caveat = {"method": "m", "method_label": "m [adapted: a router that is told at some length]"}
    rows = [
        *(make_row(subset=s, nominal_ctx=c, actual_ctx=c - 2, **caveat) for s in ("a", "b") for c in (512, 2048)),
        *(make_row(task="other", subset=s, method_label=m, method=m) for s in ("a", "b") for m in METHODS),
    ]
    stored(tmp_path, rows)
    drawn: list[Section] = []
    monkeypatch.setattr(figures, "save", lambda sections, file: drawn.extend(sections))
    plot(tmp_path / "one.png", tmp_path)
    blocks = [block for section in drawn for block in figures._blocks(section)]
    lengths = [{name: [e.actual_ctx for e in entries] for name, entries in block.curves.items()} for block in blocks]
    assert lengths == [{name: [500.0] for name in METHODS}, {"a": [510.0, 2046.0], "b": [510.0, 2046.0]}]
    assert blocks[1].title.endswith(" · m†"), "a long caveat is no part of a title"
    assert blocks[1].notes == ["† adapted: a router that is told at some length"]


def test_points_at_several_lengths_are_no_rows_of_dots(tmp_path: Path) -> None:
    rows = [make_row(subset="a"), make_row(subset="b", nominal_ctx=2048, actual_ctx=2000)]
    made = draw(stored(tmp_path, rows, by_subset=True))
    assert made.subfigs[0].axes[0].get_xlabel() == "actual context in tokens"


def test_many_lines_make_a_taller_figure(tmp_path: Path) -> None:
    rows = [make_row(subset=f"set_{i}", nominal_ctx=c, actual_ctx=c) for i in range(30) for c in (512, 2048)]
    assert draw(stored(tmp_path, rows, by_subset=True)).get_size_inches()[1] == pytest.approx(1 + 0.22 * 30)


def test_many_subsets_of_one_length_make_a_taller_figure(tmp_path: Path) -> None:
    rows = [make_row(subset=f"set_{i}") for i in range(30)]
    made = draw(stored(tmp_path, rows, by_subset=True))
    score = made.subfigs[0].axes[0]
    assert len(score.get_yticklabels()) == 30 and made.get_size_inches()[1] == 7.0


def test_a_place_that_cannot_be_written_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match=r"^cannot write '.*figure.png' \(.+\): name another --out$"):
        plot(tmp_path / "file" / "figure.png", folder)


def test_a_bad_ending_is_one_line() -> None:
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf: did you mean 'fig\.png'"):
        check_ending(Path("fig.pgn"))
    with pytest.raises(UserError, match=r"did you mean 'fig\.png'"):
        check_ending(Path("fig"))
    with pytest.raises(UserError, match="must end in"):
        plot(Path("fig.txt"), Path("no/such/folder"))


def test_looks_are_fixed_and_different() -> None:
    names = ["fast_dllm", "acache", "baseline", *(f"m{i}" for i in range(8))]
    made = looks(names, "baseline")
    assert made == looks(reversed(names), "baseline") and next(iter(made)) == "baseline"
    assert len({(look.colour, look.line) for look in made.values()}) == len(names)


def test_labels_do_not_overlap() -> None:
    places = spread([1.0, 1.0, 0.98, 0.1], [0.1] * 4)
    ordered = sorted(places)
    assert all(b - a >= 0.0999 for a, b in pairwise(ordered)) and max(places) <= 0.951
    assert stacked("fast_dllm+depthweave_kv+wavefilter") == "fast_dllm\n+depthweave_kv\n+wavefilter"
    assert stacked("fast_dllm") == "fast_dllm" and stacked("fast_dllm(a=1)") == "fast_dllm(a=1)"
    caveat = "fast_dllm+depthweave_kv [adapted: training-free router and gates]"
    assert stacked(caveat) == "fast_dllm\n+depthweave_kv\n[adapted:\ntraining-free\nrouter and\ngates]"
    assert stacked("fast_dllm [threshold=0.9, steps=4]") == "fast_dllm\n[threshold=0.9,\nsteps=4]"
    assert stacked("fast_dllm(mode=prefix,other=1)") == "fast_dllm\n(mode=prefix,\nother=1)"


def test_a_long_caveat_is_told_once_below_the_panels(tmp_path: Path) -> None:
    rows = result_rows(needles=False)
    for row in rows:
        row["method_label"] += " [adapted: a router of our own]" if row["method"] == METHODS[1] else ""
    made = draw(stored(tmp_path, rows))
    assert made.subfigs[0].get_supxlabel() == "† adapted: a router of our own"
    assert METHODS[1] + "†" in [text.get_text().replace("\n", "") for text in made.subfigs[0].axes[0].texts]


def test_one_length_is_drawn_as_rows_of_dots(tmp_path: Path) -> None:
    rows = [row for row in result_rows(needles=False) if row["nominal_ctx"] == 512]
    made = draw(stored(tmp_path, rows))
    score, speed = made.subfigs[0].axes
    assert [text.get_text() for text in score.get_yticklabels()] == list(METHODS)
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in score.lines]
    assert [round(x, 1) for x, _ in dots] == [66.7, 66.7, 66.7] and [y for _, y in dots] == [0, 1, 2]
    entries = {e.label: e for cell in leaderboard(Store(tmp_path).read())[0].cells for e in cell.entries}
    speeds = [line.get_xdata()[0] for line in speed.lines]
    assert speeds == [entries[name].useful_tokens_per_second for name in METHODS]
    assert score.yaxis_inverted() and len(score.collections) == 3, "the first is on top, each with an interval"


def test_unequal_samples_and_work_outside_of_decoding_are_told(tmp_path: Path) -> None:
    rows = result_rows(needles=False)
    assert not draw(stored(tmp_path / "alike", rows)).subfigs[0].get_supxlabel()
    some = [row for row in rows if row["nominal_ctx"] == 512 or row["index"] < 2]
    shared = [{**row, "preparation_seconds": 1.0} if row["method"] == "fast_dllm" else row for row in some]
    assert draw(stored(tmp_path / "unlike", shared)).subfigs[0].get_supxlabel().splitlines() == [
        "samples: 3 at 512, 2 at 2k",
        "speed leaves out making the state that samples share: fast_dllm",
    ]
