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
    """A prompt of the form `name` of at most `budget` tokens where that many hold two facts.

    With an s behind its name the form asks for several things at once, one answer sentence each: many answers per
    token of training.
    """
    many = name.endswith("s")
    form = FORMS[name.removesuffix("s")]
    things = draw_things(rng, maker.words, 24 + budget // 30, evaluation)
    asked = things[: max(1, min(24, budget // 80))] if many else things[:1]
    question = "List them." if many else form.question.format(thing=asked[0])
    start = "" if many else form.prefix.format(thing=asked[0])
    head, tail = maker.encode(START + form.intro), maker.encode("\n\n" + question) + maker.encode(TURN + start)
    listed = [maker.encode_once(form.prefix.format(thing=thing)) for thing in asked] if many else []
    answers = sum(len(given) + 7 for given in listed)  # a number of four digits, its space, its stop and its line
    room = budget - len(head) - len(tail) - answers
    body, places = (_numbered if form is FORMS["paragraph"] else _facts)(maker, rng, things, room)
    if many:
        answer, scored = _listing(maker, listed, places)
    else:
        answer = maker.encode(f" {places[0]}.")
        scored = [True] * len(answer)
    pieces = [Piece(head), *body, Piece(tail)]
    return Prompt(pieces, [*answer, maker.eot], [*scored, True], places[: len(asked)])


def _listing(maker: Maker, listed: list[list[int]], places: list[str]) -> tuple[list[int], list[bool]]:
    """The answer that names things and tells their places, as many as there are; and which tokens are predicted."""
    answer: list[int] = []
    scored: list[bool] = []
    for given, place in zip(listed, places, strict=False):
        told = maker.encode_once(f" {place}.\n")
        answer += given + told
        scored += [False] * len(given) + [True] * len(told)
    return answer, scored


def _facts(maker: Maker, rng: random.Random, things: list[str], room: int) -> tuple[list[Piece], list[str]]:
    """Facts between made-up sentences, from two to one in about 60 tokens; and the places of the first things."""
    places = [draw_place(rng) for _ in things]
    lines = [FACT.format(thing=thing, place=place) for thing, place in zip(things, places, strict=True)]
    lines = lines[: rng.randint(2, max(6, min(len(things), room // 60)))]
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
    return pieces, places[: len(lines)]


def _numbered(maker: Maker, rng: random.Random, things: list[str], room: int) -> tuple[list[Piece], list[str]]:
    """Numbered paragraphs, and for each of the first things the number of the one that is about it.

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
    order = rng.sample(range(len(paragraphs)), len(paragraphs))
    names = [things[i] for i in order]
    pieces = []
    for i, texts in enumerate(paragraphs):
        texts[-1] = (LABEL.format(thing=names[i], number=first + i), False)
        for j, (text, hay) in enumerate(texts):
            separator = " " if j else "\n\n" if i else ""
            pieces.append(Piece(maker.encode(separator + text), hay))
    return pieces, [str(first + order.index(i)) for i in range(len(order))]
