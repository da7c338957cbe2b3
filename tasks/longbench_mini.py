"""The mini sets: questions on short paragraphs, for models and machines that LongBench is too much for.

They have LongBench's fields and metrics, lie in the package, and fill any context length: paragraphs of other items go
around an item's own. A set's score says nothing about LongBench's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil

from dllm_bench.errors import UserError
from dllm_bench.running.task import Codec
from dllm_bench.tasks.draft import locate
from dllm_bench.tasks.draws import private_random
from dllm_bench.tasks.fitting import fit
from dllm_bench.tasks.longbench_data import Item
from dllm_bench.tasks.middle_cut import TooShort
from dllm_bench.tasks.pieces import answer_joint

__all__ = ["MINI", "MiniPrompt", "MiniSet", "MiniSource"]

FILL = 0.98
"""Share of the context length that a filled prompt has to use, generation budget included."""

_SEPARATOR = "\n\n"
_NUMBERED = re.compile(r"This is all about the (?P<key>.+): Paragraph \d+\.$")


@dataclass(frozen=True)
class MiniSet:
    """One set: its prompt, its metric, how a question names its key, and whether paragraphs carry numbers."""

    metric: str
    budget: int
    prompt: str
    question: re.Pattern[str]
    numbered: bool

    def key(self, item: Item) -> str:
        """What the item asks for."""
        found = self.question.fullmatch(item.input)
        if found is None:
            raise UserError(f"{item.dataset} {item.id}: the question '{item.input}' is none of this set")
        return found["key"]

    def sentence(self, item: Item, place: int) -> str:
        """The answering sentence, where its paragraph is the one at `place` from 1."""
        if self.numbered:
            return f"This is all about the {self.key(item)}: Paragraph {place}."
        return f"The {self.key(item)} is in room {item.answers[0]}."

    def answers(self, item: Item, paragraph: str) -> bool:
        """Whether the paragraph is the answering one."""
        found = _NUMBERED.search(paragraph) if self.numbered else None
        return found["key"] == self.key(item) if found else self.sentence(item, 0) in paragraph

    def placed(self, paragraph: str, place: int) -> str:
        """The paragraph at `place` from 1."""
        if not self.numbered:
            return paragraph
        return _NUMBERED.sub(lambda found: f"This is all about the {found['key']}: Paragraph {place}.", paragraph)


MINI: dict[str, MiniSet] = {
    "mini_qa": MiniSet(
        "qa_f1",
        32,
        "Read the following text and answer the question.\n\n{context}\n\n{input}",
        re.compile(r"Which room is the (?P<key>.+) in\?"),
        False,
    ),
    "mini_retrieval": MiniSet(
        "retrieval",
        32,
        "Read the following paragraphs and tell which one is about the thing that is asked for."
        "\n\n{context}\n\n{input}",
        re.compile(r"Which paragraph is about the (?P<key>.+)\?"),
        True,
    ),
}


@dataclass(frozen=True)
class MiniPrompt:
    """Final ids with the half-open range of the answering sentence; `place` is that of its paragraph, from 1."""

    ids: list[int]
    needle: tuple[int, int]
    references: tuple[str, ...]
    place: int
    paragraphs: int
    cut_unit: bool = False


class MiniSource:
    """The prompts of one set."""

    def __init__(self, codec: Codec, name: str, items: Sequence[Item]) -> None:
        self._codec, self._name, self._set, self._items = codec, name, MINI[name], items
        self._joint = answer_joint(codec)

    def as_it_is(self, item: Item) -> MiniPrompt:
        """The item with its own context."""
        paragraphs = item.context.split(_SEPARATOR)
        place = 1 + self._answering(item)
        sentence = self._set.sentence(item, place)
        if sentence not in paragraphs[place - 1] or self._references(item, place) != item.answers:
            raise UserError(f"{self._name} {item.id}: its answering paragraph is number {place}, and it says otherwise")
        ids = self._ids(item, item.context)
        return MiniPrompt(ids, self._needle(item, item.context, sentence, ids), item.answers, place, len(paragraphs))

    def filled(self, index: int, *, ctx: int, gen_length: int, seed: int) -> MiniPrompt:
        """Item `index` with 98 to 100 % of `ctx` tokens, generation budget included.

        Raises TooShort where not even the answering paragraph alone fits.
        """
        item = self._items[index]
        mix = _Mix(self._set, item, *self._fillers(item, (self._name, index, ctx, seed)))

        @cache
        def ids(units: int, rest: str) -> list[int]:
            return self._ids(item, mix.context(units, rest)[0])

        limit = ctx - gen_length
        own = len(ids(0, ""))
        each = max(1, (len(self._ids(item, item.context)) - own) // max(1, item.context.count(_SEPARATOR)))
        found = fit(
            lambda units, rest: len(ids(units, rest)),
            lambda units, tokens: mix.unit(units, units + 2),
            guess=max(0, limit - own) // each,
            limit=limit,
            least=ceil(FILL * ctx) - gen_length,
        )
        if found is None:
            raise TooShort(own)
        context, place = mix.context(*found)
        needle = self._needle(item, context, self._set.sentence(item, place), ids(*found))
        references = self._references(item, place)
        return MiniPrompt(ids(*found), needle, references, place, found[0] + 1, bool(found[1]))

    def _needle(self, item: Item, context: str, sentence: str, ids: Sequence[int]) -> tuple[int, int]:
        text, prefix = self._text(item, context), self._joint + item.answer_prefix
        first = text.index(sentence)
        return locate(self._codec, text, prefix, ids, [(first, first + len(sentence))])[0]

    def _references(self, item: Item, place: int) -> tuple[str, ...]:
        return (f"Paragraph {place}",) if self._set.numbered else item.answers

    def _text(self, item: Item, context: str) -> str:
        before, after = self._set.prompt.split("{context}")
        return before + context + after.replace("{input}", item.input)

    def _ids(self, item: Item, context: str) -> list[int]:
        return self._codec.wrap(self._text(item, context), self._joint + item.answer_prefix)

    def _answering(self, item: Item) -> int:
        """Which of the item's paragraphs is the answering one, from 0."""
        paragraphs = item.context.split(_SEPARATOR)
        found = [place for place, paragraph in enumerate(paragraphs) if self._set.answers(item, paragraph)]
        if len(found) != 1:
            raise UserError(f"{self._name} {item.id}: {len(found)} of its paragraphs answer '{item.input}', not one")
        return found[0]

    @cached_property
    def _pool(self) -> list[tuple[str, str]]:
        """Every paragraph of the set once, with its lower-case text."""
        every = (paragraph for item in self._items for paragraph in item.context.split(_SEPARATOR))
        return [(one, one.lower()) for one in dict.fromkeys(self._set.placed(one, 0) for one in every)]

    def _fillers(self, item: Item, facts: tuple[object, ...]) -> tuple[str, list[str], list[float]]:
        """The answering paragraph; the others, the item's own first; and a number for the place of each."""
        rng = private_random("longbench", *facts)
        place = self._answering(item)
        own = [self._set.placed(paragraph, 0) for paragraph in item.context.split(_SEPARATOR)]
        answering, key = own.pop(place), self._set.key(item).lower()
        others = [one for one, lower in self._pool if key not in lower and one not in own]
        # random() is the one method whose values Python promises to keep between versions
        order = [*sorted(own, key=lambda _: rng.random()), *sorted(others, key=lambda _: rng.random())]
        return answering, order, [rng.random() for _ in range(len(order) + 1)]


