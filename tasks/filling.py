"""Filling haystacks that are put together from pieces, where a codec allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dllm_bench.tasks.draft import Draft, Inseparable, Prompt
from dllm_bench.tasks.fitting import Asked

__all__ = ["Filler"]


class Filler:
    """Fits drafts of one codec to the token.

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
                size = longest.fitted(asked, pieces=True)
                if size is None:
                    return None
                prompts = [draft.assemble(*size) for draft in drafts]
                pairs = zip(drafts, prompts, strict=True)
                compared = probe is None or checked
                if not compared or all(list(p.ids) == draft.encode(*size) for draft, p in pairs):
                    return prompts, size
            except Inseparable:
                pass
        size = longest.fitted(asked)
        return ([draft.prompt(*size) for draft in drafts], size) if size else None

    def _is_sound(self, asked: Asked, probe: Callable[[], Draft]) -> bool:
        key = asked.subset, asked.ctx, asked.gen_length
        if key not in self.sound:
            draft = probe()
            try:
                size = draft.fitted(asked, pieces=True) or (0, "")
                self.sound[key] = list(draft.assemble(*size).ids) == draft.encode(*size)
            except Inseparable:
                self.sound[key] = False
        return self.sound[key]
