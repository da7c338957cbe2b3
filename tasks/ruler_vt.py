"""RULER's variable tracking (vt): follow a chain of assignments through a long text.

Wording and layout are NVIDIA/RULER's (`scripts/data/synthetic/variable_tracking.py`, noise haystack), with its solved
example of up to 500 tokens before the question. Its sizes and random draws are not; see `ruler.py`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import ClassVar

from dllm_bench.options import Options, option
from dllm_bench.running.task import Codec
from dllm_bench.tasks.draft import Draft, Frame, Prompt
from dllm_bench.tasks.draws import below, letters, private_random
from dllm_bench.tasks.filling import Filler
from dllm_bench.tasks.fitting import Asked, fit_units
from dllm_bench.tasks.pieces import Pieces, UnitStream
from dllm_bench.tasks.ruler_prompt import NOISE
from dllm_bench.tasks.ruler_task import Drawn, DrawnTask

__all__ = ["RulerVt", "VtOptions"]

_EXAMPLE_TOKENS = 500
_EXAMPLE_HOPS = 10
_LETTERS, _EXAMPLE_LETTERS = 5, 3
_CHECKED_SHARE = 1 / 128


@dataclass(frozen=True)
class VtOptions(Options):
    """Options of ruler_vt."""

    chains: int = option(1, "chains of assignments in the text; the question asks for one", low=1, high=32)
    hops: int = option(4, "assignments from variable to variable in each chain", low=1, high=64)
    shots: int = option(1, "solved examples before the question: 1 as NVIDIA/RULER, or 0", low=0, high=1)


@dataclass(frozen=True)
class _Chains:
    """Assignments in the order in which they stand in the text; the first chain is asked for.

    Attributes:
        places: for each line where it stands, as a share of the haystack's lines, ascending.
        names: variables of the first chain, in its order.
        lines_of_names: for each of these the number of the line that assigns it.
    """

    lines: tuple[str, ...]
    places: tuple[float, ...]
    value: str
    names: tuple[str, ...]
    lines_of_names: tuple[int, ...]


def _draw_chains(chains: int, hops: int, length: int, rng: Random) -> _Chains:
    """Chains whose names and values are all different; each stands in its order, at uniform random places."""
    names: set[str] = set()
    values: set[str] = set()
    placed: list[tuple[float, int, int, str]] = []
    asked: list[str] = []
    for chain in range(chains):
        variables = [letters(string.ascii_uppercase, length, rng, names) for _ in range(hops + 1)]
        value = _new_value(rng, values)
        asked = asked or variables
        # the blank at the end of a line is NVIDIA's
        lines = [f"VAR {variables[0]} = {value}"]
        lines += [f"VAR {later} = VAR {former} " for former, later in pairwise(variables)]
        places = sorted(rng.random() for _ in lines)
        placed += [(place, chain, k, line) for k, (place, line) in enumerate(zip(places, lines, strict=True))]
        if chain == 0:
            first = value
    placed.sort()
    order = {(chain, k): i for i, (_, chain, k, _) in enumerate(placed)}
    return _Chains(
        lines=tuple(line for *_, line in placed),
        places=tuple(place for place, *_ in placed),
        value=first,
        names=tuple(asked),
        lines_of_names=tuple(order[0, k] for k in range(hops + 1)),
    )


def _new_value(rng: Random, taken: set[str]) -> str:
    """Five digits; the largest is left out, as by NVIDIA's `randint(10000, 99999)`."""
    while True:
        value = str(10_000 + below(89_999, rng))
        if value not in taken:
            taken.add(value)
            return value


def _frame(chains: _Chains, before: str, joint: str) -> Frame:
    return Frame(
        head=f"{before}Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        question=f"Question: Find all variables that are assigned the value {chains.value} in the text above.",
        # NVIDIA's prefix ends with a blank, and its example has another one behind it
        answer_prefix=f"{joint}Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chains.names)} variables are assigned the value {chains.value}, they are: ",
        separator="\n",
    )


class RulerVt(DrawnTask[Draft]):
    """RULER's variable tracking: all variables of one chain of assignments.

    "needle" spans: for each variable of the answer the line that assigns it. Meta besides: haystack_units (lines of
    noise) and cut_unit (whether a part of one more was needed).
    """

    name: ClassVar[str] = "ruler_vt"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "name all variables of a chain of assignments hidden in a long text (RULER vt)"
    subsets: ClassVar[tuple[str, ...]] = ("vt",)
    default_subset: ClassVar[str] = "vt"
    options_class: ClassVar[type[Options]] = VtOptions
    tokens: ClassVar[int] = 30

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, VtOptions):
            raise TypeError("ruler_vt takes VtOptions")
        self._vt = self.options
        self._pieces = Pieces(codec)
        self._filler = Filler()
        self._noise = UnitStream(self._pieces, lambda k: NOISE + "\n", checked=True)

    def _drawn(self, ctx: int, *facts: object) -> Drawn[Draft]:
        chains = _draw_chains(self._vt.chains, self._vt.hops, _LETTERS, private_random(*facts))
        before = self._example(private_random(*facts, "example"), self._example_noise) + "\n" if self._vt.shots else ""
        frame = _frame(chains, before, self._joint)
        draft = Draft(self.codec, self._pieces, frame, self._noise, chains.lines, chains.places)
        return Drawn(draft, chains.names, chains.lines_of_names)

    def _filled(self, draft: Draft, asked: Asked) -> tuple[Prompt, tuple[int, str]] | None:
        key = asked.subset, asked.ctx, asked.gen_length
        checked = private_random(self.name, *key, asked.seed, asked.index, "check").random() < _CHECKED_SHARE
        made = self._filler.fill(
            [draft],
            asked,
            probe=lambda: self._drawn(asked.ctx, self.name, *key, "sound").draft,
            checked=asked.index == 0 or checked,
        )
        return (made[0][0], made[1]) if made else None

    def _example(self, rng: Random, noise: int) -> str:
        """A solved example with so many lines of noise, ended by a newline."""
        prompt, names = self._unsolved(rng, noise)
        return f"{prompt} {' '.join(names)}\n"

    def _unsolved(self, rng: Random, noise: int) -> tuple[str, tuple[str, ...]]:
        chains = _draw_chains(self._vt.chains, min(_EXAMPLE_HOPS, self._vt.hops), _EXAMPLE_LETTERS, rng)
        frame = _frame(chains, "", " ")
        draft = Draft(self.codec, self._pieces, frame, self._noise, chains.lines, chains.places)
        return draft.text(noise)[0] + frame.answer_prefix, chains.names

    @cached_property
    def _example_noise(self) -> int:
        """Lines of noise in the example: with them it has at most 500 tokens, the answer not counted."""

        def size(noise: int) -> int:
            return len(self.codec.encode(self._unsolved(private_random(self.name, "example"), noise)[0]))

        return fit_units(size, guess=0, limit=_EXAMPLE_TOKENS, close=0)
