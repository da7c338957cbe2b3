"""Training and held-out samples of the tiny model: needle tasks in RULER's wording."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from tiny_text import BOS, EOS, EOT, HEADER, HEADER_END, MASK, NOISE, Words, draw_key, draw_number, sentence
from tokenizers import Tokenizer
from torch import Tensor

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


@dataclass
class Batch:
    """One training batch. Only the last `rows` positions are predicted.

    `copies` is the logarithm of how many haystack copies a key stands for; None where all are single.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    copies: Tensor | None
    rows: int
    kinds: tuple[str, ...]
    ghosts: tuple[Tensor, Tensor, Tensor] | None = None
    """Keys that stand where copies of the haystack would: token index, position, logarithm of the weight [B, P]."""


@dataclass
class _Row:
    ids: list[int]
    labels: list[int]
    weights: list[float]
    positions: list[int]
    copies: list[float]
    response: int
    clones: list[list[tuple[int, int]]] = field(default_factory=list)


class Batches:
    """Batches of a stage, each a function of (seed, step)."""

    def __init__(self, maker: Maker, seed: int, tail_weight: float = 0.05) -> None:
        self.maker, self.seed, self.tail_weight = maker, seed, tail_weight

    def make(
        self, step: int, length: int, size: int, mix: dict[str, float], stretch: float, span: int, ghosts: int = 0
    ) -> Batch:
        """`mix`: kind -> share. A share `stretch` of the samples stands for texts of up to `span` tokens.

        The missing haystack is made up for by weighting the haystack that is there, or, where `ghosts` is not 0, by up
        to so many keys at the positions of the missing tokens.
        """
        rng = random.Random(f"{self.seed}-{step}")
        names = rng.choices(list(mix), weights=list(mix.values()), k=size)
        rows = [self._needle(rng, KINDS[n], length, stretch, span) for n in names]
        used = max(r.response for r in rows)
        copies = torch.tensor([r.copies for r in rows])
        return Batch(
            ids=torch.tensor([r.ids for r in rows]),
            labels=torch.tensor([r.labels[-used:] for r in rows]),
            weights=torch.tensor([r.weights[-used:] for r in rows]),
            positions=torch.tensor([r.positions for r in rows])[:, None, :],
            copies=copies if bool(copies.any()) and not ghosts else None,
            ghosts=_ghosts(rows, ghosts) if ghosts else None,
            rows=used,
            kinds=tuple(names),
        )

    def _needle(self, rng: random.Random, kind: Kind, length: int, stretch: float, span: int) -> _Row:
        tail = 4 if kind.listing else rng.choice((8, 16, 24, 32))
        while True:
            probe = self.maker.prompt(rng, kind, 0)
            least = len(probe.ids) + len(probe.answer)
            if least + 4 <= length:
                break
            kind = _fewer(kind)
        prompt = self.maker.prompt(rng, kind, max(length - len(probe.answer) - tail, 0))
        ids = prompt.ids
        response = length - len(ids)
        if response < len(prompt.answer):  # longer keys than the probe's
            return self._needle(rng, kind, length, stretch, span)
        positions, copies, gaps = self._place(rng, prompt, length, stretch, span)
        padding = response - len(prompt.answer)
        target = prompt.answer + [self.maker.eos] * padding
        scored = prompt.scored + [True] * padding
        masked = _masked(rng, response, len(prompt.answer), kind.listing)
        masked = [m and s for m, s in zip(masked, scored, strict=True)]
        weights = [1.0] * len(prompt.answer) + [self.tail_weight] * padding
        weights = [w * m for w, m in zip(weights, masked, strict=True)]
        seen = [self.maker.mask if m else t for t, m in zip(target, masked, strict=True)]
        zeros = [0] * len(ids)
        clones = _clones(prompt, positions, gaps)
        return _Row(ids + seen, zeros + target, [0.0] * len(ids) + weights, positions, copies, response, clones)

    def _place(
        self, rng: random.Random, prompt: Prompt, length: int, stretch: float, span: int
    ) -> tuple[list[int], list[float], dict[int, int]]:
        """Positions, copy weights, and the gap behind each piece.

        In a stretched sample each haystack piece stands for m copies, and the gaps leave room for them.
        """
        hay = [len(p.ids) for p in prompt.pieces if p.hay]
        if len(prompt.references) > 1:  # telling several needles apart by their order is hard enough nearby
            stretch, span = stretch / 4, min(span, 4 * length)
        stretched = rng.random() < stretch
        total = math.exp(rng.uniform(math.log(length), math.log(span))) if stretched else float(length)
        gap = total - length
        logm = math.log1p(gap / sum(hay)) if hay else 0.0
        places = [i for i, p in enumerate(prompt.pieces[:-1]) if p.hay or not hay]
        shares = [rng.expovariate(1.0) for _ in places]
        gaps = {i: int(gap * s / sum(shares)) for i, s in zip(places, shares, strict=True)}
        positions: list[int] = []
        copies: list[float] = []
        at = 0
        for i, piece in enumerate(prompt.pieces):
            positions += range(at, at + len(piece.ids))
            copies += [logm if piece.hay else 0.0] * len(piece.ids)
            at += len(piece.ids) + gaps.get(i, 0)
        rest = length - len(positions)
        return positions + list(range(at, at + rest)), copies + [0.0] * rest, gaps


