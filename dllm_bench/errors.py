"""Errors that a user can cause, and the nearest valid choice for each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ChoiceError", "UserError", "choice", "nearest"]


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


def choice(kind: str, name: str, choices: Iterable[str]) -> ChoiceError:
    """The error for an unknown `name`: names the nearest valid one, then all of them."""
    known = list(choices)
    near = nearest(name, known)
    hint = f"did you mean '{near}'? " if near else ""
    return ChoiceError(f"unknown {kind} '{name}': {hint}valid: {', '.join(known) or 'none'}")
