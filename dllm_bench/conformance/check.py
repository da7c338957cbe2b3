"""What a check is, and what it can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dllm_bench.conformance.subject import Subject

__all__ = ["Check", "Failed", "Result", "Skipped", "Status"]

Status = Literal["pass", "fail", "skip"]


class Failed(Exception):
    """The method breaks the rule; the message says how, in one line."""


class Skipped(Exception):
    """The rule does not apply to the method; the message says why, in one line."""


@dataclass(frozen=True)
class Check:
    """One rule: a name, what it asks in one line, and the function that raises Failed or Skipped."""

    name: str
    what: str
    run: Callable[[Subject], None]

    @classmethod
    def of(cls, run: Callable[[Subject], None]) -> Check:
        """A function's name and the first line of its docstring say what it checks."""
        return cls(run.__name__, (run.__doc__ or "").split("\n")[0].rstrip("."), run)


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    name: str
    what: str
    status: Status
    detail: str
    seconds: float