def _clones(prompt: Prompt, positions: list[int], gaps: dict[int, int]) -> list[list[tuple[int, int]]]:
    """The copies of haystack pieces that the gaps have room for, each as (token index, position) of its tokens."""
    clones, at = [], 0
    for i, piece in enumerate(prompt.pieces):
        size = len(piece.ids)
        # the copy right behind a piece is left out: it would be a neighbour of many times its weight
        for c in range(2, gaps.get(i, 0) // size + 1) if piece.hay else ():
            clones.append([(at + t, positions[at] + c * size + t) for t in range(size)])
        at += size
    return clones


def _ghosts(rows: list[_Row], limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ghost keys of a batch: of each sample as many clones as fit, weighted so that they count for all."""
    rng = random.Random(str([r.ids[-80:] for r in rows]))
    index, place = torch.zeros(len(rows), limit, dtype=torch.long), torch.zeros(len(rows), limit, dtype=torch.long)
    weight = torch.full((len(rows), limit), float("-inf"))
    for b, row in enumerate(rows):
        order = rng.sample(row.clones, len(row.clones))
        keys: list[tuple[int, int]] = []
        used = 0
        while used < len(order) and len(keys) + len(order[used]) <= limit:
            keys += order[used]
            used += 1
        if keys:
            index[b, : len(keys)], place[b, : len(keys)] = torch.tensor(keys).T
            weight[b, : len(keys)] = math.log(len(order) / used)
    return index, place, weight


def _fewer(kind: Kind) -> Kind:
    """The same kind with one key, query or value less, for samples that would not fit."""
    if kind.values > 1:
        return replace(kind, values=kind.values - 1)
    queries = min(kind.queries, max(kind.keys - 1, 1))
    return replace(kind, keys=max(kind.keys - 1, 1), queries=queries)


def _masked(rng: random.Random, response: int, answer: int, listing: bool) -> list[bool]:
    """Which response positions are masked: what decoding in one go, one by one and block by block comes across."""
    draw = rng.random()
    if draw < 0.4:
        return [True] * response
    if draw < 0.65 or listing:
        rate = rng.uniform(0.1, 1.0)
        return [rng.random() < rate for _ in range(response)]
    if draw < 0.9:
        # the first values of several are given; at times a part of the next one as well
        known = 9 * rng.randint(0, answer // 9) if answer > 12 else 0
        if rng.random() < 0.5 or answer <= 12:
            known = rng.randint(known, answer)
        return [i >= known for i in range(response)]
    block = rng.choice((8, 16, 32))
    start = block * rng.randint(0, answer // block)
    rate = rng.uniform(0.2, 1.0)
    return [i >= start and (i >= start + block or rng.random() < rate) for i in range(response)]
