"""RULER's scores, by the rules of NVIDIA/RULER `scripts/eval/synthetic/constants.py`, as shares in 0..1.

lm-eval 0.4.13 differs in `string_match_part`: it takes the mean over the references, not the best one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["postprocess", "string_match_all", "string_match_part"]

_CONTROL = re.compile(r"[\x00-\x1f]")


def postprocess(prediction: str) -> str:
    """The answer text as it is scored: stripped, each control character made a newline, stripped again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, whatever their case."""
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1.0 where any of the references occurs in the prediction, whatever its case, else 0.0."""
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if not references:
        raise ValueError("a sample without references cannot be scored")
    text = postprocess(prediction).lower()
    return [reference.lower() in text for reference in references]
