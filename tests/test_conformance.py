"""The conformance kit: every method passes it, every planted fault is caught by the check meant for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_methods import FAULTS, Boastful, Capped, Choosy, Impossible, Loud, Ranged
from typer.testing import CliRunner

from dllm_bench.caching.part import METHODS, Part
from dllm_bench.cli import app, main
from dllm_bench.conformance import runner
from dllm_bench.conformance.check import Result
from dllm_bench.conformance.meter import Watch
from dllm_bench.conformance.runner import CHECKS, run_checks
from dllm_bench.conformance.subject import Subject, fixture_network
from dllm_bench.errors import UserError

ROOT = Path(__file__).parent.parent


@contextmanager
def registered(cls: type[Part]) -> Iterator[str]:
    """Registers a class for a while."""
    METHODS.register(cls.name, cls)
    try:
        yield cls.name
    finally:
        del METHODS._paths[cls.name], METHODS._classes[cls.name]


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_conforms(name: str) -> None:
    began = time.process_time()
    results = run_checks(Subject(name))
    assert time.process_time() - began < 60
    assert {r.name: r.detail for r in results if r.status == "fail"} == {}
    passed = {r.name for r in results if r.status == "pass"}
    assert {"no_mask_left", "canvas_untouched", "prompt_lengths", "same_again", "lets_go", "counters"} <= passed


@pytest.mark.parametrize(("cls", "check"), FAULTS, ids=[cls.__name__ for cls, _ in FAULTS])
def test_planted_faults_are_caught(cls: type[Part], check: str) -> None:
    with registered(cls) as name:
        (result,) = run_checks(Subject(name), only=[check])
    assert result.status == "fail" and result.detail, result
    assert "\n" not in result.detail


def test_every_check_finds_something() -> None:
    """Each has a planted fault; only out-of-range values cannot be let in by a method, since the core refuses them."""
    assert len(FAULTS) >= 12
    assert {c.name for c in CHECKS} - {check for _, check in FAULTS} == {"options_refused"}
    assert all(0 < len(c.what) <= 52 for c in CHECKS), "one line each in 80 columns"


def test_values_that_the_core_lets_in_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered(Ranged) as name:
        monkeypatch.setattr("dllm_bench.options._in_range", lambda *_: None)
        (result,) = run_checks(Subject(name), only=["options_refused"])
    assert (result.status, result.detail) == ("fail", "option every=0 is accepted, though out of range")


def test_a_view_is_as_large_as_what_lies_behind_it() -> None:
    network = fixture_network("plain", "float32")
    row = torch.zeros(100)
    with Watch(network) as watch:
        row.as_strided((90, 10), (1, 1)).index_select(0, torch.tensor([4, 7])).sum()
        row.expand(100, 100)[3].sum()
    assert watch.elements == 100
    with Watch(network) as watch:
        row.expand(100, 100).clone()
    assert (watch.elements, watch.shape) == (10_000, (100, 100))


def test_options_that_leave_masks_on_purpose_are_no_fault() -> None:
    """A limit of passes is fine where the user has asked for it (here the default would be none)."""
    with registered(Capped) as name:
        (plain,) = run_checks(Subject(name), only=["no_mask_left"])
        (capped,) = run_checks(Subject(name, {"limit": 2}), only=["no_mask_left"])
    assert (plain.status, capped.status) == ("pass", "skip")


def test_a_promise_is_taken_with_its_options_and_not_the_users() -> None:
    with registered(Ranged) as name:
        (result,) = run_checks(Subject(name, {"every": 3}), only=["exact"])
        assert result.status == "pass", result.detail
    with registered(Boastful) as name:
        (result,) = run_checks(Subject(name), only=["exact"])
    assert result.status == "fail" and "are off by" in result.detail


def test_check_with_is_set_unless_the_user_sets_it() -> None:
    with registered(Choosy) as name:
        assert Subject(name).spec.options["every"] == 1
        assert Subject(name, {"every": 5}).spec.options["every"] == 5
        assert Subject(name, {f"{name}.every": 5}).spec.options["every"] == 5


def test_a_method_without_any_settings_is_bad_input() -> None:
    with registered(Impossible) as name, pytest.raises(UserError, match="never fits"):
        Subject(name)


# -- the command ------------------------------------------------------------------------------------------------------


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Shortens the kit to some checks."""
    monkeypatch.setattr(runner, "CHECKS", tuple(c for c in CHECKS if c.name in names))


def test_the_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(subject: Subject, seen: Any) -> list[Result]:
        return [Result(c.name, c.what, "pass", "", 0.25) for c in CHECKS]

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(runner, "run_checks", run)
    result = CliRunner().invoke(app, ["check", "fast_dllm", "--set", "mode=prefix"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "conformance of fast_dllm(mode=prefix), on random models of 3 layers"
    assert max(map(len, lines)) <= 80 and len(lines) == len(CHECKS) + 4
    assert lines[-1] == f"{len(CHECKS)} passed, 0 failed, 0 skipped in {len(CHECKS) * 0.25:.1f} s"


def test_failed_checks_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    only(monkeypatch, "described", "options_refused", "plain_reports", "logits_used")
    with registered(Loud) as name:
        result = CliRunner().invoke(app, ["check", name])
        told = CliRunner().invoke(app, ["check", name, "--json"])
    assert result.exit_code == told.exit_code == 1
    assert result.stderr.splitlines()[-1] == "2 of 4 checks failed: described, plain_reports"
    assert "report of pass 0 is no plain data" in " ".join(result.stdout.split())
    assert "2 passed, 2 failed, 0 skipped" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert json.loads(told.stdout)["passed"] is False


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "described", "options_refused", "candidates")
    result = CliRunner().invoke(app, ["check", "baseline", "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["passed"] is True and told["method"] == "baseline" and told["options"] == {}
    assert [(c["name"], c["status"]) for c in told["checks"]] == [
        ("described", "pass"),
        ("options_refused", "skip"),
        ("candidates", "pass"),
    ]
    assert told["checks"][1]["detail"] == "no option has a range or choices"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fast_dlm"], "did you mean 'fast_dllm'?"),
        (["fast_dllm", "--set", "mode=duel"], "did you mean 'dual'?"),
        (["fast_dllm", "--set", "mod=dual"], "did you mean 'mode'?"),
        (["fast_dllm", "--set", "mode"], "--set needs key=value"),
        (["fast_dllm+baseline"], "a spec has one refresh method"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dllm-bench", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and message in told and len(told.splitlines()) == 1


def test_bad_input_is_told_before_torch_is_imported() -> None:
    script = """
import sys
from dllm_bench.cli import main
sys.argv = ["dllm-bench", "check", "fast_dlm"]
try:
    main()
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"]
