"""DepthWeave's codec: low-rank coefficients in 8 bits, and a routed part of what they miss in 4 bits.

Shapes: 2 kinds (K, V), G key heads (of all batch rows), P tokens, d channels, rank r. A vector is one kind of one token of
one head. Everything here is a function of tensors; the memory of `depthweave_kv` decides what is coded and when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")

__all__ = [
    "LARGEST_HEAD",
    "LEVELS",
    "Base",
    "Codes",
    "Residual",
    "decode",
    "encode_base",
    "encode_residual",
    "fit_basis",
    "layer_windows",
    "pack_channels",
    "quantize",
    "route",
    "second_moment",
    "token_order",
    "unpack_channels",
]

LEVELS = (8, 4, 2)  # residual channels of a routed token, most important tokens first
LARGEST_HEAD = 256  # eight channel ids must fit 64 bits
_BLOCK = 32  # numbers that share a scale
_WHOLE = len(LEVELS) + 1  # mark of a token that keeps its whole residual; i + 1 marks LEVELS[i], 0 none


@dataclass(frozen=True)
class Base:
    """Low-rank part of one layer: int8 coefficients [2, G, P, r], their scales [2, G, P, blocks], the mean [2, G, 1, d]
    that was taken off (None: none), and the basis [2, G, r, d], which the layers of a window share."""

    coefficients: Tensor
    scales: Tensor
    mean: Tensor | None
    basis: Tensor


@dataclass(frozen=True)
class Residual:
    """What one level of one layer keeps beside the base, for n tokens of each head, ascending.

    Attributes:
        values: 4-bit codes, two per byte [2, G * n, kept / 2]. scales: fp16 [2, G * n, blocks].
        channels: which channels these are, packed to the bits that d needs; None where all are kept.
    """

    mark: int
    kept: int
    values: Tensor
    scales: Tensor
    channels: Tensor | None


@dataclass(frozen=True)
class Codes:
    """One layer. `marks` holds the level of every token in four bits [G, ceil(P / 2)], K and V alike: the two bits that
    each of a token's two vectors is worth in the formula."""

    base: Base
    marks: Tensor
    residuals: tuple[Residual, ...]

    def tensors(self) -> dict[str, list[Tensor | None]]:
        """Everything held, by kind; the basis belongs to the window."""
        parts = self.residuals
        return {
            "codes": [self.base.coefficients, *(r.values for r in parts)],
            "scales": [self.base.scales, *(r.scales for r in parts)],
            "indices": [self.marks, *(r.channels for r in parts)],
            "means": [self.base.mean],
        }

    def nominal_bytes(self) -> float:
        """Bytes by the formula: r + 2 per block of 32 coefficients + 2 bits per vector; a routed one has rho codes of 4
        bits, rho channel ids and a scale besides, one with its whole residual d codes and a scale per 32 of them."""
        rank, d = self.base.basis.shape[2:]
        vectors = math.prod(self.base.coefficients.shape[:3])
        total = vectors * (rank + 2 * math.ceil(rank / _BLOCK) + 0.25)
        for part in self.residuals:
            bits = 4 if part.channels is None else 4 + _bits(d)
            total += math.prod(part.values.shape[:2]) * (part.kept * bits / 8 + 2 * part.scales.shape[2])
        return total


# -- windows and routing ------------------------------------------------------------------------------------------------


