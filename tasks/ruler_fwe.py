"""RULER's frequent words extraction (fwe): the three most frequent words of a coded text.

Wording and frequencies are NVIDIA/RULER's (`scripts/data/synthetic/freq_words_extraction.py`): the word of rank k comes
about k^-alpha / zeta(alpha) of all times, and the most frequent one is dots, to be ignored. Its sizes and random draws
are not; see `ruler.py`. The generation budget is counted, as in NVIDIA's version and unlike in lm-eval 0.4.13.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, ClassVar

from dllm_bench.options import Options, option
from dllm_bench.running.task import Codec
from dllm_bench.tasks.draft import Frame, Whole
from dllm_bench.tasks.draws import letters, private_random, shuffled
from dllm_bench.tasks.fitting import Asked, fit_part
from dllm_bench.tasks.ruler_task import Drawn, DrawnTask

__all__ = ["FweOptions", "RulerFwe", "zeta"]

_DOTS = "..."
_ASKED = 3
_CTX_PER_WORD = 50
_TERMS = 40


@dataclass(frozen=True)
class FweOptions(Options):
    """Options of ruler_fwe."""

    alpha: float = option(2.0, "exponent of the words' frequencies; a smaller one is harder", above=1.0, high=4.0)
    coded_wordlen: int = option(6, "letters of a coded word", low=4, high=32)
    vocab_size: int | None = option(
        None, "words to draw from, dots among them; a fiftieth of the context length if not given", low=4, high=100_000
    )


@cache
def zeta(s: float) -> float:
    """Riemann's zeta function for s > 1, by Euler and Maclaurin's sum formula, to about 12 digits."""
    n = _TERMS
    head = sum(k**-s for k in range(1, n))
    third = s * (s + 1) * (s + 2) * n ** (-s - 3) / 720
    return float(head + n ** (1 - s) / (s - 1) + n**-s / 2 + s * n ** (-s - 1) / 12 - third)


class _Coded(Whole):
    """The coded text: words by their shares of a number of draws, in random order; `rest` is dots at the end.

    A unit is so many draws more that they give about one word: rare words get less than one of their share, thus none.
    """

    trial = 256

    def __init__(self, codec: Codec, frame: Frame, vocabulary: list[str], alpha: float, order: str) -> None:
        super().__init__(codec, frame)
        self._vocabulary, self._order = vocabulary, order
        self._shares = [k**-alpha / zeta(alpha) for k in range(1, len(vocabulary) + 1)]
        self._step = max(1, round(1 / sum(self._shares)))
        # so many draws that the last word asked for surely comes more often than the one behind it
        self._least = ceil(1 / ((_ASKED + 1) ** -alpha - (_ASKED + 2) ** -alpha) * zeta(alpha))

    def text(self, n: int, rest: str = "") -> tuple[str, list[tuple[int, int]]]:
        words = [word for word, times in zip(self._vocabulary, self._times(n), strict=True) for _ in range(times)]
        coded = " ".join([*shuffled(words, private_random(self._order)), *([rest] if rest else [])])
        return f"{self._frame.head}{coded}\n{self._frame.question}", []

    def facts(self, n: int, rest: str) -> dict[str, Any]:
        times = self._times(n)
        words = sum(times[1:])
        return {"words": words, "dots": times[0] + len(rest.split()), "vocabulary": sum(map(bool, times[1:]))}

    def fitted(self, asked: Asked) -> tuple[int, str] | None:
        """As many words as fit, and dots behind them where these fill too little."""
        n = self.whole_units(asked)
        if n is None:
            return None
        reached = len(self.encode(n))
        if reached >= asked.least:
            return n, ""
        dots = " ".join([_DOTS] * (asked.limit - reached))
        return n, fit_part(lambda rest: len(self.encode(n, rest)), dots, asked.limit, asked.least)

    def _times(self, n: int) -> list[int]:
        return [int((self._least + n * self._step) * share) for share in self._shares]


class RulerFwe(DrawnTask[_Coded]):
    """RULER's frequent words extraction: the three most frequent words of a coded text, dots left out.

    Meta besides: words (in the text, without dots), dots, vocabulary (different words).
    """

    name: ClassVar[str] = "ruler_fwe"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "name the three most frequent words of a long coded text (RULER fwe)"
    subsets: ClassVar[tuple[str, ...]] = ("fwe",)
    default_subset: ClassVar[str] = "fwe"
    options_class: ClassVar[type[Options]] = FweOptions
    tokens: ClassVar[int] = 50

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, FweOptions):
            raise TypeError("ruler_fwe takes FweOptions")
        self._fwe = self.options

    def _drawn(self, ctx: int, *facts: object) -> Drawn[_Coded]:
        rng = private_random(*facts)
        taken: set[str] = set()
        count = self._fwe.vocab_size or max(_ASKED + 1, ctx // _CTX_PER_WORD)
        length = self._fwe.coded_wordlen
        coded = [letters(string.ascii_lowercase, length, rng, taken) for _ in range(count - 1)]
        frame = Frame(
            head="Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words. ",
            question="Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            answer_prefix=f"{self._joint}Answer: According to the coded text above, "
            "the three most frequently appeared words are:",
        )
        order = "\x1f".join(str(fact) for fact in (*facts, "order"))
        draft = _Coded(self.codec, frame, [_DOTS, *coded], self._fwe.alpha, order)
        return Drawn(draft, tuple(coded[:_ASKED]))
