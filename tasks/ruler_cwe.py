"""RULER's common words extraction (cwe): which words come most often in a long numbered list.

Wording, words and frequencies are NVIDIA/RULER's (`scripts/data/synthetic/common_words_extraction.py`), with its
solved example before the question. Its sizes and random draws are not; see `ruler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, ClassVar

from dllm_bench.errors import UserError
from dllm_bench.options import Options, option
from dllm_bench.running.task import Codec
from dllm_bench.tasks.draft import Frame, Whole
from dllm_bench.tasks.draws import below, permuted, private_random, shuffled
from dllm_bench.tasks.fitting import Asked
from dllm_bench.tasks.ruler_task import Drawn, DrawnTask
from dllm_bench.tasks.words import single_words, word_pairs

__all__ = ["CweOptions", "RulerCwe"]

_SMALL = 4096
_CANDIDATES = 256


@dataclass(frozen=True)
class _Kind:
    """How often words come in a list, and the number of words of the example and how often these come."""

    common: int
    uncommon: int
    example_words: int
    example_common: int
    example_uncommon: int


_KINDS = {True: _Kind(6, 1, 20, 3, 1), False: _Kind(30, 3, 40, 10, 3)}
"""NVIDIA's numbers for context lengths below 4096 tokens (True), and from there on."""


@dataclass(frozen=True)
class CweOptions(Options):
    """Options of ruler_cwe."""

    num_cw: int = option(10, "common words, which the question asks for", low=1, high=19)
    freq_cw: int | None = option(
        None, "times that a common word comes; if not given 30, and 6 for contexts below 4096 tokens", low=2
    )
    freq_ucw: int | None = option(
        None, "times that any other word comes; if not given 3, and 1 for contexts below 4096 tokens", low=1
    )
    shots: int = option(1, "solved examples before the question; NVIDIA/RULER has 1", low=0, high=8)

    def check(self) -> None:
        for small in (True, False):
            common, uncommon = self.frequencies(small)
            if common <= uncommon:
                raise UserError(
                    f"ruler_cwe option freq_cw must be above freq_ucw (nearest valid: freq_cw={uncommon + 1}): common "
                    f"words would come {common} times and others {uncommon} times"
                    + (f" for contexts below {_SMALL} tokens" if small else "")
                )

    def frequencies(self, small: bool) -> tuple[int, int]:
        """Times that a common word and any other word come."""
        kind = _KINDS[small]
        return self.freq_cw or kind.common, self.freq_ucw or kind.uncommon


class _Words:
    """The words of one sample, all different, in random order; longer than the list of words where that is needed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._order = permuted(len(single_words()), rng)
        self._drawn: list[str] = []
        self._pairs: set[str] = set()

    def __getitem__(self, k: int) -> str:
        while len(self._drawn) <= k:
            at = next(self._order, None)
            self._drawn.append(single_words()[at] if at is not None else self._pair())
        return self._drawn[k]

    def first(self, count: int) -> list[str]:
        return [self[k] for k in range(count)]

    def _pair(self) -> str:
        # NVIDIA takes a larger list of English words here, which is not part of this package
        while True:
            pair = word_pairs()[below(len(word_pairs()), self._rng)]
            if pair not in self._pairs and pair not in _singles():
                self._pairs.add(pair)
                return pair


@cache
def _singles() -> frozenset[str]:
    return frozenset(single_words())


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _frame(count: int, before: str, joint: str) -> Frame:
    return Frame(
        head=f"{before}Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n",
        question=f"Question: What are the {count} most common words in the above list?",
        answer_prefix=f"{joint}Answer: The top {count} words that appear most often in the list are:",
    )


class _List(Whole):
    """The list: its common words and an uncommon one, then n entries more of uncommon words.

    `rest` is a word that comes once more: a shorter one than the next, where the next is too long.
    """

    def __init__(self, codec: Codec, frame: Frame, words: _Words, common: int, times: tuple[int, int], order: str):
        super().__init__(codec, frame)
        self._words, self._common, self._order = words, common, order
        self._often, self._seldom = times
        self._least = self._seldom

    @property
    def answer(self) -> tuple[str, ...]:
        """The common words."""
        return tuple(self._words.first(self._common))

    def text(self, n: int, rest: str = "") -> tuple[str, list[tuple[int, int]]]:
        entries = [word for word in self.answer for _ in range(self._often)]
        entries += [self._words[self._common + k // self._seldom] for k in range(self._least + n)]
        entries += [rest] if rest else []
        listed = _numbered(shuffled(entries, private_random(self._order)))
        return f"{self._frame.head}{listed}\n{self._frame.question}", []

    def facts(self, n: int, rest: str) -> dict[str, Any]:
        words = self._used(n) + bool(rest)
        entries = self._common * self._often + self._least + n + bool(rest)
        return {"words": words, "entries": entries, "freq_cw": self._often, "freq_ucw": self._seldom}

    def fitted(self, asked: Asked) -> tuple[int, str] | None:
        """As many entries as fit; where the next is too long, also another word that fits."""
        n = self.whole_units(asked)
        if n is None:
            return None
        if len(self.encode(n)) < asked.least:
            for k in range(self._used(n), self._used(n) + _CANDIDATES):
                if asked.least <= len(self.encode(n, self._words[k])) <= asked.limit:
                    return n, self._words[k]
        return n, ""

    def _used(self, n: int) -> int:
        return self._common + -(-(self._least + n) // self._seldom)


class RulerCwe(DrawnTask[_List]):
    """RULER's common words extraction: the most frequent words of a numbered list.

    Where the last uncommon word would be too much, it comes fewer times than the others. Meta besides: words
    (different ones), entries (of the list), freq_cw and freq_ucw.
    """

    name: ClassVar[str] = "ruler_cwe"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "name the ten most common words of a long list (RULER cwe)"
    subsets: ClassVar[tuple[str, ...]] = ("cwe",)
    default_subset: ClassVar[str] = "cwe"
    options_class: ClassVar[type[Options]] = CweOptions
    tokens: ClassVar[int] = 120

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, CweOptions):
            raise TypeError("ruler_cwe takes CweOptions")
        self._cwe = self.options

    def minimum(self, subset: str, gen_length: int, ctx: int = 0) -> int:
        """Smallest context length in tokens, from `ctx` on: lists are longer from 4096 tokens on."""
        self.check_subset(subset)
        if ctx < _SMALL:
            least = self._largest_probe(gen_length, _SMALL - 1)
            if least < _SMALL:
                return least
        return max(_SMALL, self._largest_probe(gen_length, _SMALL))

    def _drawn(self, ctx: int, *facts: object) -> Drawn[_List]:
        count, small = self._cwe.num_cw, ctx < _SMALL
        kind = _KINDS[small]
        before = ""
        for shot in range(self._cwe.shots):
            rng = private_random(*facts, "example", shot)
            words = _Words(rng).first(kind.example_words)
            common, others = words[:count], words[count:]
            entries = shuffled(common * kind.example_common + others * kind.example_uncommon, rng)
            frame = _frame(count, before, " ")
            before = f"{frame.head}{_numbered(entries)}\n{frame.question}{frame.answer_prefix} {_numbered(common)}\n"
        order = "\x1f".join(str(fact) for fact in (*facts, "order"))
        words_of_list = _Words(private_random(*facts))
        frame = _frame(count, before, self._joint)
        draft = _List(self.codec, frame, words_of_list, count, self._cwe.frequencies(small), order)
        return Drawn(draft, draft.answer)
