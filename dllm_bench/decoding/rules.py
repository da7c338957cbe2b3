"""Commit rules: which of a pass's candidates are fixed. One rule object serves one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.decoding.sampling import LladaSampler, Sampler
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["CommitRule", "Decision", "Factor", "Fixed", "Quota", "Threshold", "make_rule", "split_evenly"]


@dataclass(frozen=True)
class Decision:
    """Positions to commit and their tokens, in the order of confidence or of position."""

    positions: list[int]
    tokens: Tensor


class CommitRule(ABC):
    """Sees the logits of one pass and decides."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def limit(self, steps: int) -> int | None:
        """Passes after which a block ends even with masks left; None: it goes on until it is done."""
        return None

    @abstractmethod
    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        """Chooses among `positions` (masked, ascending), whose logits [len(positions), V] are given."""


class ConfidenceRule(CommitRule):
    """Samples every candidate, then commits the `count` most confident ones."""

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        tokens, confidence = self.sampler(logits)
        # a stable sort: of equal confidences the left one goes first, on every device
        ordered, order = confidence.sort(descending=True, stable=True)
        chosen = order[: self.count(window, ordered)].tolist()
        return Decision([positions[i] for i in chosen], tokens[chosen])

    @abstractmethod
    def count(self, window: Window, ordered: Tensor) -> int:
        """How many of the confidences [m], in descending order, are committed."""


class Quota(ConfidenceRule):
    """LLaDA: the block's masks spread evenly over its steps, the remainder first (arXiv 2502.09992, generate.py)."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._plan: list[int] = []

    def count(self, window: Window, ordered: Tensor) -> int:
        if window.step == 0:
            self._plan = split_evenly(window.masks, window.steps)
        return self._plan[window.step] if window.step < len(self._plan) else 1


class Fixed(ConfidenceRule):
    """The same number of tokens in every pass."""

    def __init__(self, sampler: Sampler, number: int) -> None:
        super().__init__(sampler)
        self._number = number

    def count(self, window: Window, ordered: Tensor) -> int:
        return self._number


class Threshold(ConfidenceRule):
    """Fast-dLLM: every token with confidence >= threshold, and the best one always (arXiv 2505.22618, section 3.3)."""

    def __init__(self, sampler: Sampler, threshold: float) -> None:
        super().__init__(sampler)
        self._threshold = threshold

    def count(self, window: Window, ordered: Tensor) -> int:
        return max(1, int((ordered >= self._threshold).sum()))


class Factor(ConfidenceRule):
    """Fast-dLLM: the longest prefix with c_i >= 1 - factor / (i + 1); i = 1 always passes.

    The official code commits the last masked token even when it is the first to fail; so does this rule.
    """

    def __init__(self, sampler: Sampler, factor: float) -> None:
        super().__init__(sampler)
        self._factor = factor

    def count(self, window: Window, ordered: Tensor) -> int:
        rank = torch.arange(1, len(ordered) + 1, device=ordered.device, dtype=ordered.dtype)
        passes = ordered >= 1 - self._factor / (rank + 1)
        passes[:1] = True
        prefix = int(passes.long().cumprod(dim=0).sum())
        return len(ordered) if prefix >= len(ordered) - 1 else prefix


def split_evenly(tokens: int, steps: int) -> list[int]:
    """Tokens per step, the remainder on the first steps; steps that would commit nothing are left out."""
    base, rest = divmod(tokens, steps)
    return [n for n in (base + (i < rest) for i in range(steps)) if n]


def make_rule(
    settings: DecodeSettings,
    mask_id: int,
    generator: torch.Generator,
    family: str,
    whole: bool,
    slides: bool = False,
) -> CommitRule:
    """The rule that the settings name.

    Args:
        whole: Dream's schedules run over the whole response at once, instead of block by block.
        slides: the window slides, so nothing but the window bounds what a threshold commits.
    """
    if settings.alg is not None:
        from dllm_bench.decoding.dream import dream_rule

        return dream_rule(settings, mask_id, generator, whole, slides)
    float64 = settings.confidence_dtype == "float64" or (settings.confidence_dtype == "auto" and family != "dream")
    sampler = LladaSampler(settings, mask_id, generator, float64)
    if settings.tokens_per_pass is not None:
        return Fixed(sampler, settings.tokens_per_pass)
    if settings.factor is not None:
        return Factor(sampler, settings.factor)
    if settings.threshold is not None:
        return Threshold(sampler, settings.threshold)
    return Quota(sampler)
