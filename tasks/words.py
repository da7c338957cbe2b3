"""RULER's words, and its word keys: every adjective-noun pair of wonderwords, without holding six million strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import overload

__all__ = ["WordPairs", "single_words", "word_pairs"]


class WordPairs(Sequence[str]):
    """The sorted list of all distinct `adjective-noun` strings, computed on access.

    The pairs of one adjective lie together in the sorted list, unless another adjective begins with the same word and a
    hyphen ("blue", "blue-eyed"): such families are sorted as a whole, once.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[str | list[str]] = []
        self._starts: list[int] = []
        self._size = 0
        for family in _families(adjectives):
            block = family[0] if len(family) == 1 else sorted({a + n for a in family for n in self._nouns})
            self._blocks.append(block)
            self._starts.append(self._size)
            self._size += len(self._nouns) if isinstance(block, str) else len(block)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[str]:
        for block in self._blocks:
            yield from (block + noun for noun in self._nouns) if isinstance(block, str) else block

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"index {index} of {self._size} word pairs")
        number = bisect_right(self._starts, at) - 1
        block, offset = self._blocks[number], at - self._starts[number]
        return block + self._nouns[offset] if isinstance(block, str) else block[offset]


def _families(adjectives: Iterable[str]) -> list[list[str]]:
    """Hyphenated adjectives in sorted order, grouped where one is a prefix of the others."""
    families: list[list[str]] = []
    for stem in sorted({adjective + "-" for adjective in adjectives}):
        if families and stem.startswith(families[-1][0]):
            families[-1].append(stem)
        else:
            families.append([stem])
    return families


@cache
def word_pairs() -> WordPairs:
    """The 6,171,620 pairs of wonderwords 3.0.1, the list that lm-eval and NVIDIA/RULER draw their word keys from."""
    return WordPairs(_lines("wonderwords_adjectives.txt"), _lines("wonderwords_nouns.txt"))


@cache
def single_words() -> tuple[str, ...]:
    """The distinct nouns, adjectives and verbs of wonderwords 3.0.1, sorted: RULER's words for word lists."""
    names = ("wonderwords_nouns.txt", "wonderwords_adjectives.txt", "wonderwords_verbs.txt")
    return tuple(sorted({word for name in names for word in _lines(name)}))


def _lines(name: str) -> list[str]:
    text = files("dllm_bench.tasks.data").joinpath(name).read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]
