"""Documents with planted facts and numbered paragraphs: what the tiny model answers questions about.

The wording is that of the built-in LongBench-like sets (`make_mini_sets.py`): which room a thing is in, and which
paragraph is about it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_prompts import START, TURN, Maker, Piece, Prompt
from tiny_text import Words, draw_key, sentence

__all__ = ["FACT", "FORMS", "LABEL", "Form", "document", "draw_place", "draw_things", "paragraph"]

FACT = "The {thing} is in room {place}."
LABEL = "This is all about the {thing}: Paragraph {number}."


@dataclass(frozen=True)
class Form:
    """Wording of one kind of question: the start of the prompt, the question, and the start of the answer."""

    intro: str
    question: str
    prefix: str


FORMS = {
    "room": Form(
        "Read the following text and answer the question.\n\n",
        "Which room is the {thing} in?",
        "The {thing} is in room",
    ),
    "paragraph": Form(
        "Read the following paragraphs and tell which one is about the thing that is asked for.\n\n",
        "Which paragraph is about the {thing}?",
        "The paragraph about the {thing} is Paragraph",
    ),
}


def draw_things(rng: random.Random, words: Words, count: int, evaluation: bool) -> list[str]:
    """Different pairs of adjective and noun; those for measuring are the held-out keys of the needle tasks."""
    things: list[str] = []
    while len(things) < count:
        thing = draw_key(rng, words, evaluation).replace("-", " ")
        if thing not in things:
            things.append(thing)
    return things


def draw_place(rng: random.Random) -> str:
    """The number of a room."""
    return str(rng.randint(100, 9999))


def paragraph(rng: random.Random, words: Words, low: int, high: int) -> list[str]:
    """Made-up sentences, `low` to `high` of them."""
    return [sentence(rng, words) for _ in range(rng.randint(low, high))]


def document(maker: Maker, rng: random.Random, name: str, budget: int, evaluation: bool = False) -> Prompt:
    """A prompt of the form `name` of at most `budget` tokens where that many hold two facts."""
    form = FORMS[name]
    things = draw_things(rng, maker.words, 24, evaluation)
    asked = things[0]
    tail = maker.encode("\n\n" + form.question.format(thing=asked) + TURN + form.prefix.format(thing=asked))
    head = maker.encode(START + form.intro)
    room = budget - len(head) - len(tail)
    if name == "room":
        places = [draw_place(rng) for _ in things]
        body = _facts(maker, rng, list(zip(things, places, strict=True)), room)
        told = places[0]
    else:
        body, told = _numbered(maker, rng, things, room)
    answer = [*maker.encode(f" {told}."), maker.eot]
    return Prompt([Piece(head), *body, Piece(tail)], answer, [True] * len(answer), [told])


def _facts(maker: Maker, rng: random.Random, facts: list[tuple[str, str]], room: int) -> list[Piece]:
    """The first fact and up to five others between made-up sentences."""
    lines = [FACT.format(thing=thing, place=place) for thing, place in facts[: rng.randint(2, 6)]]
    while len(lines) > 2 and sum(len(maker.encode("\n\n" + line)) for line in lines) > room * 0.6:
        lines.pop()
    room -= sum(len(maker.encode("\n\n" + line)) for line in lines)
    texts: list[tuple[str, bool]] = []
    while True:
        text = sentence(rng, maker.words)
        room -= len(maker.encode("\n\n" + text))
        if room < 0:
            break
        texts.append((text, True))
    for line in rng.sample(lines, len(lines)):
        texts.insert(rng.randint(0, len(texts)), (line, False))
    pieces = []
    for i, (text, hay) in enumerate(texts):
        separator = "" if i == 0 else "\n\n" if rng.random() < 0.25 else " "
        pieces.append(Piece(maker.encode(separator + text), hay))
    return pieces


def _numbered(maker: Maker, rng: random.Random, things: list[str], room: int) -> tuple[list[Piece], str]:
    """Numbered paragraphs, and the number of the one that is about the first thing.

    They do not always begin at 1, so that large numbers are seen in short documents.
    """
    first = 1 if rng.random() < 0.5 else rng.randint(1, 99)
    longest = rng.choice((2, 3, 6))
    paragraphs: list[list[tuple[str, bool]]] = []
    while len(paragraphs) < len(things):
        label = LABEL.format(thing=things[len(paragraphs)], number=first + len(paragraphs))
        texts = [(text, True) for text in paragraph(rng, maker.words, 1, longest)]
        room -= sum(len(maker.encode(" " + text)) for text, _ in texts) + len(maker.encode("\n\n " + label))
        if room < 0 and len(paragraphs) >= 2:
            break
        paragraphs.append([*texts, (label, False)])
    # the asked thing may be in any of them
    place = rng.randrange(len(paragraphs))
    names = [things[i] for i in range(len(paragraphs))]
    names[0], names[place] = names[place], names[0]
    pieces = []
    for i, texts in enumerate(paragraphs):
        texts[-1] = (LABEL.format(thing=names[i], number=first + i), False)
        for j, (text, hay) in enumerate(texts):
            separator = " " if j else "\n\n" if i else ""
            pieces.append(Piece(maker.encode(separator + text), hay))
    return pieces, str(first + place)
