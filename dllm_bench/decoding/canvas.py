"""The canvas of one request: its ids, and which positions may still be filled."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from dllm_bench.models.config import NetworkConfig
else:
    torch = LazyModule("torch")

__all__ = ["Canvas", "check_ids"]


class Canvas:
    """Ids [1, N] on the device, and the ordered list of fillable positions on the host.

    Attributes:
        start, stop: the response, a half-open range of positions (behind the prompt, or inside it: infill).
        masked: positions of the response that are masked and may still be committed, ascending.
        dropped: positions given up because an EOS before them was committed.
    """

    def __init__(self, ids: torch.Tensor, start: int, stop: int, mask_id: int, eos_ids: Sequence[int]) -> None:
        self.ids = ids
        self.start, self.stop = start, stop
        self.mask_id, self.eos_ids = mask_id, frozenset(eos_ids)
        self.masked = list(range(start, stop))
        self.dropped: list[int] = []

    @classmethod
    def make(
        cls, prompt: Sequence[int], settings: DecodeSettings, config: NetworkConfig, device: torch.device
    ) -> Canvas:
        """Lays out prompt and response. Raises UserError for an empty prompt, a bad id, or a mask id in the prompt."""
        assert settings.gen_length is not None
        start, stop = settings.fill or (len(prompt), len(prompt) + settings.gen_length)
        if settings.fill is None:
            given = list(enumerate(prompt))
        else:
            if stop > len(prompt):
                raise UserError(f"fill {start}:{stop} goes beyond the prompt: nearest valid end is {len(prompt)}")
            given = [(i, token) for i, token in enumerate(prompt) if not start <= i < stop]
            if not given:
                raise UserError(f"fill {start}:{stop} covers the whole prompt: leave at least one token outside it")
        check_ids(given, config)
        ids = [*prompt[:start], *([config.mask_id] * (stop - start)), *prompt[stop:]]
        return cls(torch.tensor([ids], device=device), start, stop, config.mask_id, config.eos_ids)

    @property
    def length(self) -> int:
        """Positions in all: N."""
        return int(self.ids.shape[1])

    def commit(self, positions: Sequence[int], tokens: torch.Tensor) -> None:
        """Fixes tokens at positions, which leave the masked list."""
        if not positions:
            return
        index = torch.tensor(positions, device=self.ids.device)
        self.ids[0, index] = tokens.to(self.ids.dtype)
        gone = set(positions)
        self.masked = [p for p in self.masked if p not in gone]

    def stop_at_eos(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Gives up the masked positions behind the first EOS or end-of-turn token among those just committed."""
        ends = [p for p, t in zip(positions, tokens, strict=True) if t in self.eos_ids]
        if ends:
            cut = bisect.bisect_right(self.masked, min(ends))
            self.dropped += self.masked[cut:]
            del self.masked[cut:]

    def response(self) -> list[int]:
        """Ids of the response; a position that was never filled keeps the mask id."""
        found: list[int] = self.ids[0, self.start : self.stop].tolist()
        return found

    def unconditional(self) -> torch.Tensor:
        """Ids with everything masked that was given: the second stream of classifier-free guidance."""
        ids = torch.full_like(self.ids, self.mask_id)
        ids[0, self.start : self.stop] = self.ids[0, self.start : self.stop]
        return ids


def check_ids(given: Sequence[tuple[int, int]], config: NetworkConfig) -> None:
    """Checks (position, id) pairs that the user gave: raises UserError for none, a mask id, or one out of range."""
    if not given:
        raise UserError("the prompt is empty: give at least one token")
    for i, token in given:
        if token == config.mask_id:
            raise UserError(
                f"the prompt holds the mask id {token} at position {i}: it would count as response; "
                "remove it, or name the range with --fill START:END"
            )
        if not 0 <= token < config.embedding_size:
            near = min(max(token, 0), config.embedding_size - 1)
            raise UserError(f"prompt id {token} at position {i} is outside the vocabulary: nearest valid is {near}")
