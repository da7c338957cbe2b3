"""The built-in haystack: plain prose on everyday subjects, made by a small grammar, the same on every machine.

Each paragraph stays with one subject and walks through it: who works there, what they do and why, what people notice.
The text holds no digits and none of the words that RULER's needles are made of, so that a needle is the only answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from dllm_bench.tasks.prose_words import (
    ADVERBS,
    CONDITIONS,
    LINKS,
    PEOPLE,
    PLACES,
    REASONS,
    RESULTS,
    SUBJECTS,
    TIMES,
    VIEWS,
    Subject,
)

__all__ = ["SENTENCES", "built_in_sentences"]

SENTENCES = 12_000
"""Distinct sentences of the built-in text: enough for 128k tokens without repetition."""

_SEED = 2025


@dataclass
class _Writer:
    """Draws words from lists; one writer makes one text."""

    rng: random.Random

    def any(self, words: tuple[str, ...]) -> str:
        # random() is the one method whose values Python promises to keep between versions
        return words[int(self.rng.random() * len(words))]

    def two(self, words: tuple[str, ...]) -> tuple[str, str]:
        first = int(self.rng.random() * len(words))
        step = 1 + int(self.rng.random() * (len(words) - 1))
        return words[first], words[(first + step) % len(words)]


def _opening(w: _Writer, s: Subject) -> str:
    return w.any(
        (
            f"{w.any(TIMES)}, {s.worker} {w.any(s.deeds)} {w.any(PLACES)}",
            f"{w.any(PLACES)}, {s.field} has always been a matter of {w.any(s.virtues)} and {w.any(s.virtues)}",
            f"{w.any(PEOPLE)} once told me that {s.field} begins with {w.any(s.things)}",
            f"there is a kind of {s.field} that you find only {w.any(PLACES)}, {w.any(TIMES)}",
            f"most people who write about {s.field} forget {w.any(s.things)} {w.any(PLACES)}",
        )
    )


def _deed(w: _Writer, s: Subject) -> str:
    return w.any(
        (
            f"{s.worker} {w.any(ADVERBS)} {w.any(s.deeds)}, {w.any(REASONS)}",
            f"{w.any(CONDITIONS)}, {s.worker} {w.any(s.deeds)} and {w.any(s.deeds)}",
            f"{w.any(TIMES)}, {s.worker} {w.any(s.deeds)}, and {w.any(RESULTS)}",
            f"whoever {w.any(s.deeds)} {w.any(PLACES)} learns {w.any(s.virtues)} sooner or later",
            f"{s.worker} {w.any(s.deeds)} {w.any(CONDITIONS)}, although {w.any(PEOPLE)} would rather wait",
        )
    )


def _thing(w: _Writer, s: Subject) -> str:
    one, other = w.two(s.things)
    return w.any(
        (
            f"{one} and {other} are kept apart, {w.any(REASONS)}",
            f"it is easy to praise {one} and hard to look after {other} {w.any(CONDITIONS)}",
            f"{w.any(PEOPLE)} cares more for {one} than for {other}, {w.any(REASONS)}",
            f"{w.any(CONDITIONS)}, {one} can be had {w.any(PLACES)} for very little",
            f"nobody thinks about {one} as long as {other} will do, and then {w.any(RESULTS)}",
            f"without {one} there would be no use for {other}, {w.any(VIEWS)}",
        )
    )


def _view(w: _Writer, s: Subject) -> str:
    return w.any(
        (
            f"{w.any(PEOPLE)} says that {s.field} asks for {w.any(s.virtues)} {w.any(CONDITIONS)}",
            f"{w.any(VIEWS)}, {w.any(s.virtues)} matters less than {w.any(s.things)}",
            f"what {w.any(PEOPLE)} remembers best is {w.any(s.things)} {w.any(PLACES)}",
            f"{w.any(PEOPLE)} doubts it, {w.any(REASONS)}, yet {w.any(RESULTS)}",
            f"{w.any(VIEWS)}, {s.worker} should be paid for {w.any(s.virtues)} and not for {w.any(s.things)}",
        )
    )


_COURSE: tuple[Callable[[_Writer, Subject], str], ...] = (_opening, _deed, _thing, _deed, _view, _thing, _view)


@cache
def built_in_sentences() -> tuple[str, ...]:
    """SENTENCES distinct sentences, each with a capital and a full stop; every call gives the same ones."""
    writer = _Writer(random.Random(_SEED))
    made: dict[str, None] = {}
    while True:
        subject = SUBJECTS[int(writer.rng.random() * len(SUBJECTS))]
        for place, write in enumerate(_COURSE):
            sentence = write(writer, subject)
            if place and writer.rng.random() < 0.25:
                sentence = f"{writer.any(LINKS)}, {sentence}"
            made[sentence[0].upper() + sentence[1:] + "."] = None
            if len(made) == SENTENCES:
                return tuple(made)
