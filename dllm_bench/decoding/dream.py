"""Dream's schedules: over the whole response (Dream's diffusion_generate), and by blocks (Fast-dLLM's version)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dllm_bench.decoding.rules import CommitRule, Decision
from dllm_bench.decoding.sampling import DreamSampler
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["dream_rule"]

_MEASURES = {"topk_margin": "margin", "entropy": "entropy"}


def dream_rule(
    settings: DecodeSettings, mask_id: int, generator: torch.Generator, whole: bool, slides: bool = False
) -> CommitRule:
    """The rule of `settings.alg`, for one window over the whole response (which may slide) or for blocks."""
    sampler = DreamSampler(settings, mask_id, generator, settings.confidence_dtype == "float64")
    assert settings.alg is not None
    if whole or slides:
        sampler.measure = _MEASURES.get(settings.alg, "probability")
        rules: dict[str, type[_DreamRule]] = {"origin": _Origin, "confidence_threshold": _CarriedThreshold}
        if slides:
            rules["confidence_threshold"] = _PlainThreshold
        return rules.get(settings.alg, _Schedule)(sampler, settings)
    if settings.alg == "confidence_threshold":
        return _BlockThreshold(sampler, settings)
    # Fast-dLLM scores every other alg of its block version by negative entropy, whatever its name says
    sampler.measure = "entropy"
    return _BlockSchedule(sampler, settings)


class _DreamRule(CommitRule):
    """Shared parts: the time steps, the choice of positions, and passes that commit nothing."""

    sampler: DreamSampler

    def __init__(self, sampler: DreamSampler, settings: DecodeSettings) -> None:
        super().__init__(sampler)
        self._settings = settings
        self._times: Tensor | None = None

    def _fraction(self, window: Window) -> Tensor:
        """1 - s/t of this step in float32, as in the official code (float64 or rounding change results)."""
        if self._times is None:
            self._times = torch.linspace(1, self._settings.eps, window.steps + 1)
        return 1 - self._times[window.step + 1] / self._times[window.step]

    def _share(self, window: Window, masked: int) -> int:
        """Tokens of this step: truncated, all of them in the last one."""
        if window.step >= window.steps - 1:
            return masked
        return int(torch.tensor(float(masked)) * self._fraction(window))

    def _take(self, positions: tuple[int, ...], logits: Tensor, number: int) -> Decision:
        if number == 0:
            return Decision([], torch.empty(0, dtype=torch.long))
        tokens, confidence = self.sampler(logits)
        number = min(number, len(positions))
        heat = self._settings.alg_temp
        if heat > 0:
            weights = torch.softmax(confidence / heat, dim=-1)
            chosen = torch.multinomial(weights, number, generator=self.sampler.generator).tolist()
        else:
            chosen = confidence.argsort(descending=True, stable=True)[:number].tolist()
        return Decision([positions[i] for i in chosen], tokens[chosen])

    def _sure(self, positions: tuple[int, ...], logits: Tensor) -> Decision:
        """Every token that reaches the threshold, and the best one always."""
        assert self._settings.threshold is not None
        tokens, confidence = self.sampler(logits)
        ordered, order = confidence.sort(descending=True, stable=True)
        chosen = order[: max(1, int((ordered >= self._settings.threshold).sum()))].tolist()
        return Decision([positions[i] for i in chosen], tokens[chosen])


class _Schedule(_DreamRule):
    """maskgit_plus, topk_margin and entropy over the whole response."""

    def limit(self, steps: int) -> int | None:
        return steps

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        return self._take(positions, logits, self._share(window, window.masks))


class _Origin(_DreamRule):
    """Every masked token is revealed independently with probability 1 - s/t; the last step reveals the rest."""

    def limit(self, steps: int) -> int | None:
        return steps

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        drawn = torch.rand(len(positions), generator=self.sampler.generator, device=logits.device)
        last = window.step >= window.steps - 1
        chosen = [i for i, u in enumerate(drawn.tolist()) if last or u < float(self._fraction(window))]
        if not chosen:
            return Decision([], torch.empty(0, dtype=torch.long))
        tokens, _ = self.sampler(logits[chosen])
        return Decision([positions[i] for i in chosen], tokens)


class _CarriedThreshold(_DreamRule):
    """confidence_threshold without a cache: each step looks at gen_length / steps more tokens, best first.

    The first is committed, the others when they reach the threshold; those that do not stay in the budget of the next
    step. The last step is repeated until nothing is masked.
    """

    def __init__(self, sampler: DreamSampler, settings: DecodeSettings) -> None:
        super().__init__(sampler, settings)
        self._budget = 0

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        assert self._settings.gen_length is not None and self._settings.threshold is not None
        if window.step < window.steps:
            self._budget += self._settings.gen_length // window.steps
        tokens, confidence = self.sampler(logits)
        ordered, order = confidence.sort(descending=True, stable=True)
        keep = ordered[: min(self._budget, len(positions))] >= self._settings.threshold
        number = max(1, int(keep.sum()))
        self._budget -= number
        chosen = order[:number].tolist()
        return Decision([positions[i] for i in chosen], tokens[chosen])


class _PlainThreshold(_DreamRule):
    """confidence_threshold without a budget, in a window that slides."""

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        return self._sure(positions, logits)


class _BlockRule(_DreamRule):
    """Fast-dLLM's block version: the refresh pass commits the block's first token alone, by argmax."""

    def decide(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        inner = [i for i, p in enumerate(positions) if p >= window.start]
        if window.step == 0:
            tokens, _ = self.sampler(logits[inner[:1]])
            return Decision([positions[inner[0]]], tokens)
        return self.later(window, tuple(positions[i] for i in inner), logits[inner])

    @abstractmethod
    def later(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        """Chooses in the passes behind the refresh, among the block's own candidates."""


class _BlockThreshold(_BlockRule):
    """confidence_threshold among the block's own candidates."""

    def later(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        return self._sure(positions, logits)


class _BlockSchedule(_BlockRule):
    """The time schedule inside a block, from its second step on; ends after `steps` passes.

    With one step per block the official loop makes a second pass that commits nothing; it is reproduced.
    """

    def limit(self, steps: int) -> int | None:
        return max(steps, 2)

    def later(self, window: Window, positions: tuple[int, ...], logits: Tensor) -> Decision:
        number = self._share(window, len(positions)) if window.step < window.steps else 0
        return self._take(positions, logits, number)
