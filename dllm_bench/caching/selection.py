"""Choosing keys by the attention they get: votes of query rows, and the best share of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["best_share", "votes"]

# weights held at a time while rows vote: what stays in a CPU's cache, or bounds a GPU's memory
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}


def votes(q: Tensor, keys: Tensor, at_once: int | None = None) -> Tensor:
    """Attention, summed over all query rows, that each key gets: float32 [B, Hkv, n].

    Args:
        q: scaled queries [B, Hkv, R, d]; the query heads of a group are rows. keys: [B, Hkv, n, d].
        at_once: weights to hold at a time, so that many rows over many keys need no matrix of them all.
    """
    b, _, n, _ = keys.shape
    at_once = at_once or _AT_ONCE.get(q.device.type, 1 << 24)
    heads, rows = max(1, at_once // (b * q.shape[2] * n)), max(1, at_once // (b * n))
    found = []
    for some, its in zip(torch.split(q, heads, dim=1), torch.split(keys, heads, dim=1), strict=True):
        parts = [
            torch.softmax(few @ its.transpose(2, 3), dim=3, dtype=torch.float32).sum(dim=2)
            for few in torch.split(some, rows, dim=2)
        ]
        found.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def best_share(scores: Tensor, share: float) -> Tensor:
    """Ascending ids of the best share of scores [..., n], float32 and not negative: at least one, rounded up.

    Of equal scores the lower id wins, on every device.
    """
    n = scores.shape[-1]
    ids = torch.arange(n, device=scores.device)
    # such floats order like their bits, so bits and id make one number without ties
    ranked = scores.contiguous().view(torch.int32).to(torch.int64)
    ranked.bitwise_left_shift_(32).bitwise_or_(ids.flip(0))
    best = ranked.topk(max(1, math.ceil(share * n - 1e-9)), dim=-1, sorted=False).indices
    if not best.is_cpu:
        return best.sort(dim=-1).values
    # a mask puts them in order faster than a sort; on a GPU its length would have to be waited for
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, True)
    return ids.expand(scores.shape).masked_select(chosen).view(best.shape)
