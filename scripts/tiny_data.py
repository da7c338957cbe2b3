"""Training batches of the tiny model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import torch
from tiny_facts import document
from tiny_prompts import KINDS, Kind, Maker, Prompt
from torch import Tensor

SUMS = {"plus_minus": {"+": 1, "-": 1}, "sums": {"+": 4, "-": 4, "*": 5, "/": 3}}


@dataclass(frozen=True)
class Part:
    """Batches of one shape: `batch` samples of `length` tokens, of kinds in the shares of `mix`.

    A share `stretch` of the samples stands for texts of `least` to `span` tokens. The missing haystack is made up for
    by weighting the haystack that is there, or, where `ghosts` is not 0, by up to so many keys at the positions of the
    missing tokens. Samples with several needles are stretched half as often, to at most 8 times their length. `whole`:
    share of the answers of needles and documents that are masked whole. `share` of the steps of a stage draw this part.
    Word problems and sums have batches of their own: a mix has nothing beside them, else ValueError.
    """

    mix: dict[str, float]
    length: int
    batch: int
    share: float = 1.0
    stretch: float = 0.0
    span: int = 0
    ghosts: int = 0
    least: int = 0
    whole: float = 0.4

    def __post_init__(self) -> None:
        if len(self.mix) > 1 and self.mix.keys() & {"problem", *SUMS}:
            raise ValueError(f"{', '.join(self.mix)}: word problems and sums share no batch with others")


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

    def make(self, step: int, part: Part) -> Batch:
        rng = random.Random(f"{self.seed}-{step}")
        names = rng.choices(list(part.mix), weights=list(part.mix.values()), k=part.batch)
        rows = self._rows(rng, names, part)
        used = max(r.response for r in rows)
        copies = torch.tensor([r.copies for r in rows])
        return Batch(
            ids=torch.tensor([r.ids for r in rows]),
            labels=torch.tensor([r.labels[-used:] for r in rows]),
            weights=torch.tensor([r.weights[-used:] for r in rows]),
            positions=torch.tensor([r.positions for r in rows])[:, None, :],
            copies=copies if bool(copies.any()) and not part.ghosts else None,
            ghosts=_ghosts(rows, part.ghosts) if part.ghosts else None,
            rows=used,
            kinds=tuple(names),
        )

    def _rows(self, rng: random.Random, names: list[str], part: Part) -> list[_Row]:
        if names[0] == "problem":
            return self._problems(rng, part)
        if names[0] in SUMS:
            return [self._sums(rng, SUMS[names[0]], part) for _ in names]
        return [self._needle(rng, KINDS[n], part) if n in KINDS else self._document(rng, n, part) for n in names]

    def _problems(self, rng: random.Random, part: Part) -> list[_Row]:
        """Word problems of about one length: the longer or the shorter half of twice as many."""
        size = part.batch
        drawn = sorted((self.maker.problem(rng) for _ in range(2 * size)), key=lambda p: len(p.ids) + len(p.answer))
        chosen = drawn[:size] if rng.random() < 0.5 else drawn[size:]
        length = max(len(p.ids) + len(p.answer) for p in chosen) + rng.choice((1, 4, 20))
        rows = []
        for p in chosen:
            masked = _steps(rng, length - len(p.ids), len(p.answer))
            row = self._row(rng, p, masked, part)
            # tokens far behind what is known are guesses
            near = len(p.ids) + (masked.index(True) + 16 if True in masked else 0)
            row.weights = [w if i < near else 0.2 * w for i, w in enumerate(row.weights)]
            rows.append(row)
        return rows

    def _sums(self, rng: random.Random, signs: dict[str, int], part: Part) -> _Row:
        """A list of equations whose results, or some digits of them, are to be predicted."""
        prompt = self.maker.sums(rng, part.length, signs)
        rate = rng.choice((1.0, 1.0, 0.7, 0.4))
        masked = [rng.random() < rate for _ in range(part.length - len(prompt.ids))]
        return self._row(rng, prompt, masked, part)

    def _document(self, rng: random.Random, name: str, part: Part) -> _Row:
        while True:
            prompt = document(self.maker, rng, name, part.length - rng.choice((16, 24, 32)))
            if len(prompt.ids) + len(prompt.answer) <= part.length:
                break
        response = part.length - len(prompt.ids)
        masked = _masked(rng, response, len(prompt.answer), not all(prompt.scored), part.whole)
        return self._row(rng, prompt, masked, part)

    def _needle(self, rng: random.Random, kind: Kind, part: Part) -> _Row:
        tail = 4 if kind.listing else rng.choice((8, 16, 24, 32))
        while True:
            probe = self.maker.prompt(rng, kind, 0)
            least = len(probe.ids) + len(probe.answer)
            if least + 4 <= part.length:
                break
            kind = _fewer(kind)
        prompt = self.maker.prompt(rng, kind, max(part.length - len(probe.answer) - tail, 0))
        response = part.length - len(prompt.ids)
        if response < len(prompt.answer):  # longer keys than the probe's
            return self._needle(rng, kind, part)
        masked = _masked(rng, response, len(prompt.answer), kind.listing, part.whole)
        return self._row(rng, prompt, masked, part)

    def _row(self, rng: random.Random, prompt: Prompt, masked: list[bool], part: Part) -> _Row:
        """The sample of a prompt; `masked`: which positions of its response are masked where they are to be scored."""
        ids, response = prompt.ids, len(masked)
        length = len(ids) + response
        positions, copies, gaps = self._place(rng, prompt, length, _stands_for(rng, prompt, length, part))
        padding = response - len(prompt.answer)
        target = prompt.answer + [self.maker.eos] * padding
        scored = prompt.scored + [True] * padding
        masked = [m and s for m, s in zip(masked, scored, strict=True)]
        weights = [1.0] * len(prompt.answer) + [self.tail_weight] * padding
        weights = [w * m for w, m in zip(weights, masked, strict=True)]
        seen = [self.maker.mask if m else t for t, m in zip(target, masked, strict=True)]
        zeros = [0] * len(ids)
        clones = _clones(prompt, positions, gaps)
        return _Row(ids + seen, zeros + target, [0.0] * len(ids) + weights, positions, copies, response, clones)

    def _place(
        self, rng: random.Random, prompt: Prompt, length: int, stands_for: float
    ) -> tuple[list[int], list[float], dict[int, int]]:
        """Positions, copy weights, and the gap behind each piece, of a text that stands for one of so many tokens.

        In a stretched sample each haystack piece stands for m copies, and the gaps leave room for them.
        """
        hay = [len(p.ids) for p in prompt.pieces if p.hay]
        gap = stands_for - length
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


def _stands_for(rng: random.Random, prompt: Prompt, length: int, part: Part) -> float:
    """The number of tokens that a sample of so many stands for."""
    stretch, span = part.stretch, part.span
    if len(prompt.references) > 1:  # telling several needles apart by their order is hard enough nearby
        stretch, span = stretch / 2, min(span, 8 * length)
    if span <= length or rng.random() >= stretch:
        return float(length)
    return math.exp(rng.uniform(math.log(min(max(length, part.least), span)), math.log(span)))


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


def _steps(rng: random.Random, response: int, answer: int) -> list[bool]:
    """Which positions of a calculation are masked: mostly what is known ends somewhere, and what follows is open."""
    draw = rng.random()
    if draw < 0.1:
        return [True] * response
    if draw < 0.25:
        rate = rng.uniform(0.1, 1.0)
        return [rng.random() < rate for _ in range(response)]
    known = rng.randint(0, answer - 1)
    if draw < 0.6:
        return [i >= known for i in range(response)]
    block = 16
    start = known - known % block
    rate = rng.uniform(0.1, 1.0)
    return [i >= start + block or (i >= start and (i >= known or rng.random() < 0.1) and rng.random() < rate)
            for i in range(response)]  # fmt: skip


def _masked(rng: random.Random, response: int, answer: int, listing: bool, whole: float) -> list[bool]:
    """Which response positions are masked: what decoding in one go, one by one and block by block comes across.

    A share `whole` is masked whole. Of the rest, 5/12 are masked at random (listings: all), 5/12 from some place on,
    and 1/6 from within a block on.
    """
    if rng.random() < whole:
        return [True] * response
    draw = rng.random()
    if draw < 5 / 12 or listing:
        rate = rng.uniform(0.1, 1.0)
        return [rng.random() < rate for _ in range(response)]
    if draw < 5 / 6:
        # the first values of several are given; at times a part of the next one as well
        known = 9 * rng.randint(0, answer // 9) if answer > 12 else 0
        if rng.random() < 0.5 or answer <= 12:
            known = rng.randint(known, answer)
        return [i >= known for i in range(response)]
    block = rng.choice((8, 16, 32))
    start = block * rng.randint(0, answer // block)
    rate = rng.uniform(0.2, 1.0)
    return [i >= start and (i >= start + block or rng.random() < rate) for i in range(response)]
