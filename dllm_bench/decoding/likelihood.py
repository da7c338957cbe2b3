"""The likelihood of given tokens behind a prompt: LLaDA's Monte-Carlo estimator, over uncached passes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.decoding.clock import Clock
from dllm_bench.decoding.sampling import private_generator
from dllm_bench.lazy import LazyModule
from dllm_bench.models.counters import Counters

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["Likelihood", "estimate_likelihood"]


@dataclass(frozen=True)
class Likelihood:
    """An estimate and its cost.

    Attributes:
        value: estimate of a lower bound of the tokens' log-likelihood, in nats; 0 for no tokens.
        counters: `nfe` counts noisy copies, each of which is a whole pass over the canvas, however they are batched.
        seconds: of all passes. pass_seconds: of each batch of passes.
    """

    value: float
    counters: Counters
    seconds: float
    pass_seconds: tuple[float, ...]


def estimate_likelihood(
    network: Network, prompt: Sequence[int], answer: Sequence[int], *, mc_num: int, batch: int, seed: int
) -> Likelihood:
    """Estimates log p(answer | prompt) (LLaDA, arXiv 2502.09992, section 2.4).

    A copy of the answer of L tokens has l random ones masked, l uniform in 1..L; its term is L / l times the sum of
    their log-probabilities, and the estimate is the mean over `mc_num` copies. Within a batch the numbers l are spread
    evenly over 1..L from a random start on, as in the official evaluation; the steps between them are rounded down, so
    that each l is exactly uniform. One token has one way to be masked: a single pass is exact.

    Args:
        prompt, answer: ids; the prompt must not be empty.
        batch: copies per pass of the network; it belongs to the estimate, since a batch is spread evenly.
        seed: of a private generator, together with the ids.
    """
    counters, clock, others = Counters(), Clock(network.device), network.counters
    network.grow_rope(len(prompt) + len(answer))
    generator = private_generator(_private_seed(seed, prompt, answer), torch.device("cpu"))
    copies = min(mc_num, 1) if len(answer) < 2 else mc_num
    total = 0.0
    network.counters = counters
    try:
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer]], device=network.device)
            clock.begin()
            for done in range(0, copies if answer else 0, batch):
                before = clock.now()
                masked = _masks(len(answer), min(batch, copies - done), generator)
                total += _weighted_sum(network, ids, len(prompt), masked.to(network.device))
                clock.passed("dense", clock.now() - before)
            clock.end()
    finally:
        network.counters = others
    return Likelihood(total / copies, counters, clock.total, tuple(seconds for _, seconds in clock.passes))


def _private_seed(seed: int, prompt: Sequence[int], answer: Sequence[int]) -> int:
    parts = [str(seed).encode(), array("q", prompt).tobytes(), array("q", answer).tobytes()]
    return int.from_bytes(hashlib.sha256(b"/".join(parts)).digest()[:4], "big") >> 1


def _masks(length: int, copies: int, generator: torch.Generator) -> Tensor:
    """Which tokens of each copy are masked: [copies, length]."""
    start = int(torch.randint(length, (), generator=generator))
    numbers = [(start + copy * length // copies) % length + 1 for copy in range(copies)]
    return torch.stack([torch.randperm(length, generator=generator) < number for number in numbers])


def _weighted_sum(network: Network, ids: Tensor, start: int, masked: Tensor) -> float:
    """The sum over copies of L / l times the log-probabilities of the masked tokens.

    Args:
        ids: [1, N]. start: where the answer begins. masked: [B, N - start].
    """
    config = network.config
    copies, length = masked.shape
    noisy = ids.repeat(copies, 1)
    noisy[:, start:] = noisy[:, start:].masked_fill(masked, config.mask_id)
    x = network.hidden(noisy)
    network.counters.nfe += copies
    network.counters.dense_passes += copies
    rows = torch.tensor([config.row_of(position) for position in range(start, start + length)], device=ids.device)
    copy, place = masked.nonzero(as_tuple=True)
    logits = network.head(x[copy, rows[place]].unsqueeze(0))[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not bool(torch.isfinite(logits).all()):
        raise ArithmeticError(f"logits of a likelihood are not finite ({x.dtype} overflow?)")
    found = logits.log_softmax(-1).gather(1, ids[0, start:][place].unsqueeze(1))[:, 0]
    return float((found * (length / masked.sum(1))[copy]).sum())
