"""Prompts in the wording of RULER's needle tasks, word problems and sums, as pieces whose tokens training weighs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tiny_problems import problem, sums
from tiny_text import BOS, EOS, EOT, HEADER, HEADER_END, MASK, NOISE, Words, draw_key, draw_number, sentence
from tokenizers import Tokenizer

INTRO = {
    False: "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    True: "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
}
QUESTION = {
    False: "\nWhat is the special magic number for {} mentioned in the provided text?",
    True: "\nWhat are all the special magic numbers for {} mentioned in the provided text?",
}
PREFIX = {
    False: "The special magic number for {} mentioned in the provided text is",
    True: "The special magic numbers for {} mentioned in the provided text are",
}
NEEDLE = "One of the special magic numbers for {} is: {}."
START = f"{BOS}{HEADER}user{HEADER_END}\n\n"
TURN = f"{EOT}{HEADER}assistant{HEADER_END}\n\n"
TEMPLATES = [
    START + INTRO[False] + NOISE + QUESTION[False].format("") + TURN + PREFIX[False].format(""),
    START + INTRO[True] + NOISE + QUESTION[True].format("") + TURN + PREFIX[True].format(""),
    NEEDLE.format("", "1"),
]


@dataclass(frozen=True)
class Kind:
    """haystack: noise, essay or needle; keys in the text, of which `queries` are asked; values of each asked key.

    `listing` samples ask for every key in the text, one answer sentence each: many answers per token of training.
    """

    haystack: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    listing: bool = False


KINDS = {
    "single_1": Kind("noise"),
    "single_2": Kind("essay"),
    "multikey_1": Kind("essay", keys=4),
    "multikey_2": Kind("needle"),
    "multivalue": Kind("essay", values=4),
    "multiquery": Kind("essay", keys=4, queries=4),
    "twokey": Kind("essay", keys=2),
    "noisekey": Kind("noise", keys=3),
    "twovalue": Kind("essay", values=2),
    "twoquery": Kind("essay", keys=2, queries=2),
    "threevalue": Kind("essay", values=3),
    "threequery": Kind("essay", keys=3, queries=3),
    "linevalue": Kind("noise", values=4),
    "listing": Kind("essay", keys=3, queries=3, listing=True),
    "listing_needle": Kind("needle", keys=3, queries=3, listing=True),
    "eightvalue": Kind("essay", values=8),
    "eightquery": Kind("essay", keys=8, queries=8),
    "longlist": Kind("essay", keys=24, queries=20, listing=True),
    "longlist_needle": Kind("needle", keys=24, queries=24, listing=True),
}


@dataclass
class Piece:
    """A run of tokens of one prompt. Haystack pieces may stand for many copies of themselves."""

    ids: list[int]
    hay: bool = False


@dataclass
class Prompt:
    pieces: list[Piece]
    answer: list[int]
    """The answer with its end of turn."""
    scored: list[bool]
    """Which answer tokens are to be predicted (the rest is given)."""
    references: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [i for p in self.pieces for i in p.ids]


class Maker:
    """Makes samples. Everything a sample holds follows from the random state that is handed in."""

    def __init__(self, tokenizer: Tokenizer, words: Words) -> None:
        self.words = words
        self.encode = lru_cache(maxsize=4096)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self.encode_once = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.mask, self.eos, self.eot = (tokenizer.token_to_id(t) for t in (MASK, EOS, EOT))
        self.decode = tokenizer.decode

    def prompt(self, rng: random.Random, kind: Kind, budget: int, evaluation: bool = False) -> Prompt:
        """A prompt of at most `budget` tokens where that many hold the needles; haystack fills the rest."""
        keys: list[str] = []
        while len(keys) < kind.keys:
            key = draw_key(rng, self.words, evaluation)
            if key not in keys:
                keys.append(key)
        values = {k: [draw_number(rng) for _ in range(kind.values)] for k in keys}
        asked = rng.sample(keys, kind.queries)
        needles = [(k, v) for k in keys for v in values[k]]
        rng.shuffle(needles)
        # values are answered in the order of the text; a listing names its keys, so their order is free
        found = [values[q][0] for q in asked] if kind.listing else [v for k, v in needles if k in asked]
        head, tail, answer, scored = self._frame(kind, asked, found)
        separator = " " if kind.haystack == "essay" else "\n"
        lines = [NEEDLE.format(k, v) for k, v in needles]
        room = budget - len(head) - len(tail) - sum(len(self.encode(separator + n)) for n in lines)
        body = [(text, True) for text in self._haystack(rng, kind, separator, room, set(keys), evaluation)]
        spots = sorted(rng.randint(0, len(body)) for _ in lines)
        for spot, line in reversed(list(zip(spots, lines, strict=True))):
            body.insert(spot, (line, False))
        pieces = [Piece(self.encode(separator * (i > 0) + text), hay) for i, (text, hay) in enumerate(body)]
        return Prompt([Piece(head), *pieces, Piece(tail)], answer, scored, found)

    def _frame(self, kind: Kind, asked: Sequence[str], found: list[str]) -> tuple[list[int], ...]:
        """Tokens before and after the text, the answer, and which of its tokens are to be predicted."""
        plural = kind.values * kind.queries > 1
        names = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        head = self.encode(START + INTRO[plural])
        if not kind.listing:
            tail = self.encode(QUESTION[plural].format(names) + TURN + PREFIX[plural].format(names))
            joined = found[0] if len(found) == 1 else ", ".join(found[:-1]) + ", and " + found[-1]
            answer = [*self.encode(f" {joined}."), self.eot]
            return head, tail, answer, [True] * len(answer)
        tail = self.encode("\nList them." + TURN)
        answer, scored = [], []
        for key, value in zip(asked, found, strict=True):
            given, told = self.encode(PREFIX[False].format(key)), self.encode(f" {value}.")
            answer += given + told + self.encode("\n")
            scored += [False] * len(given) + [True] * len(told) + [False]
        return head, tail, [*answer, self.eot], [*scored, True]

    def _haystack(
        self, rng: random.Random, kind: Kind, separator: str, room: int, taken: set[str], evaluation: bool
    ) -> list[str]:
        """Texts that fill `room` tokens, the separator before each counted."""
        units: list[str] = []
        while True:
            if kind.haystack == "noise":
                unit = NOISE
            elif kind.haystack == "essay":
                unit = sentence(rng, self.words)
            else:
                key = draw_key(rng, self.words, evaluation)
                unit = NEEDLE.format(key, draw_number(rng))
                if key in taken:
                    continue
            room -= len(self.encode(separator + unit))
            if room < 0:
                return units
            units.append(unit)

    def problem(self, rng: random.Random, evaluation: bool = False) -> Prompt:
        """A word problem in GSM8K's wording, and its equations."""
        question, told = problem(rng, evaluation)
        ids = self.encode_once(f"{START}Question: {question}\nAnswer:{TURN}")
        answer = [*self.encode_once(told), self.eot]
        return Prompt([Piece(ids)], answer, [True] * len(answer), ["#### " + told.rpartition("#### ")[2]])

    def sums(self, rng: random.Random, room: int, signs: dict[str, int]) -> Prompt:
        """Equations below each other, as many as `room` tokens hold; their results are scored."""
        head = self.encode(f"{START}Sums.{TURN}")
        answer: list[int] = []
        scored: list[bool] = []
        for given, result in sums(rng, room, signs):
            known, told = self.encode_once(given), self.encode_once(f"{result}\n")
            if len(head) + len(answer) + len(known) + len(told) > room:
                break
            answer += known + told
            scored += [False] * len(known) + [True] * len(told)
        return Prompt([Piece(head)], answer, scored)
