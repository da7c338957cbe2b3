"""The runner computes what is missing, tells the truth in its rows, and keeps them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import EOS, ToyGenerate, ToyModel, ToyTask, digest, padded

from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.running import measure
from dllm_bench.running.environment import Environment, _checkout
from dllm_bench.running.lengths import ctx_name, parse_ctx
from dllm_bench.running.runner import Cell, Runner, warm_up_settings
from dllm_bench.running.spec import Request, RunSpec, check, decode_settings, expand
from dllm_bench.running.store import Store
from dllm_bench.running.task import Sample

TESTS = Path(__file__).parent
HERE = Environment("Toy CPU", 2, "2", None, "3", "Linux", None, None)


class Silent:
    """Events that only remember warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def begin(self, cell: Cell, missing: int) -> None:
        pass

    def row(self, row: Mapping[str, Any]) -> None:
        pass

    def end(self, cell: Cell) -> None:
        pass

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def cells_of(request: Request, model: Any = None) -> list[Cell]:
    model = model or ToyModel()
    plan = check(request)
    task = plan.task_class(model.codec, plan.task_options)
    return [Cell(spec, request.samples) for spec in expand(plan, model, task, "0.1.0")]


def one_request(**changes: Any) -> Request:
    values = {"methods": ["baseline"], "task": "toy_task", "ctxs": ["256"], "samples": 4, **changes}
    return Request(**values)


def run(folder: Path, generate: Any, *, fresh: bool = False, model: Any = None, **changes: Any) -> list[dict[str, Any]]:
    """Runs a request in `folder`; returns all rows there, in order of subset, context and index."""
    model = model or ToyModel()
    request = one_request(**changes)
    task = ToyTask(model.codec, check(request).task_options)
    store = Store(folder)
    Runner(model, task, store, generate, HERE, Silent()).run(cells_of(request, model), fresh=fresh)
    return sorted(store.read(), key=lambda row: (row["subset"], row["nominal_ctx"], row["method"], row["index"]))


def test_a_row_tells_the_whole_sample(tmp_path: Path) -> None:
    row = run(tmp_path, ToyGenerate())[2]
    assert (row["status"], row["score"], row["text"], row["stopped_by"]) == ("ok", 1.0, "egg", "eos")
    assert (row["useful_tokens"], row["canvas_tokens"], row["gen_length"]) == (3, 64, 64)
    assert (row["decode_seconds"], row["dense_seconds"], row["partial_seconds"]) == (0.25, 0.125, 0.0625)
    assert row["pass_p50_seconds"] == 0.03125 and row["first_block_seconds"] is None
    assert row["pass_p95_seconds"] == pytest.approx(0.115625)
    assert (row["nominal_ctx"], row["actual_ctx"], row["prompt_tokens"]) == (256, 256, 192)
    assert (row["needle_depths"], row["needle_starts"], row["needle_ends"]) == ([20.0], [4], [7])
    assert row["cache_bytes_peak"] == 4096 and row["device_name"] == "Toy CPU" and row["cuda_version"] is None
    assert row["tokenisation_seconds"] > 0 and row["error"] is None


def test_a_rerun_computes_only_what_is_missing(tmp_path: Path) -> None:
    first = run(tmp_path, generate := ToyGenerate(), samples=2)
    assert generate.calls == [0, 1] and generate.warm_ups == 1
    again = run(tmp_path, generate := ToyGenerate(), samples=4)
    assert generate.calls == [2, 3] and again[:2] == first
    run(tmp_path, generate := ToyGenerate(), samples=4)
    assert generate.calls == [] and generate.warm_ups == 0


def test_fresh_starts_over_for_the_asked_cells_only(tmp_path: Path) -> None:
    run(tmp_path, ToyGenerate(), ctxs=["256,512"])
    rows = run(tmp_path, generate := ToyGenerate(lambda i: padded("ham", 64)), ctxs=["256"], samples=2, fresh=True)
    assert generate.calls == [0, 1]
    assert [(r["nominal_ctx"], r["index"], r["score"]) for r in rows if r["nominal_ctx"] == 256] == [
        *[(256, 0, 0.0), (256, 1, 0.0), (256, 2, 1.0), (256, 3, 1.0)]
    ]
    assert [r["score"] for r in rows if r["nominal_ctx"] == 512] == [1.0] * 4


def test_a_fresh_run_that_was_stopped_goes_on_without_the_old_rows(tmp_path: Path) -> None:
    run(tmp_path, ToyGenerate(), ctxs=["256,512"])

    def stop(index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ToyGenerate(stop), ctxs=["256,512"], fresh=True)
    run(tmp_path, generate := ToyGenerate(), ctxs=["256,512"])
    assert generate.calls == [1, 2, 3, 0, 1, 2, 3]


