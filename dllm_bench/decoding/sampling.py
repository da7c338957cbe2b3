"""Logits to tokens and confidences, as LLaDA and Dream do it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["DreamSampler", "LladaSampler", "Sampler", "private_generator"]


def private_generator(seed: int, device: torch.device) -> torch.Generator:
    """The random stream of one sample; nothing else draws from it."""
    return torch.Generator(device=device).manual_seed(seed)


@dataclass
class Sampler(ABC):
    """Draws one token per row.

    Calling it with logits [R, V] gives tokens [R] and confidences [R] (larger is surer). The mask id is never chosen:
    committing it would leave the position masked for ever (the official loops then hang or index out of range).
    """

    settings: DecodeSettings
    mask_id: int
    generator: torch.Generator
    float64: bool

    @abstractmethod
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and confidences of logits [R, V]."""

    def _without_mask(self, logits: Tensor) -> Tensor:
        barred = logits.clone()
        barred[:, self.mask_id] = -torch.inf
        return barred

    def _precise(self, logits: Tensor) -> Tensor:
        return logits.double() if self.float64 else logits


class LladaSampler(Sampler):
    """Argmax of Gumbel-noised logits; confidence is the un-noised probability (LLaDA's and Fast-dLLM's generate)."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self._without_mask(self._noised(logits)).argmax(dim=-1)
        if self.settings.remasking == "random":
            shape = tokens.shape
            return tokens, torch.rand(shape, generator=self.generator, device=logits.device, dtype=torch.float64)
        chosen = torch.softmax(self._precise(logits), dim=-1).gather(1, tokens[:, None])
        return tokens, chosen[:, 0]

    def _noised(self, logits: Tensor) -> Tensor:
        """exp(logits) / (-ln U)^temperature in float64, kept in the log domain so that large logits do not overflow."""
        heat = self.settings.temperature
        if heat == 0:
            return logits
        uniform = torch.rand(logits.shape, generator=self.generator, device=logits.device, dtype=torch.float64)
        return logits.double() - heat * torch.log(-torch.log(uniform))


class DreamSampler(Sampler):
    """Temperature, top-p and top-k, then a draw or the maximum; the confidence is what the algorithm says."""

    measure: str = "probability"

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        settings = self.settings
        if settings.temperature > 0:
            logits = logits / settings.temperature
        probabilities = self._nucleus(logits)
        free = probabilities.clone()
        free[:, self.mask_id] = 0
        held = free.amax(dim=-1, keepdim=True) > 0
        if not bool(held.all()):  # the mask id is the whole nucleus of a row: that of the other tokens serves instead
            free = torch.where(held, free, self._nucleus(self._without_mask(logits)))
        if settings.temperature > 0:
            tokens = torch.multinomial(free, 1, generator=self.generator)[:, 0]
        else:
            tokens = free.argmax(dim=-1)
        return tokens, self._confidence(probabilities, tokens)

    def _nucleus(self, logits: Tensor) -> Tensor:
        kept = _nucleus(logits, self.settings.top_p, self.settings.top_k)
        return torch.softmax(self._precise(kept), dim=-1)

    def _confidence(self, probabilities: Tensor, tokens: Tensor) -> Tensor:
        if self.measure == "margin":
            best = probabilities.topk(2, dim=-1).values
            return best[:, 0] - best[:, 1]
        if self.measure == "entropy":
            return (probabilities * torch.log(probabilities + 1e-10)).sum(dim=-1)
        return probabilities.gather(1, tokens[:, None])[:, 0]


def _nucleus(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """Drops what lies outside the nucleus (its first token over the bound stays) and outside the k largest."""
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        over = torch.softmax(ordered, dim=-1).cumsum(dim=-1) > top_p
        over[:, 1:] = over[:, :-1].clone()
        over[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(over).scatter(1, index, over), -torch.inf)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits
