"""One prompt for any length of its context: as text, as ids, and where the needles are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm_bench.running.task import Codec
from dllm_bench.tasks.fitting import Asked, fit, fit_units
from dllm_bench.tasks.pieces import Pieces, UnitStream, common_prefix, common_suffix

__all__ = ["Draft", "Frame", "Inseparable", "Prompt", "Whole", "locate"]


class Inseparable(Exception):
    """The ids of this prompt are not those of its pieces one after another."""


@dataclass(frozen=True)
class Frame:
    """What stands around the context; `separator` stands between two units. The `head` of a haystack that is put
    together from pieces ends with a newline."""

    head: str
    question: str
    answer_prefix: str
    separator: str = " "


@dataclass(frozen=True)
class Prompt:
    """Final ids, with half-open ranges: one per needle in text order, and the haystack with its needles."""

    ids: Sequence[int]
    needles: tuple[tuple[int, int], ...]
    context: tuple[int, int]


@dataclass(frozen=True)
class _Item:
    """A run of haystack units [first, last), or a text of its own: a needle (with its number) or a cut unit."""

    text: str = ""
    first: int = 0
    last: int = 0
    needle: int | None = None

    @property
    def is_run(self) -> bool:
        return not self.text


class Whole(ABC):
    """A sample whose context is still to be sized: the first n units, then perhaps something smaller (`rest`).

    Its ids are those of one encoding of the whole text.

    Attributes:
        trial: units from whose tokens the search for a size begins.
    """

    trial: ClassVar[int] = 64

    def __init__(self, codec: Codec, frame: Frame) -> None:
        self._codec, self._frame = codec, frame
        self._encoded: dict[tuple[int, str], list[int]] = {}

    @abstractmethod
    def text(self, n: int, rest: str = "") -> tuple[str, list[tuple[int, int]]]:
        """The user's text, and the range of characters of each needle."""

    @abstractmethod
    def facts(self, n: int, rest: str) -> dict[str, Any]:
        """What the sample's meta says of its size."""

    @abstractmethod
    def fitted(self, asked: Asked) -> tuple[int, str] | None:
        """The size with which the sample fills its length; None where it does not fit at all."""

    def encode(self, n: int, rest: str = "") -> list[int]:
        """Final ids by one encoding of the whole text."""
        if (n, rest) not in self._encoded:
            self._encoded[n, rest] = self._codec.wrap(self.text(n, rest)[0], self._frame.answer_prefix)
        return self._encoded[n, rest]

    def prompt(self, n: int, rest: str = "") -> Prompt:
        """The prompt by one encoding of the whole text, its ranges found with encodings of the text's parts."""
        text, ranges = self.text(n, rest)
        ids = self.encode(n, rest)
        context = (len(self._frame.head), len(text) - len(self._frame.question))
        spans = locate(self._codec, text, self._frame.answer_prefix, ids, [*ranges, context])
        return Prompt(ids, tuple(spans[:-1]), spans[-1])

    def whole_units(self, asked: Asked) -> int | None:
        """As many units as fit, or nearly as many; None where not even a prompt without units fits."""
        empty = len(self.encode(0))
        each = max(1.0, (len(self.encode(self.trial)) - empty) / self.trial)
        n = fit_units(
            lambda count: len(self.encode(count)),
            guess=int((asked.limit - empty) / each),
            limit=asked.limit,
            close=(asked.limit - asked.least) // 4,
        )
        return n if len(self.encode(n)) <= asked.limit else None


class Draft(Whole):
    """A haystack of units with needles: the first n units, then perhaps a part of one more unit.

    Needle i stands before unit int(places[i] * n); a cut unit is always the last, so no needle follows a broken one.
    Where units must be whole, `spare` gives text for so many tokens instead of it.
    """

    def __init__(
        self,
        codec: Codec,
        pieces: Pieces,
        frame: Frame,
        stream: UnitStream,
        needles: Sequence[str],
        places: Sequence[float],
        spare: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(codec, frame)
        self._pieces, self._stream = pieces, stream
        self._needles, self._places = needles, places
        self._spare = spare
        self._edges = pieces.edges(frame.head, frame.question, frame.answer_prefix)
        self._assembled: dict[tuple[int, str], Prompt] = {}

    def unit(self, k: int) -> str:
        """Text of unit k without its separator."""
        text = self._stream.unit(k)
        return text[:-1] if self._frame.separator == "\n" else text[1:]

    def text(self, n: int, rest: str = "") -> tuple[str, list[tuple[int, int]]]:
        """The user's text, and the range of characters of each needle."""
        parts: list[str] = []
        ranges: list[tuple[int, int]] = []
        at = len(self._frame.head)
        for item in self._layout(n, rest):
            part = self._frame.separator.join(map(self.unit, range(item.first, item.last))) or item.text
            if item.needle is not None:
                ranges.append((at, at + len(part)))
            parts.append(part)
            at += len(part) + 1
        return f"{self._frame.head}{self._frame.separator.join(parts)}\n{self._frame.question}", ranges

    def facts(self, n: int, rest: str) -> dict[str, Any]:
        """haystack_units (sentences or lines) and cut_unit (whether a part of one more was needed)."""
        return {"haystack_units": n, "cut_unit": bool(rest)}

    def fitted(self, asked: Asked, *, pieces: bool = False) -> tuple[int, str] | None:
        """The size (see `fit`), by encoding the whole text for each try or by pieces; these may raise Inseparable."""

        def size(n: int, rest: str) -> int:
            return len(self.assemble(n, rest).ids if pieces else self.encode(n, rest))

        def spare(n: int, tokens: int) -> str:
            return self._spare(tokens) if self._spare else self.unit(n)

        return fit(size, spare, guess=self.guess(asked.limit), limit=asked.limit, least=asked.least)

    def guess(self, tokens: int) -> int:
        """About how many units fit into a prompt of so many tokens."""
        if self._edges is None:
            taken = len(self.encode(0))
        else:
            needles = sum(len(self._pieces.ids(needle + "\n")) for needle in self._needles)
            taken = len(self._edges[0]) + len(self._edges[1]) + needles
        return self._stream.fitting(tokens - taken)

    def assemble(self, n: int, rest: str = "") -> Prompt:
        """The prompt put together from pieces. Raises Inseparable where a joint shows that this would be wrong."""
        if (n, rest) not in self._assembled:
            self._assembled[n, rest] = self._assemble(n, rest)
        return self._assembled[n, rest]

    def _layout(self, n: int, rest: str) -> list[_Item]:
        items: list[_Item] = []
        at = 0
        for i, (needle, place) in enumerate(zip(self._needles, self._places, strict=True)):
            before = int(n * place)
            if before > at:
                items.append(_Item(first=at, last=before))
            items.append(_Item(needle, needle=i))
            at = before
        if n > at:
            items.append(_Item(first=at, last=n))
        return [*items, _Item(rest)] if rest else items

    def _segments(self, n: int, rest: str) -> list[_Item]:
        """The layout with separators in the texts. A separating newline ends its piece, a space begins it."""
        items = self._layout(n, rest)
        if self._frame.separator == "\n":
            return [item if item.is_run else _Item(item.text + "\n", needle=item.needle) for item in items]
        if items[0].is_run:
            run = items[0]
            tail = [_Item(first=run.first + 1, last=run.last)] if run.last - run.first > 1 else []
            items[:1] = [_Item(self.unit(run.first)), *tail]
        if items[-1].is_run:
            run = items[-1]
            front = [_Item(first=run.first, last=run.last - 1)] if run.last - run.first > 1 else []
            items[-1:] = [*front, _Item(self.unit(run.last - 1))]
        last = len(items) - 1
        return [
            item if item.is_run else _Item(" " * (k > 0) + item.text + "\n" * (k == last), needle=item.needle)
            for k, item in enumerate(items)
        ]

    def _assemble(self, n: int, rest: str) -> Prompt:
        if self._edges is None:
            raise Inseparable
        before, after = self._edges
        ids = list(before)
        spans = []
        window = [self._frame.head]
        for item in self._segments(n, rest):
            start = len(ids)
            if item.is_run:
                ids += self._stream.slice(item.first, item.last)
                if self._stream.checked and item.last > self._stream.sound:
                    raise Inseparable
                window.append(self._stream.unit(item.first))
                if item.last - item.first > 1:
                    self._check(window)
                    window = [self._stream.unit(item.last - 1)]
            else:
                ids += self._pieces.ids(item.text)
                window.append(item.text)
            if item.needle is not None:
                spans.append((start, len(ids)))
        # the first words of the question stand for all of it: they are the same in every sample
        self._check([*window, self._frame.question.split(" the ")[0]])
        return Prompt([*ids, *after], tuple(spans), (len(before), len(ids)))

    def _check(self, window: list[str]) -> None:
        if not self._pieces.holds(tuple(window)):
            raise Inseparable


def locate(
    codec: Codec, text: str, answer_prefix: str, ids: Sequence[int], ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Half-open token ranges that cover ranges of characters of the user's text, in `ids = codec.wrap(text, …)`.

    A token belongs to a range unless it is among those that stay the same when the text is cut before the range, or
    among those that stay the same when it is cut after; so a token over the edge is inside.
    """
    found = []
    for first, last in ranges:
        # a letter keeps white space at the cut apart from the template's; another one than the text's at this place
        letter = "q" if text[first : first + 1] == "x" else "x"
        start = common_prefix(ids, codec.wrap(f"{text[:first]}{letter}", ""))
        cut = len(text[:last].rstrip())
        letter = "q" if text[:cut].endswith("x") else "x"
        end = len(ids) - common_suffix(ids, codec.wrap(f"{letter}{text[cut:]}", answer_prefix))
        found.append((start, max(start + 1, end)))
    return found
