"""Made-up keys and values for the tests of DepthWeave-KV."""

from __future__ import annotations

import torch
from torch import Tensor


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def low_rank_data(g: int = 2, p: int = 50, d: int = 32, seed: int = 0) -> Tensor:
    """Keys and values [2, g, p, d] with a falling spectrum."""
    turn = torch.linalg.qr(rand(2, g, d, d, seed=seed + 1)).Q
    return (rand(2, g, p, d, seed=seed) * torch.arange(1, d + 1).double() ** -0.8) @ turn
