"""What a RULER niah prompt says: settings of the eight subsets, wording, and the needles drawn for one sample.

The wording is lm-eval 0.4.13's and NVIDIA/RULER's, byte for byte.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from dllm_bench.tasks.draws import below
from dllm_bench.tasks.words import word_pairs

__all__ = [
    "DEPTHS",
    "NOISE",
    "SETTINGS",
    "Kind",
    "Needles",
    "Setting",
    "draw_decoys",
    "draw_needles",
    "draw_questions",
    "draw_standard",
]

Kind = Literal["words", "numbers", "uuids"]
T = TypeVar("T")

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""One line of the noise haystack."""

DEPTHS = tuple(round(i * 100 / 39) for i in range(40))
"""The depths, in percent of the sentences, that essay needles are put at: 40 points, rounded."""


@dataclass(frozen=True)
class Setting:
    """One niah subset: its haystack, the kinds of keys and values, and how many keys, values per key and queries."""

    haystack: Literal["noise", "essay", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def single(self) -> bool:
        """Whether the question asks for one value, and so is worded in the singular."""
        return self.queries * self.values == 1

    @property
    def questions(self) -> int | None:
        """Questions for different keys that one haystack allows; None: any number, since each line of a haystack of
        needles hides a key."""
        return None if self.haystack == "needles" else self.keys // self.queries

    @property
    def separator(self) -> str:
        """What stands between two units of the haystack: essays are one paragraph, the others have lines."""
        return " " if self.haystack == "essay" else "\n"

    def needle(self, key: str, value: str) -> str:
        """The sentence that hides a value; its kind is in the plural even where one value is asked for."""
        return f"One of the special magic {self.value} for {key} is: {value}."

    def head(self) -> str:
        """The instruction line before the haystack."""
        some = f"A special magic {self._asked} is" if self.single else f"Some special magic {self._asked} are"
        return (
            f"{some} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {self._asked} afterwards."
        )

    def question(self, query: str) -> str:
        """The line after the haystack."""
        what = "What is the" if self.single else "What are all the"
        return f"{what} special magic {self._asked} for {query} mentioned in the provided text?"

    def answer_prefix(self, query: str) -> str:
        """How the answer begins: given to the model, after the end of the user's turn."""
        verb = "is" if self.single else "are"
        return f"The special magic {self._asked} for {query} mentioned in the provided text {verb}"

    @property
    def _asked(self) -> str:
        return self.value.removesuffix("s") if self.single else self.value


SETTINGS: dict[str, Setting] = {
    "single_1": Setting("noise"),
    "single_2": Setting("essay"),
    "single_3": Setting("essay", value="uuids"),
    "multikey_1": Setting("essay", keys=4),
    "multikey_2": Setting("needles"),
    "multikey_3": Setting("needles", key="uuids", value="uuids"),
    "multivalue": Setting("essay", values=4),
    "multiquery": Setting("essay", keys=4, queries=4),
}


@dataclass(frozen=True)
class Needles:
    """The needles of one sample.

    Attributes:
        sentences: all needles in the order in which they stand in the text.
        places: for each sentence where it stands, as a share of the haystack's units, in 0..1 and ascending.
        asked: for each reference the index of its sentence.
        references: the asked values, query by query.
        query: the asked keys as the question names them.
        taken: every key and value used.
    """

    sentences: tuple[str, ...]
    places: tuple[float, ...]
    asked: tuple[int, ...]
    references: tuple[str, ...]
    query: str
    taken: frozenset[str]


def draw_needles(setting: Setting, rng: random.Random) -> Needles:
    """Needles with keys and values that are all different, in shuffled order. See `draw_questions`."""
    return draw_questions(setting, rng, 1)[0]


def draw_questions(setting: Setting, rng: random.Random, count: int) -> list[Needles]:
    """The same needles `count` times, each time with other keys asked for; the first is what `draw_needles` gives.

    In an essay the places are drawn without replacement from DEPTHS; among lines they are uniform in [0, 1).
    """
    taken: set[str] = set()
    keys = [_new(setting.key, rng, taken) for _ in range(setting.keys)]
    facts = [(key, _new(setting.value, rng, taken)) for key in keys for _ in range(setting.values)]
    order = _shuffled(list(range(len(facts))), rng)
    queries = _shuffled(keys, rng)
    if setting.haystack == "essay":
        places = sorted(depth / 100 for depth in _shuffled(list(DEPTHS), rng)[: len(facts)])
    else:
        places = sorted(rng.random() for _ in facts)
    made = []
    for first in range(0, count * setting.queries, setting.queries):
        names = queries[first : first + setting.queries]
        asked = [i for query in names for i, (key, _) in enumerate(facts) if key == query]
        made.append(
            Needles(
                sentences=tuple(setting.needle(*facts[i]) for i in order),
                places=tuple(places),
                asked=tuple(order.index(i) for i in asked),
                references=tuple(facts[i][1] for i in asked),
                query=names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}",
                taken=frozenset(taken),
            )
        )
    return made


def draw_decoys(setting: Setting, needles: Needles, rng: random.Random) -> Callable[[int], str]:
    """The lines of a haystack of needles: line k, drawn when it is first asked for; no key or value comes twice."""
    taken = set(needles.taken)
    lines: list[str] = []

    def line(k: int) -> str:
        while len(lines) <= k:
            lines.append(setting.needle(_new(setting.key, rng, taken), _new(setting.value, rng, taken)))
        return lines[k]

    return line


def draw_standard(kind: Kind, rng: random.Random) -> str:
    """A key or value drawn by the same calls as in lm-eval and NVIDIA/RULER, for a stream equal to theirs."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return _uuid(rng)
    return rng.choice(word_pairs())


def _new(kind: Kind, rng: random.Random, taken: set[str]) -> str:
    while True:
        one = _draw(kind, rng)
        if one not in taken:
            taken.add(one)
            return one


def _draw(kind: Kind, rng: random.Random) -> str:
    if kind == "numbers":
        return str(1_000_000 + below(9_000_000, rng))
    if kind == "uuids":
        return _uuid(rng)
    return word_pairs()[below(len(word_pairs()), rng)]


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _shuffled(items: list[T], rng: random.Random) -> list[T]:
    # another permutation than that of `draws.shuffled`: niah's samples keep it
    left = list(items)
    return [left.pop(below(len(left), rng)) for _ in items]
