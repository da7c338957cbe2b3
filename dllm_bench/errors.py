"""Errors that a user can cause, and the nearest valid choice for each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["ChoiceError", "UserError", "choice", "nearest", "nearest_number"]


class UserError(Exception):
    """Bad input: the command line prints the message as one line on stderr and exits with code 2."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class ChoiceError(UserError):
    """A name that is not among the valid ones."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that is spelled most like `name`; None when nothing comes near."""
    pool = {c.lower(): c for c in choices}
    found = difflib.get_close_matches(name.lower(), pool, n=1, cutoff=0.5)
    return pool[found[0]] if found else None


def choice(kind: str, name: object, choices: Iterable[str]) -> ChoiceError:
    """The error for an unknown `name`: names the nearest valid one, then all of them."""
    known, name = list(choices), str(name)
    near = nearest(name, known)
    hint = f"did you mean '{near}'? " if near else ""
    return ChoiceError(f"unknown {kind} '{name}': {hint}valid: {', '.join(known) or 'none'}")


def nearest_number(
    text: str, *, whole: bool, low: float | None = None, high: float | None = None, otherwise: float | None = None
) -> int | float:
    """The valid number that is nearest to what `text` means: the first number in it, put into the range.

    A text without a number means `otherwise`, or the low end of the range.
    """
    found = re.search(r"-?\d+(?:\.\d+)?", text)
    value = float(found[0]) if found else otherwise if otherwise is not None else low if low is not None else 1
    value = max(value, low) if low is not None else value
    value = min(value, high) if high is not None else value
    return round(value) if whole else value