def test_an_empty_answer_has_no_useful_tokens(tmp_path: Path) -> None:
    row = run(tmp_path, ToyGenerate(lambda i: [EOS] * 64), samples=1)[0]
    assert (row["useful_tokens"], row["canvas_tokens"], row["text"], row["score"]) == (0, 64, "", 0.0)
    full = run(tmp_path, ToyGenerate(lambda i: [ord("a")] * 64), samples=1, fresh=True)[0]
    assert (full["useful_tokens"], full["stopped_by"]) == (64, "length")


def test_the_text_ends_at_eos_and_at_the_first_stop_string(tmp_path: Path) -> None:
    said = {0: "egg\nham", 1: "ham egg", 2: "egg\x00egg"}
    rows = run(tmp_path, ToyGenerate(lambda i: padded(said[i], 64)), samples=3)
    assert [(r["text"], r["score"], r["stopped_by"]) for r in rows] == [
        *[("egg", 1.0, "stop_string"), ("ham egg", 0.0, "eos"), ("egg", 1.0, "eos")]
    ]


def test_masks_left_fail_the_sample_and_are_not_tried_again(tmp_path: Path) -> None:
    row = run(tmp_path, ToyGenerate(masks_left=2), samples=1)[0]
    assert (row["status"], row["score"], row["masks_left"]) == ("masks_left", 0.0, 2)
    assert row["decode_seconds"] == 0.25
    run(tmp_path, generate := ToyGenerate(), samples=1)
    assert generate.calls == []


def test_failed_samples_are_rows_and_are_tried_again(tmp_path: Path) -> None:
    def answer(index: int) -> None:
        if index == 1:
            raise torch.OutOfMemoryError("no room")
        if index == 2:
            raise ZeroDivisionError("a\nbug")
        if index == 3:
            raise UserError("this prompt holds the mask id")

    rows = run(tmp_path, ToyGenerate(answer))
    assert [row["status"] for row in rows] == ["ok", "oom", "error", "error"]
    assert rows[2]["error"] == "ZeroDivisionError: a bug"
    for row in rows[1:]:
        assert row["score"] is None and row["useful_tokens"] is None and row["decode_seconds"] is None
        assert row["prompt_tokens"] == 192
    rows = run(tmp_path, generate := ToyGenerate())
    assert generate.calls == [1, 2, 3] and [row["status"] for row in rows] == ["ok"] * 4


def test_memory_errors_of_torch_on_the_cpu_are_known() -> None:
    assert measure.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert measure.is_out_of_memory(MemoryError()) and not measure.is_out_of_memory(RuntimeError("shapes differ"))


def test_what_cannot_be_met_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with pytest.raises(UserError, match="too small"):
        run(folder, ToyGenerate(), ctxs=["256", "64"])

    def refuse(index: int) -> None:
        raise UserError("this method needs blocks")

    with pytest.raises(UserError, match="needs blocks"):
        run(folder, ToyGenerate(refuse))
    assert not folder.exists()


def test_too_many_samples_are_refused_and_a_broken_one_is_told_by_its_row(tmp_path: Path) -> None:
    class Three(ToyTask):
        def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
            if index > 2:
                raise UserError(f"there is no sample {index}: nearest valid is 2")
            if index == 2:
                raise ZeroDivisionError
            return super().sample(subset, index, ctx=ctx, gen_length=gen_length, seed=seed)

    model, store, generate = ToyModel(), Store(tmp_path / "runs"), ToyGenerate()
    runner = Runner(model, Three(model.codec), store, generate, HERE, Silent())
    with pytest.raises(UserError, match="no sample 4"):
        runner.run(cells_of(one_request(samples=5), model))
    assert not generate.calls and not store.root.exists()
    runner.run(cells_of(one_request(samples=3), model))
    assert [row["status"] for row in store.read()] == ["ok", "ok", "error"]


def test_a_memory_peak_that_cannot_be_measured_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_CLEAR", tmp_path / "absent" / "clear_refs")
    row = run(tmp_path / "runs", ToyGenerate(), samples=1)[0]
    assert row["memory_peak_bytes"] is None and row["memory_peak_kind"] is None


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system keeps no resettable peak")
def test_the_memory_peak_forgets_earlier_samples() -> None:
    peak = measure.MemoryPeak("cpu")
    peak.start()
    big = torch.ones(50_000_000)
    with_big = peak.stop()
    del big
    peak.start()
    after = peak.stop()
    assert with_big is not None and after is not None and with_big - after > 150_000_000