def layer_windows(layers: int, width: int) -> list[tuple[range, list[int]]]:
    """Overlapping windows of layers, and the layers that each one codes: those whose nearest middle it has, the lower
    window in doubt."""
    width = min(width, layers)
    starts = [*range(0, layers - width + 1, max(1, width // 2))]
    if starts[-1] != layers - width:
        starts.append(layers - width)
    coded: list[list[int]] = [[] for _ in starts]
    for layer in range(layers):
        coded[min(range(len(starts)), key=lambda m: abs(2 * (layer - starts[m]) - width + 1))].append(layer)
    return [(range(s, s + width), mine) for s, mine in zip(starts, coded, strict=True)]


def token_order(mass: Tensor, spike: Tensor, flags: Tensor) -> Tensor:
    """Tokens [G, P] by importance, best first: ranks of attention mass and spike [G, P], and half as much for a flag."""
    score = 2 * (_ranks(mass) + _ranks(spike)) + (mass.shape[1] - 1) * flags.long()
    return score.argsort(dim=1, descending=True, stable=True)


def _ranks(t: Tensor) -> Tensor:
    order = t.argsort(dim=1, stable=True)
    places = torch.arange(t.shape[1], device=t.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def route(order: Tensor, shares: Sequence[float], scale: float, whole: float) -> Tensor:
    """The level mark [G, P] of every token: the first `whole` of the order keep everything, the next ones by `shares`
    (scaled) of LEVELS channels, the rest none."""
    tokens = order.shape[1]
    places = torch.zeros(tokens, dtype=torch.uint8)
    first = 0
    for mark, share in enumerate(shares, start=1):
        count = math.floor(share * scale * tokens + 0.5 + 1e-9)
        places[first : first + count] = mark
        first += count
    if whole > 0:
        places[: max(1, math.floor(whole * tokens + 1e-9))] = _WHOLE
    marks = torch.empty_like(order, dtype=torch.uint8)
    return marks.scatter_(1, order, places.to(order.device).expand_as(order))


# -- bases ----------------------------------------------------------------------------------------------------------------


def second_moment(layers: Sequence[Tensor], weights: Tensor | None) -> Tensor:
    """Mean of y y^T [2, G, d, d] over layers [2, G, P, d] and tokens, weighted by [G, P]."""
    total: Tensor | None = None
    for y in layers:
        left = y if weights is None else y * weights.to(y.dtype).unsqueeze(2)
        part = left.transpose(2, 3) @ y
        total = part if total is None else total.add_(part)
    assert total is not None
    return total / (len(layers) * layers[0].shape[2])


def fit_basis(moment: Tensor, rank: int) -> Tensor:
    """The leading eigenvectors as rows [2, G, min(rank, d), d], in fp16 as they are kept and used."""
    vectors = torch.linalg.eigh(moment).eigenvectors
    return vectors[..., -min(rank, moment.shape[-1]) :].flip(-1).transpose(2, 3).half().contiguous()


# -- numbers to codes -----------------------------------------------------------------------------------------------------


def quantize(t: Tensor, top: int, block: int = _BLOCK) -> tuple[Tensor, Tensor]:
    """Codes in [-top, top] (int8) of t [..., n], and fp16 scales [..., ceil(n / block)] of blocks along n."""
    n, dtype = t.shape[-1], t.dtype
    block = min(block, n)
    t = F.pad(t, (0, -n % block)).unflatten(-1, (-1, block))
    scales = (t.abs().amax(dim=-1) / top).clamp(min=1e-12).half().to(dtype).clamp(min=6e-8).half()
    codes = (t / scales.to(dtype).unsqueeze(-1)).round_().clamp_(-top, top)
    return codes.flatten(-2)[..., :n].to(torch.int8), scales


def _dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of codes [..., n] and the scales of their blocks."""
    scales, n = scales.to(dtype), codes.shape[-1]
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(_BLOCK, dim=-1)[..., :n]
    return codes.to(dtype) * scales


def _pack(codes: Tensor) -> Tensor:
    """Numbers from -8 to 7, two per byte."""
    low = (codes + 8).to(torch.uint8)
    return low[..., ::2] | low[..., 1::2] << 4


def _unpack(packed: Tensor) -> Tensor:
    return (torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)).to(torch.int8) - 8


def _bits(d: int) -> int:
    return math.ceil(math.log2(d))


def pack_channels(ids: Tensor, bits: int) -> Tensor:
    """Ids below 2^bits, eight of them in `bits` bytes."""
    flat = ids.flatten()
    eights = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    words = (eights << torch.arange(0, 8 * bits, bits, device=ids.device)).sum(dim=1)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].contiguous()


def unpack_channels(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` ids."""
    words = F.pad(packed, (0, 8 - bits)).view(torch.int64)
    ids = words >> torch.arange(0, 8 * bits, bits, device=packed.device) & (1 << bits) - 1
    return ids.flatten()[:count]


def encode_base(y: Tensor, mean: Tensor | None, basis: Tensor) -> tuple[Base, Tensor]:
    """The low-rank part of y [2, G, P, d] (its mean off already), and what that part misses."""
    rows = basis.to(y.dtype)
    coefficients, scales = quantize(y @ rows.transpose(2, 3), 127)
    left = y - _dequantize(coefficients, scales, y.dtype) @ rows
    return Base(coefficients, scales, mean, basis), left


def encode_residual(base: Base, left: Tensor, marks: Tensor) -> Codes:
    """Codes of one layer: the base, and of `left` [2, G, P, d] what the marks [G, P] keep."""
    flat, found = left.flatten(1, 2), marks.flatten()
    residuals = []
    for mark in range(1, _WHOLE + 1):
        where = (found == mark).nonzero()[:, 0]
        if len(where):
            chosen = flat.index_select(1, where)
            residuals.append(_whole(chosen) if mark == _WHOLE else _largest(chosen, mark))
    even = F.pad(marks, (0, marks.shape[1] % 2))
    return Codes(base, even[:, ::2] | even[:, 1::2] << 4, tuple(residuals))


def _whole(left: Tensor) -> Residual:
    codes, scales = quantize(left, 7)
    return Residual(_WHOLE, left.shape[2], _pack(codes), scales, None)


def _largest(left: Tensor, mark: int) -> Residual:
    """The largest channels of left [2, n, d] (a tie at the border leaves out an equally large one), with the gate that
    fits them best folded into the scale."""
    kept = min(LEVELS[mark - 1], left.shape[2])
    channels = left.abs().topk(kept, dim=2).indices
    v = left.gather(2, channels)
    codes, scales = quantize(v, 7)
    approximate = codes * scales.to(v.dtype)
    power = (approximate * approximate).sum(dim=2, keepdim=True)
    gate = ((v * approximate).sum(dim=2, keepdim=True) / power.clamp(min=torch.finfo(v.dtype).tiny)).clamp(0, 1)
    scales = (scales.to(v.dtype) * gate).half()
    return Residual(mark, kept, _pack(codes), scales, pack_channels(channels, _bits(left.shape[2])))


# -- codes to numbers -----------------------------------------------------------------------------------------------------


def decode(codes: Codes, dtype: torch.dtype, heads: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
    """Keys (before RoPE) and values [2, n, m, d] of tokens [n, m], one row for each of heads [n]; None: of all."""
    base, count = codes.base, codes.base.coefficients.shape[2]
    flat, coefficients, scales, basis, mean = None, base.coefficients, base.scales, base.basis, base.mean
    if heads is not None and tokens is not None:
        flat = (heads.unsqueeze(1) * count + tokens).flatten()
        coefficients, scales = (
            t.flatten(1, 2).index_select(1, flat).unflatten(1, tokens.shape) for t in (coefficients, scales)
        )
        basis, mean = basis.index_select(1, heads), None if mean is None else mean.index_select(1, heads)
    out = _dequantize(coefficients, scales, dtype) @ basis.to(dtype)
    marks = torch.stack((codes.marks & 15, codes.marks >> 4), dim=2).flatten(1)[:, :count].flatten()
    for part in codes.residuals:
        _add(out, part, marks, flat)
    return out if mean is None else out.add_(mean)


def _add(out: Tensor, part: Residual, marks: Tensor, flat: Tensor | None) -> None:
    """Adds one level's residual to out [2, n, m, d] of the vectors `flat` (None: all), in place."""
    d, mine = out.shape[3], marks == part.mark
    values, scales, channels = part.values, part.scales, None
    if part.channels is not None:
        channels = unpack_channels(part.channels, _bits(d), values.shape[:2].numel() * part.kept)
        channels = channels.view(*values.shape[:2], part.kept)
    if flat is None:
        where = mine.nonzero()[:, 0]
    else:
        where = mine.index_select(0, flat).nonzero()[:, 0]
        stored = (mine.cumsum(0) - 1).index_select(0, flat.index_select(0, where))
        values, scales = values.index_select(1, stored), scales.index_select(1, stored)
        channels = None if channels is None else channels.index_select(1, stored)
    numbers = _dequantize(_unpack(values), scales, out.dtype)
    if channels is None:
        out.view(2, -1, d).index_add_(1, where, numbers)
    else:
        places = (where * d).unsqueeze(1) + channels
        out.view(2, -1).scatter_add_(1, places.flatten(1), numbers.flatten(1))