class _Mix:
    """The answering paragraph among the first n of the others; they begin again where they do not suffice."""

    def __init__(
        self, rules: MiniSet, item: Item, answering: str, others: Sequence[str], ranks: Sequence[float]
    ) -> None:
        if not others:
            raise UserError(f"{item.dataset} {item.id}: the set has no other paragraph to fill a context with")
        self._rules, self._answering, self._others, self._ranks = rules, answering, others, ranks

    def unit(self, number: int, place: int) -> str:
        """Paragraph `number` of the others, standing at `place` from 1."""
        return self._rules.placed(self._others[number % len(self._others)], place)

    def context(self, units: int, rest: str) -> tuple[str, int]:
        """The text with so many others and a cut one at the end, and the place of the answering paragraph."""
        order = sorted(range(units), key=lambda number: self._rank(number))
        own = self._ranks[-1]
        place = sum(self._rank(number) < own for number in range(units))
        order.insert(place, -1)
        texts = [
            self._rules.placed(self._answering, at) if number < 0 else self.unit(number, at)
            for at, number in enumerate(order, start=1)
        ]
        return _SEPARATOR.join([*texts, rest] if rest else texts), place + 1

    def _rank(self, number: int) -> float:
        """Where among the others a paragraph stands: a repeated one elsewhere than before."""
        again, one = divmod(number, len(self._others))
        return (self._ranks[one] + 0.618 * again) % 1.0
