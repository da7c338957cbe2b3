"""Runs all checks on one method."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dllm_bench.conformance import attention_checks, cost_checks, decoding_checks, option_checks, state_checks
from dllm_bench.conformance.check import Check, Failed, Result, Skipped, Status
from dllm_bench.conformance.subject import Subject
from dllm_bench.lazy import LazyModule

__all__ = ["CHECKS", "run_checks"]

CHECKS: tuple[Check, ...] = tuple(
    Check.of(function)
    for module in (option_checks, decoding_checks, state_checks, attention_checks, cost_checks)
    for function in module.CHECKS
)


def run_checks(
    subject: Subject, seen: Callable[[Result], None] | None = None, only: Collection[str] | None = None
) -> list[Result]:
    """Runs every check; an exception of any kind is a failure of that check alone.

    Args:
        seen: called with each result as soon as it is there.
        only: names of the checks to run; default: all.
    """
    results = []
    with _one_thread():
        for check in CHECKS:
            if only is not None and check.name not in only:
                continue
            results.append(_run(check, subject))
            if seen is not None:
                seen(results[-1])
    return results


def _run(check: Check, subject: Subject) -> Result:
    began = time.perf_counter()
    status: Status = "pass"
    detail = ""
    try:
        check.run(subject)
    except Skipped as reason:
        status, detail = "skip", str(reason)
    except Failed as reason:
        status, detail = "fail", str(reason)
    except Exception as error:  # a method may raise anything
        status, detail = "fail", _told(error)
    return Result(check.name, check.what, status, detail, time.perf_counter() - began)


def _told(error: Exception) -> str:
    """The error in one line, with the innermost line of code that is not the bench's or a library's own."""
    text = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((f for f in reversed(frames) if "site-packages" not in f.filename), None)
    place = f" ({Path(inner.filename).name}:{inner.lineno})" if inner else ""
    return f"{type(error).__name__}: {text[:160]}{place}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tiny tensors are quicker on one thread, and sums do not depend on how many there are."""
    torch = LazyModule("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
