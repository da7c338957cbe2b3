"""Word problems of one to three steps and plain sums: what the tiny model learns to calculate from.

The fields are GSM8K's: a question, and an answer that shows each step as an equation and ends with `#### result`.
Equations are written in columns of three digits (008+093=101): digits that belong together are always at one distance.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

__all__ = ["held_out_problem", "problem", "sums"]

LARGEST = 999
NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Ida", "Max", "Zoe", "Sam", "Kim", "Tim", "Lea", "Jon", "Una", "Pam")
THINGS = ("books", "cards", "hats", "pens", "stars", "rings", "cups", "keys", "maps", "toys", "seeds", "coins", "bells",
          "boxes", "shells", "stones", "stamps", "nuts")  # fmt: skip
MORE = (
    "{p} finds {b} more.",
    "{p} buys {b} more {o}.",
    "{f} gives {p} {b} {o}.",
    "Then {p} makes {b} new ones.",
    "{p} gets {b} more from {f}.",
    "The next day {p} takes {b} more.",
)
LESS = (
    "{p} loses {b} of them.",
    "{p} gives {b} {o} to {f}.",
    "{p} sells {b} of the {o}.",
    "Then {f} takes {b} of them.",
    "{b} of the {o} get lost.",
)
TIMES = (
    "A year after, {p} has {b} times as many.",
    "Then {p} makes them {b} times as many.",
)
SHARED = (
    "{p} puts them into {b} equal boxes and takes one box home.",
    "{p} shares them with friends, so that {b} people have the same number each.",
)


def held_out_problem(question: str) -> bool:
    """A tenth of all questions, chosen by hash, is for measuring only: training never sees one."""
    return zlib.crc32(question.encode()) % 10 == 0


def _number(rng: random.Random, low: int, high: int) -> int:
    """A number from low to high; short ones are as likely as long ones."""
    ceilings = [c for c in (9, 99, LARGEST) if c >= low]
    top = min(high, rng.choice(ceilings))
    return rng.randint(low, max(low, top))


def _operation(rng: random.Random, have: int, signs: dict[str, int] | None = None) -> tuple[str, int, int]:
    """A sign, its second operand and the result, for `have` things: all from 1 to 999.

    `signs`: their shares. Several times and equal parts are two to five.
    """
    signs = signs or {"+": 8, "-": 8, "*": 2, "/": 1}
    while True:
        sign = rng.choices(list(signs), list(signs.values()))[0]
        if sign == "+" and have < LARGEST - 1:
            b = _number(rng, 2, LARGEST - have)
            return sign, b, have + b
        if sign == "-" and have > 3:
            b = _number(rng, 2, have - 1)
            return sign, b, have - b
        if sign == "*" and have <= LARGEST // 5:
            b = rng.randint(2, 5)
            return sign, b, have * b
        divisors = [b for b in range(2, 6) if have % b == 0 and b < have <= LARGEST // 5]
        if sign == "/" and divisors:
            b = rng.choice(divisors)
            return sign, b, have // b


def _equation(a: int, sign: str, b: int, result: int) -> str:
    return f"{a:03}{sign}{b:03}={result:03}"


def _answer(equations: list[str]) -> str:
    return "\n".join([*equations, f"#### {int(equations[-1].partition('=')[2])}"])


def _chain(rng: random.Random) -> tuple[str, str]:
    """Something is had, and becomes more or less once to three times."""
    name, friend = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    have = _number(rng, 4, LARGEST - 1)
    sentences, equations = [f"{name} has {have} {thing}."], []
    for _ in range(rng.randint(1, 3)):
        sign, b, result = _operation(rng, have)
        frame = rng.choice({"+": MORE, "-": LESS, "*": TIMES, "/": SHARED}[sign])
        sentences.append(frame.format(p=name, f=friend, b=b, o=thing))
        equations.append(_equation(have, sign, b, result))
        have = result
    sentences.append(f"How many {thing} does {name} have now?")
    return " ".join(sentences), _answer(equations)


def _together(rng: random.Random) -> tuple[str, str]:
    """Two have something, one more or less than the other."""
    name, friend = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    have = _number(rng, 4, 400)
    more = rng.random() < 0.5
    b = _number(rng, 2, 199 if more else have - 1)
    other = have + b if more else have - b
    told = f"{name} has {have} {thing}. {friend} has {b} {'more' if more else 'fewer'} {thing} than {name}."
    equation = _equation(have, "+" if more else "-", b, other)
    if rng.random() < 0.3:
        return f"{told} How many {thing} does {friend} have?", _answer([equation])
    question = f"{told} How many {thing} do they have in all?"
    return question, _answer([equation, _equation(have, "+", other, have + other)])


def _prices(rng: random.Random) -> tuple[str, str]:
    """Several things at one price; in the longer form paid from a sum."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    count = rng.randint(2, 5)
    price = _number(rng, 2, LARGEST // 5)
    paid = count * price
    told = f"{name} buys {count} {thing} for {price} dollars each."
    first = _equation(count, "*", price, paid)
    if paid > LARGEST - 1 or rng.random() < 0.4:
        return f"{told} How many dollars does {name} pay?", _answer([first])
    had = rng.randint(paid + 1, LARGEST)
    question = f"{name} has {had} dollars. {told} How many dollars does {name} have now?"
    return question, _answer([first, _equation(had, "-", paid, had - paid)])


_MAKERS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_chain, _together, _prices)


def problem(rng: random.Random, evaluation: bool) -> tuple[str, str]:
    """A question and its answer; all numbers are from 1 to 999."""
    while True:
        question, answer = rng.choices(_MAKERS, (7, 2, 1))[0](rng)
        if held_out_problem(question) == evaluation:
            return question, answer


def sums(rng: random.Random, count: int, signs: dict[str, int]) -> list[tuple[str, str]]:
    """Bare equations with signs in these shares, each as what is given and the result."""
    out = []
    while len(out) < count:
        # carries are what is hard: more long numbers than in the problems
        most = rng.choice((LARGEST - 1, LARGEST // 5))
        have = rng.randint(11, most) if rng.random() < 0.6 else _number(rng, 2, most)
        sign, b, result = _operation(rng, have, signs)
        left, right = (b, have) if sign in "+*" and rng.random() < 0.5 else (have, b)
        given, _, told = _equation(left, sign, right, result).partition("=")
        out.append((given + "=", told))
    return out
