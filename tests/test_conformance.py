"""The conformance kit: every method passes it, every planted fault is caught by the check meant for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_methods import FAULTS

from dllm_bench.caching.part import METHODS, Part
from dllm_bench.conformance.runner import CHECKS, run_checks
from dllm_bench.conformance.subject import Subject

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
    results = run_checks(Subject(name))
    assert {r.name: r.detail for r in results if r.status == "fail"} == {}
    assert sum(r.seconds for r in results) < 60
    passed = {r.name for r in results if r.status == "pass"}
    assert {"no_mask_left", "canvas_untouched", "prompt_lengths", "same_again", "lets_go", "counters"} <= passed


@pytest.mark.parametrize(("cls", "check"), FAULTS, ids=[cls.__name__ for cls, _ in FAULTS])
def test_planted_faults_are_caught(cls: type[Part], check: str) -> None:
    with registered(cls) as name:
        (result,) = run_checks(Subject(name), only=[check])
    assert result.status == "fail" and result.detail, result
    assert "\n" not in result.detail


def test_every_check_finds_something() -> None:
    """Those without a fault of their own: one needs a broken core (below), one repeats another on a second model."""
    assert len(FAULTS) >= 12
    assert {c.name for c in CHECKS} - {check for _, check in FAULTS} == {"options_refused"}
    assert all(c.what and len(c.what) < 120 for c in CHECKS)
