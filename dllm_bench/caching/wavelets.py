"""Low-pass halves of wavelet transforms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["low_pass"]


def low_pass(t: Tensor, wavelet: str, levels: int, norm: str) -> Tensor:
    """Low-frequency half of t [..., n, d] along n, `levels` times, periodized; an odd end is repeated."""
    if wavelet == "haar":
        c = 0.5 if norm == "mean" else math.sqrt(0.5)
        for _ in range(levels):
            if t.shape[-2] % 2:
                t = torch.cat([t, t[..., -1:, :]], dim=-2)
            t = (t[..., ::2, :] + t[..., 1::2, :]) * c
        return t
    import pywt

    x = t.detach().float().cpu().numpy() if t.dtype != torch.float64 else t.cpu().numpy()
    for _ in range(levels):
        x = pywt.dwt(x, wavelet, mode="periodization", axis=-2)[0]
    factor = math.sqrt(0.5) ** levels if norm == "mean" else 1.0
    return torch.from_numpy(x * factor).to(t)
