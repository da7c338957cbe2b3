"""One look per method, readable in print and for colour-blind readers, and labels that stand beside their lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Look", "looks", "noted", "spread", "stacked"]

# Okabe and Ito's palette without its yellow, which is too pale on paper; the reference is black
_REFERENCE = "#000000"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_MARKERS = ("s", "^", "D", "v", "P", "X", "o")
_BREAKS = re.compile(r"(?=\+|\(| )|(?<=,)")
_LINES = ("-", "--", "-.", ":")
_MARKS = "†‡§¶"
_BESIDE = 24  # letters in brackets that may stand beside a name; more are told below


@dataclass(frozen=True)
class Look:
    """Colour, marker and dash of a method's line; `size` of its marker in points, so that equal points nest."""

    colour: str
    marker: str
    line: str
    size: float


def looks(labels: Iterable[str], reference: str) -> dict[str, Look]:
    """A look per label, by the alphabet; labels that start with `reference` come first and are black."""
    ordered = sorted(set(labels))
    first = [label for label in ordered if label.split(" [")[0].rstrip(_MARKS) == reference]
    rest = [label for label in ordered if label not in first]
    made = {label: Look(_REFERENCE, "o", _LINES[i % len(_LINES)], 9.5) for i, label in enumerate(first)}
    for i, label in enumerate(rest):
        turn = i // len(_COLOURS)
        line = _LINES[turn % len(_LINES)]
        made[label] = Look(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], line, max(4.0, 7.0 - 0.5 * i))
    return made


def noted(labels: Iterable[str], narrow: bool = False) -> tuple[dict[str, str], list[str]]:
    """A name for each label, with long words in brackets as a mark behind it; and what the marks mean.

    Where it is `narrow`, all words in brackets are, and names are stacked.
    """
    longest = 0 if narrow else _BESIDE
    marks: dict[str, str] = {}

    def mark(found: re.Match[str]) -> str:
        if len(found[1]) <= longest:
            return found[0]
        return marks.setdefault(found[1], _MARKS[len(marks) % len(_MARKS)] * (1 + len(marks) // len(_MARKS)))

    names = {label: re.sub(r" \[([^\]]*)\]", mark, label) for label in sorted(set(labels))}
    if narrow:
        names = {label: stacked(name) for label, name in names.items()}
    return names, [f"{mark} {told}" for told, mark in marks.items()]


def stacked(label: str, width: int = 16) -> str:
    """The label broken before '+', brackets and words and after commas into lines of about `width` letters."""
    lines = [""]
    for part in _BREAKS.split(label):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append(part.lstrip())
        else:
            lines[-1] += part
    return "\n".join(lines)


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Centres near `wanted` so that bars of these heights do not overlap, within 0..1 where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    floor = 0.0
    for i in order:
        placed[i] = max(wanted[i], floor + heights[i] / 2)
        floor = placed[i] + heights[i] / 2
    ceiling = 1.0
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling - heights[i] / 2)
        ceiling = placed[i] - heights[i] / 2
    return placed
