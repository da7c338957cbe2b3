"""GSM8K's scores: the two of lm-eval 0.4.13 with all their quirks, and a comparison of numbers.

lm-eval extracts a text and compares it as a text, so 18.0 is not 18, `...` behind a number is taken for the answer, and
the chain-of-thought rule drops the last digit of a number that nothing follows. These rules are kept: published scores
rest on them. `same_number` is ours and reads an answer as a person would.
"""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["COT_STRICT", "FINAL", "INVALID", "STRICT", "extract_flexible", "extract_strict", "number", "same_number",
           "same_text"]  # fmt: skip

INVALID = "[invalid]"
"""What lm-eval takes for the answer where a pattern does not match."""

STRICT = re.compile(r"#### (-?[0-9.,]+)")
COT_STRICT = re.compile(r"The answer is (-?[0-9.,]+).")
"""The character behind the number may be any but a line break, and must be there."""

FINAL = re.compile(r"#### -?\$?[0-9]")
"""How a solution of the data set names its answer."""

_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_FINAL_DOT = re.compile(r"\.$")

# a minus behind a digit or a closing bracket is a subtraction or a range, not a sign
_SIGN = r"(?P<sign>(?<![0-9)])[-−])?(?:\$ ?(?P<minus>[-−])?)?"
_VALUE = r"(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_ANY = re.compile(_SIGN + _VALUE)
_MARKED = re.compile(r"(?:####|\banswer is\b:?)\s*" + _SIGN + _VALUE, re.IGNORECASE)


def extract_strict(prediction: str, pattern: re.Pattern[str]) -> str:
    """The number of the first match; INVALID without one."""
    found = pattern.search(prediction)
    return found[1] if found else INVALID


def extract_flexible(prediction: str) -> str:
    """The last run of digits, dots, commas and dollar signs; INVALID without one."""
    last = INVALID
    for found in _FLEXIBLE.finditer(prediction):
        last = found[0]
    return last


def same_text(extracted: str, reference: str) -> bool:
    """Whether both are the same text without commas, dollar signs, all up to the last "#### " and one final dot."""
    return _bare(extracted) == _bare(reference)


def _bare(text: str) -> str:
    return _FINAL_DOT.sub("", text.replace(",", "").replace("$", "").rpartition("#### ")[2]).lower()


def number(text: str) -> Decimal | None:
    """The number that a text gives as its answer; None where it holds none.

    It is the last one behind "####" or "answer is", and without such a mark the last one of all. Dollar signs, commas
    between thousands and zeros behind the point do not matter.
    """
    every = list(_MARKED.finditer(text)) or list(_ANY.finditer(text))
    if not every:
        return None
    found = every[-1]
    value = Decimal(found["value"].replace(",", ""))
    return -value if found["sign"] or found["minus"] else value


def same_number(prediction: str, reference: str) -> bool:
    """Whether both give the same number, compared in decimals."""
    given, wanted = number(prediction), number(reference)
    return given is not None and given == wanted