def test_contexts_beyond_the_model_are_marked_with_one_warning(tmp_path: Path) -> None:
    model, events = ToyModel(max_positions=300), Silent()
    cells = cells_of(one_request(ctxs=["256,512,1k"], samples=1), model)
    Runner(model, ToyTask(model.codec), Store(tmp_path), ToyGenerate(), HERE, events).run(cells)
    assert [row["beyond_max_positions"] for row in Store(tmp_path).read()] == [False, True, True]
    assert len(events.warnings) == 1 and "512" in events.warnings[0] and "300" in events.warnings[0]


def test_samples_that_take_more_than_their_context_are_told_of_before_anything_runs(tmp_path: Path) -> None:
    class Wide(ToyTask):
        def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
            assert ctx is not None
            return super().sample(subset, index, ctx=ctx + 8 * (ctx > 256), gen_length=gen_length, seed=seed)

    model, events, told = ToyModel(), Silent(), []
    generate = ToyGenerate(lambda index: told.append(list(events.warnings)))
    cells = cells_of(one_request(ctxs=["256,512"], samples=1), model)
    Runner(model, Wide(model.codec), Store(tmp_path), generate, HERE, events).run(cells)
    [warning] = events.warnings
    assert "512 take more than their context" in warning and "520 tokens" in warning
    assert told == [[warning], [warning]]


def test_each_sample_has_its_own_seed_that_never_changes(tmp_path: Path) -> None:
    run(tmp_path, one := ToyGenerate(), samples=3)
    run(tmp_path, other := ToyGenerate(), samples=3, methods=["fast_dllm"])
    assert one.seeds == other.seeds and len(set(one.seeds)) == 3
    run(tmp_path, changed := ToyGenerate(), samples=3, seed=1)
    assert not set(one.seeds) & set(changed.seeds)


def test_everything_that_decides_the_answer_changes_the_key() -> None:
    spec = cells_of(one_request())[0].spec
    method = cells_of(one_request(methods=["fast_dllm"]))[0].spec.method
    option = cells_of(one_request(methods=["fast_dllm"], sets=["mode=prefix"]))[0].spec.method
    task_options = check(one_request(task_sets=["style=loud"])).task_options
    changes: list[dict[str, Any]] = [
        {"model_fingerprint": "beef"},
        {"dtype": "bfloat16"},
        {"rope_scaling": "ntk:2"},
        {"codec": "other"},
        {"method": method},
        {"method": option},
        {"decode": dataclasses.replace(spec.decode, threshold=0.8)},
        {"decode": dataclasses.replace(spec.decode, eos_stop=False)},
        {"task_version": 4},
        {"task_options": task_options},
        {"task_data": "file:a:1"},
        {"task_data": "file:a:2"},
        {"subset": "multi"},
        {"ctx": 512},
        {"seed": 1},
        {"device_type": "cuda"},
        {"package_version": "0.2.0"},
    ]
    keys = [spec.key(0), spec.key(1), *(dataclasses.replace(spec, **change).key(0) for change in changes)]
    assert len(set(keys)) == len(keys)
    same: list[dict[str, Any]] = [{"model": "./toy"}, {"model_revision": "abc"}, {"chat_template": "auto"}]
    assert {dataclasses.replace(spec, **change).key(0) for change in same} == {spec.key(0)}
    missed = {f.name for f in dataclasses.fields(RunSpec)} - {name for c in (*changes, *same) for name in c}
    assert missed == {"task", "model_family"}, "a new field of the spec: does it decide the answer?"


def test_a_grid_runs_method_by_method_within_a_length() -> None:
    cells = cells_of(one_request(methods=["baseline,fast_dllm", "baseline"], ctxs=["512", "1k"], subsets=["all"]))
    told = [(c.spec.ctx, c.spec.subset, c.spec.method.name, c.spec.gen_length) for c in cells]
    assert told[:4] == [
        *[(512, "single", "baseline", 64), (512, "single", "fast_dllm", 64)],
        *[(512, "multi", "baseline", 128), (512, "multi", "fast_dllm", 128)],
    ]
    assert len(told) == 8 and len(set(told)) == 8


