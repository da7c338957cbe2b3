"""Prompts put together from the ids of their pieces, where a tokenizer allows it.

GPT and Qwen style tokenizers never let a token span the place after a newline, or the place before a space that
follows a word. A text that is cut only there has the ids of its pieces, one after another, so a long haystack is
encoded once and each prompt costs a few short encodings. Whether a codec really allows this is checked at every joint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from dllm_bench.errors import UserError
from dllm_bench.running.task import Codec

__all__ = ["Pieces", "UnitStream", "answer_joint", "common_prefix", "common_suffix"]

_LINE = "Here we go.\n"
_WORDS = "Here we go."
_CHUNK = 64


def answer_joint(codec: Codec) -> str:
    """What has to stand before an answer prefix: a space where the codec just appends it to the user's text.

    A chat template opens the answer's turn itself, and a codec may add the space itself: then nothing.
    """
    return " " if codec.wrap("Who?", " I") == codec.wrap("Who? I", "") else ""


class Pieces:
    """Ids of pieces of text as they are in the middle of a prompt."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._anchors = {text: codec.encode(text) for text in (_LINE, _WORDS)}
        # a sample uses its needles several times; the sizes bound the memory
        self.ids = lru_cache(1024)(self._ids)
        self.holds = lru_cache(4096)(self._holds)

    def _ids(self, text: str) -> list[int]:
        """Ids of a piece that begins with a space, or that follows a newline.

        Encoded behind a short anchor: some tokenizers treat the beginning of a text in a special way.
        """
        anchor = _WORDS if text.startswith(" ") else _LINE
        return self._codec.encode(anchor + text)[len(self._anchors[anchor]) :]

    def _holds(self, texts: tuple[str, ...]) -> bool:
        """Whether neighbouring pieces have, as one text, the ids that they have alone."""
        return self.ids("".join(texts)) == [i for text in texts for i in self.ids(text)]

    def edges(self, before: str, after: str, answer_prefix: str) -> tuple[list[int], list[int]] | None:
        """Ids of a prompt before and after its haystack; `before` ends with a newline.

        None where they cannot be told from the haystack's.
        """
        whole = self._codec.wrap(before + _LINE + after, answer_prefix)
        mark = self.ids(_LINE)
        found = [i for i in range(len(whole) - len(mark) + 1) if whole[i : i + len(mark)] == mark]
        return (whole[: found[0]], whole[found[0] + len(mark) :]) if len(found) == 1 and mark else None


class UnitStream:
    """An endless row of haystack units (sentences or lines) with their ids, encoded as far as they are needed.

    Attributes:
        flat: ids of all units so far.
        ends: ends[k] is the number of ids of the first k units.
        checked: whether `sound` is kept; without it the caller has to check the whole prompt.
        sound: number of units from the first on whose ids were checked against an encoding of the joined text.
    """

    def __init__(self, pieces: Pieces, unit: Callable[[int], str], *, checked: bool) -> None:
        self._pieces = pieces
        self.unit = unit
        self.checked = checked
        self._known: dict[str, list[int]] = {}
        self.flat: list[int] = []
        self.ends: list[int] = [0]
        self.sound = 0

    def fitting(self, tokens: int) -> int:
        """How many units fit into a number of tokens, by their own counts."""
        while self.ends[-1] <= tokens:
            self._extend()
        return max(0, bisect_right(self.ends, tokens) - 1)

    def slice(self, first: int, last: int) -> list[int]:
        """Ids of units first..last-1."""
        while len(self.ends) <= last:
            self._extend()
        return self.flat[self.ends[first] : self.ends[last]]

    def _extend(self) -> None:
        first = len(self.ends) - 1
        texts = [self.unit(k) for k in range(first, first + _CHUNK)]
        for text in texts:
            ids = self._known.get(text)
            if ids is None:
                ids = self._known[text] = self._pieces.ids(text)
            self.flat.extend(ids)
            self.ends.append(len(self.flat))
        if self.ends[-1] == self.ends[first]:
            raise UserError(f"the tokenizer gives no tokens for haystack text such as '{texts[0].strip()[:60]}'")
        if self.checked and self.sound == first:
            # one unit of overlap, so that the joint between two chunks is checked too
            overlap = max(0, first - 1)
            joined = "".join(self.unit(k) for k in range(overlap, first + _CHUNK))
            if self._pieces.ids(joined) == self.flat[self.ends[overlap] :]:
                self.sound = first + _CHUNK


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal ids at the beginning of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal ids at the end of both."""
    return common_prefix(a[::-1], b[::-1])
