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

# weights held at a time while rows vote: what stays in the cache of a CPU's core, or bounds a GPU's memory
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}


def votes(q: Tensor, keys: Tensor, at_once: int | None = None) -> Tensor:
    """Attention, summed over all query rows, that each key gets: float32 [B, Hkv, n].

    Args:
        q: scaled queries [B, Hkv, R, d]; the query heads of a group are rows. keys: [B, Hkv, n, d].
        at_once: weights to hold at a time, in every thread of a CPU, so that many rows over many keys need no matrix
            of them all.
    """
    b, _, n, _ = keys.shape
    at_once = at_once or _AT_ONCE.get(q.device.type, 1 << 24)
    # as many heads as threads go together: each thread works on heads of its own, and reads nothing that another wrote
    threads = torch.get_num_threads() if q.is_cpu else 1
    heads, rows = threads * max(1, at_once // (b * q.shape[2] * n)), max(1, at_once // (b * n))
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
    count = max(1, math.ceil(share * n - 1e-9))
    # such floats order like their bits
    bits = scores.contiguous().view(torch.int32)
    if bits.is_cpu:
        return _best_on_cpu(bits.view(-1, n), count).view(*scores.shape[:-1], count)
    # bits and id make one number without ties
    ranked = bits.to(torch.int64)
    ranked.bitwise_left_shift_(32).bitwise_or_(torch.arange(n - 1, -1, -1, device=bits.device))
    return ranked.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values


def _best_on_cpu(bits: Tensor, count: int) -> Tensor:
    """The same for int32 bits [rows, n] of scores: [rows, count], by a threshold per row and without a sort.

    torch takes few rows in one thread, so what counts here is the time of one; NumPy's selection has half of it.
    """
    rows, n = bits.shape
    scores = bits.numpy()
    ordered = scores.copy()
    ordered.partition(n - count, axis=1)
    least = ordered[:, n - count, None]
    chosen = scores >= least
    if chosen.sum() > rows * count:
        tied = scores == least
        spare = count - (scores > least).sum(axis=1, keepdims=True)
        chosen &= ~tied | (tied.cumsum(axis=1) <= spare)
    ids = torch.from_numpy(chosen.ravel().nonzero()[0]).view(rows, count)
    return ids.sub_(torch.arange(0, rows * n, n).unsqueeze(1))
