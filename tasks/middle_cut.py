"""Prompts that are too long, cut in the middle of their context until the final ids fit."""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.running.task import Codec

__all__ = ["Fitted", "MiddleCut", "TooShort", "fitted"]

_BROKEN = "\ufffd"
_LONGEST_LETTER = 4


class TooShort(Exception):
    """What must not be cut does not fit; `minimum` is the least number of prompt ids that would hold it."""

    def __init__(self, minimum: int) -> None:
        super().__init__(minimum)
        self.minimum = minimum


@dataclass(frozen=True)
class Fitted:
    """Final ids, and the number of ids that the whole prompt has."""

    ids: list[int]
    original_tokens: int

    @property
    def truncated(self) -> bool:
        return len(self.ids) != self.original_tokens


def fitted(codec: Codec, before: str, context: str, after: str, *, limit: int | None, template: bool) -> Fitted:
    """The prompt `before + context + after` with at most `limit` ids, template and BOS included; None: any number.

    Raises TooShort where the cut would reach `before` or `after`.
    """
    whole = codec.wrap(before + context + after, template=template)
    if limit is None or len(whole) <= limit:
        return Fitted(whole, len(whole))
    cut = MiddleCut(codec, before, context, after, template, len(whole))
    ids = cut.within(limit)
    if ids is None:
        raise TooShort(cut.minimum())
    return Fitted(ids, len(whole))


class MiddleCut:
    """LongBench's rule: of the bare prompt's ids the first and the last half of what is kept, both decoded, joined, put
    into the template and encoded again.

    There, the kept number is a constant that leaves room for template and answer; here it is the largest with which the
    final ids fit. An odd number loses one id, as there. A letter that the cut breaks is left out.
    """

    def __init__(self, codec: Codec, before: str, context: str, after: str, template: bool, size: int) -> None:
        text = before + context + after
        self._codec, self._template, self._size = codec, template, size
        self._ids = codec.encode(text)
        self._mends = _BROKEN not in text
        edges = [codec.encode(edge) for edge in (before, after)]
        self._edge_tokens = max(map(len, edges))
        # as decoding gives them: without special tokens, in the tokenizer's own normal form
        self._before, self._after = map(codec.decode, edges)

    def prompt(self, kept: int) -> list[int] | None:
        """Final ids with `kept` ids of the bare prompt; None where the cut reaches what is around the context."""
        half = kept // 2
        if half < 1:
            return None
        head, tail = self._head(half), self._tail(half)
        if not head.startswith(self._before) or not tail.endswith(self._after):
            return None
        return self._codec.wrap(head + tail, template=self._template)

    def within(self, limit: int) -> list[int] | None:
        """The longest prompt of at most `limit` ids; None where there is none."""
        kept = min(limit - (self._size - len(self._ids)), len(self._ids) - 1)
        while kept > 0:
            ids = self.prompt(kept)
            if ids is None or len(ids) <= limit:
                return ids
            # encoding the joined halves may give a few ids more
            kept -= len(ids) - limit
        return None

    def minimum(self) -> int:
        """The least limit that `within` can meet."""
        # an edge may take a few ids less beside the context than alone
        kept = max(2, 2 * self._edge_tokens - 4)
        while kept < len(self._ids) and self.prompt(kept) is None:
            kept += 2
        least = min(self._size, kept + self._size - len(self._ids))
        while least < self._size and self.within(least) is None:
            least += 1
        return least

    def _head(self, count: int) -> str:
        for lost in range(min(_LONGEST_LETTER, count) if self._mends else 0):
            text = self._codec.decode(self._ids[: count - lost])
            if not text.endswith(_BROKEN):
                return text
        return self._codec.decode(self._ids[:count])

    def _tail(self, count: int) -> str:
        for lost in range(min(_LONGEST_LETTER, count) if self._mends else 0):
            text = self._codec.decode(self._ids[len(self._ids) - count + lost :])
            if not text.startswith(_BROKEN):
                return text
        return self._codec.decode(self._ids[-count:])
