"""Filling a context length to the token: template, answer prefix and generation budget counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from dllm_bench.tasks.draft import Draft, Inseparable, Prompt, Whole
from dllm_bench.tasks.fitting import fit

__all__ = ["FILL", "Asked", "Filler", "fill_whole"]

FILL = 0.98
"""Share of the context length that a sample has to fill: prompt ids and generation budget."""


@dataclass(frozen=True)
class Asked:
    """The sample that is asked for."""

    subset: str
    index: int
    ctx: int
    gen_length: int
    seed: int

    @property
    def limit(self) -> int:
        """Most ids that a prompt may have."""
        return self.ctx - self.gen_length

    @property
    def least(self) -> int:
        """Fewest ids that a prompt should have."""
        return ceil(FILL * self.ctx) - self.gen_length


def fill_whole(draft: Whole, asked: Asked) -> tuple[Prompt, tuple[int, str]] | None:
    """The prompt and its size (see `fit`), by encoding the whole text for each try; None where nothing fits."""
    size = _fit(draft, asked, lambda n, rest: len(draft.encode(n, rest)))
    return (draft.prompt(*size), size) if size else None


class Filler:
    """Fills haystacks that are put together from pieces, where the codec allows it.

    Attributes:
        sound: for each (subset, ctx, gen_length) whether a prompt of this size has the ids of its pieces.
    """

    def __init__(self) -> None:
        self.sound: dict[tuple[str, int, int], bool] = {}

    def fill(
        self, drafts: Sequence[Draft], asked: Asked, *, probe: Callable[[], Draft] | None, checked: bool
    ) -> tuple[list[Prompt], tuple[int, str]] | None:
        """Prompts over one haystack: from pieces where that is right, else by encoding the whole text for each try.
        The longest question is fitted, and the others have its haystack.

        Args:
            probe: a draft of its own that tells once whether pieces will do; None: each prompt is compared with an
                encoding of its whole text.
            checked: whether these are compared too.
        Returns:
            None where nothing fits.
        """
        longest = drafts[0] if len(drafts) == 1 else max(drafts, key=lambda draft: len(draft.encode(0)))
        if probe is None or self._is_sound(asked, probe):
            try:
                size = _fit_pieces(longest, asked)
                if size is None:
                    return None
                prompts = [draft.assemble(*size) for draft in drafts]
                pairs = zip(drafts, prompts, strict=True)
                compared = probe is None or checked
                if not compared or all(list(p.ids) == draft.encode(*size) for draft, p in pairs):
                    return prompts, size
            except Inseparable:
                pass
        size = _fit(longest, asked, lambda n, rest: len(longest.encode(n, rest)))
        return ([draft.prompt(*size) for draft in drafts], size) if size else None

    def _is_sound(self, asked: Asked, probe: Callable[[], Draft]) -> bool:
        key = asked.subset, asked.ctx, asked.gen_length
        if key not in self.sound:
            draft = probe()
            try:
                size = _fit_pieces(draft, asked) or (0, "")
                self.sound[key] = list(draft.assemble(*size).ids) == draft.encode(*size)
            except Inseparable:
                self.sound[key] = False
        return self.sound[key]


def _fit_pieces(draft: Draft, asked: Asked) -> tuple[int, str] | None:
    return _fit(draft, asked, lambda n, rest: len(draft.assemble(n, rest).ids))


def _fit(draft: Whole, asked: Asked, size: Callable[[int, str], int]) -> tuple[int, str] | None:
    return fit(size, draft.spare, guess=draft.guess(asked.limit), limit=asked.limit, least=asked.least)