def test_the_defaults_come_from_task_card_and_threshold_rule() -> None:
    def settings(given: dict[str, Any], card: dict[str, Any] | None = None, family: str = "llada") -> DecodeSettings:
        return decode_settings(given, 128, card or {}, family)

    made = settings({})
    assert (made.gen_length, made.block_length, made.threshold) == (128, 32, 0.9)
    made = settings({}, {"gen_length": 64, "block_length": 16})
    assert (made.gen_length, made.block_length) == (64, 16)
    assert settings({}, {"gen_length": 512}).gen_length == 128
    assert settings({"gen_length": 24}, {"gen_length": 64}).block_length == 24
    assert [settings({"gen_length": n}).block_length for n in (50, 100, 64, 37)] == [25, 25, 32, 37], "blocks fit"
    for rule in ({"steps": 64}, {"factor": 1.0}, {"tokens_per_pass": 2}, {"remasking": "random"}):
        assert settings(rule).threshold is None
    assert settings({"steps": 64, "threshold": 0.7}).threshold == 0.7
    assert settings({}, {"tokens_per_pass": 2}).threshold is None
    assert settings({"threshold": 0.5}, {"tokens_per_pass": 2}).tokens_per_pass is None
    assert (settings({}, family="dream").alg, settings({"alg": "entropy"}, family="dream").threshold) == (
        "confidence_threshold",
        None,
    )


@pytest.mark.parametrize(
    ("budget", "card", "block"),
    [(30, 16, 15), (30, 32, 30), (120, 32, 30), (50, 32, 25), (50, 16, 10), (32, 16, 16), (100, 64, 50), (7, 32, 7)],
)
def test_the_default_block_divides_the_budget(budget: int, card: int, block: int) -> None:
    made = decode_settings({}, budget, {"block_length": card}, "llada")
    assert (made.gen_length, made.block_length) == (budget, block)
    # what was asked for stays as it is
    assert decode_settings({"block_length": 10}, budget - budget % 10 or 10, {}, "llada").block_length == 10
    with pytest.raises(UserError, match="is not a multiple of block_length"):
        decode_settings({"block_length": 9}, 50, {"block_length": card}, "llada")


@pytest.mark.parametrize("length", [0, -4])
def test_no_tiny_blocks_are_made_up(length: int) -> None:
    with pytest.raises(UserError, match="gen_length"):
        decode_settings({"gen_length": length}, 64, {}, "llada")


@pytest.mark.parametrize("given", [{}, {"steps": 64}, {"factor": 1.0}, {"block_length": 128}, {"block_length": 1}])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_warm_up_is_one_block(given: dict[str, Any], family: str) -> None:
    settings = decode_settings(given, 128, {}, family)
    warm = warm_up_settings(settings, family)
    assert warm.gen_length == warm.block_length == settings.block_length
    assert warm.alg == settings.alg or settings.alg is None


def test_lengths_are_read_and_shown() -> None:
    assert [parse_ctx(text) for text in ("512", "2k", "32K", "1.5k", "1m")] == [512, 2048, 32768, 1536, 1 << 20]
    assert [ctx_name(tokens) for tokens in (512, 2048, 1536, 3000)] == ["512", "2k", "1536", "3000"]
    for text, near in (("2kb", "2k"), ("0", "256"), ("-512", "512"), ("many", "2k"), ("", "2k"), ("1.3", "1")):
        with pytest.raises(UserError, match=rf"'{text}'.* nearest valid is {near}$"):
            parse_ctx(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["fast_dlm"]}, "did you mean 'fast_dllm'"),
        ({"task": "toy_tusk"}, "did you mean 'toy_task'"),
        ({"subsets": ["singel"]}, "did you mean 'single'"),
        ({"task_sets": ["stile=loud"]}, "did you mean 'style'"),
        ({"ctxs": []}, "--ctx 2k"),
        ({"samples": 0}, "at least 1"),
        ({"methods": [","]}, "--method"),
    ],
)
def test_a_bad_request_is_refused_without_a_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(one_request(**changes))


def test_a_copy_inside_another_checkout_claims_no_commit(tmp_path: Path) -> None:
    package = tmp_path / "venv" / "dllm_bench"
    package.mkdir(parents=True)
    (package / "errors.py").touch()
    assert _checkout(package) == (None, None)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(package), *command], check=True)
    revision, dirty = _checkout(package)
    assert revision is not None and len(revision) == 40 and dirty is False
    (package / "errors.py").write_text("changed")
    assert _checkout(package) == (revision, True)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fakes import ToyGenerate
from test_runner import run

def answer(index):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)

run(Path({root!r}), ToyGenerate(answer))
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 needs a POSIX system")
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    code = KILLED.format(tests=str(TESTS), root=str(tmp_path / "killed"))
    killed = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(Store(tmp_path / "killed")) == 2
    resumed = run(tmp_path / "killed", generate := ToyGenerate())
    assert generate.calls == [2, 3]
    assert digest(resumed) == digest(run(tmp_path / "whole", ToyGenerate()))
