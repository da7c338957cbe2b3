"""DepthWeave's codec: low-rank coefficients in 8 bits, and a routed part of what they miss in 4 bits.

Shapes: 2 kinds (K, V), G key heads (of all batch rows), P tokens, d channels, rank r. A vector is one kind of one token
of one head. Everything here is a function of tensors; what is coded and when is decided by `depthweave_coder`.
"""

from __future__ import annotations

import math
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
    "WHOLE",
    "Base",
    "Codes",
    "Residual",
    "decode",
    "decode_some",
    "encode",
    "encode_base",
    "pack_channels",
    "quantize",
    "unpack_channels",
]

LEVELS = (8, 4, 2)  # residual channels of a routed token, most important tokens first
WHOLE = len(LEVELS) + 1  # mark of a token that keeps its whole residual; i + 1 marks LEVELS[i], 0 none
LARGEST_HEAD = 256  # eight channel ids must fit 64 bits
_BLOCK = 32  # numbers that share a scale


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

    def all_channels(self, d: int) -> Tensor | None:
        """Channel ids [2, G * n, kept]."""
        if self.channels is None:
            return None
        shape = (*self.values.shape[:2], self.kept)
        return unpack_channels(self.channels, _bits(d), math.prod(shape)).view(shape)


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

    def all_marks(self) -> Tensor:
        """The mark of every token [G, P]."""
        both = torch.stack((self.marks & 15, self.marks >> 4), dim=2).flatten(1)
        return both[:, : self.base.coefficients.shape[2]]

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


# -- numbers to codes -------------------------------------------------------------------------------------------------


def quantize(t: Tensor, top: int, block: int = _BLOCK) -> tuple[Tensor, Tensor]:
    """Codes in [-top, top] (int8) of t [..., n], and fp16 scales [..., ceil(n / block)] of blocks along n."""
    n, dtype = t.shape[-1], t.dtype
    block = min(block, n)
    t = torch.unflatten(F.pad(t, (0, -n % block)), -1, (-1, block))
    scales = (t.abs().amax(dim=-1) / top).half().to(dtype).clamp(min=6e-8).half()
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


def encode_base(y: Tensor, mean: Tensor | None, basis: Tensor) -> Base:
    """The low-rank part of y [2, G, P, d], its mean off already."""
    coefficients, scales = quantize(y @ basis.to(y.dtype).transpose(2, 3), 127)
    return Base(coefficients, scales, mean, basis)


def encode(base: Base, y: Tensor, marks: Tensor) -> Codes:
    """Codes of one layer: the base, and of what it misses of y [2, G, P, d] as much as the marks [G, P] say."""
    left = y - _dequantize(base.coefficients, base.scales, y.dtype) @ base.basis.to(y.dtype)
    flat, found = left.flatten(1, 2), marks.flatten()
    residuals = []
    for mark in range(1, WHOLE + 1):
        where = (found == mark).nonzero()[:, 0]
        if len(where):
            chosen = flat.index_select(1, where)
            residuals.append(_whole(chosen) if mark == WHOLE else _largest(chosen, mark))
    even = F.pad(marks, (0, marks.shape[1] % 2))
    return Codes(base, even[:, ::2] | even[:, 1::2] << 4, tuple(residuals))


def _whole(left: Tensor) -> Residual:
    codes, scales = quantize(left, 7)
    return Residual(WHOLE, left.shape[2], _pack(codes), scales, None)


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


# -- codes to numbers -------------------------------------------------------------------------------------------------


def decode(codes: Codes, dtype: torch.dtype, heads: slice = slice(None)) -> Tensor:
    """Keys (before RoPE) and values [2, n, P, d] of all tokens, for a range of the heads."""
    base, marks = codes.base, codes.all_marks()
    out = _dequantize(base.coefficients[:, heads], base.scales[:, heads], dtype) @ base.basis[:, heads].to(dtype)
    for part in codes.residuals:
        per_head = part.values.shape[1] // len(marks)
        first, last, _ = heads.indices(len(marks))
        rows = slice(first * per_head, last * per_head)
        where = (marks[heads] == part.mark).flatten().nonzero()[:, 0]
        channels = part.all_channels(out.shape[3])
        _add(out, where, part.values[:, rows], part.scales[:, rows], None if channels is None else channels[:, rows])
    return out if base.mean is None else out.add_(base.mean[:, heads])


def decode_some(codes: Codes, dtype: torch.dtype, heads: Tensor, tokens: Tensor) -> Tensor:
    """The same [2, n, m, d] of some tokens [n, m] alone, a row of them for each of heads [n]."""
    base, marks = codes.base, codes.all_marks()
    flat = (heads.unsqueeze(1) * marks.shape[1] + tokens).flatten()
    coefficients, scales = (
        torch.unflatten(t.flatten(1, 2).index_select(1, flat), 1, tokens.shape)
        for t in (base.coefficients, base.scales)
    )
    out = _dequantize(coefficients, scales, dtype) @ base.basis.index_select(1, heads).to(dtype)
    for part in codes.residuals:
        mine = marks.flatten() == part.mark
        where = mine.index_select(0, flat).nonzero()[:, 0]
        rows = (mine.cumsum(0) - 1).index_select(0, flat.index_select(0, where))
        values, scales = part.values.index_select(1, rows), part.scales.index_select(1, rows)
        channels = part.all_channels(out.shape[3])
        _add(out, where, values, scales, None if channels is None else channels.index_select(1, rows))
    return out if base.mean is None else out.add_(base.mean.index_select(1, heads))


def _add(out: Tensor, where: Tensor, values: Tensor, scales: Tensor, channels: Tensor | None) -> None:
    """Adds residuals to the vectors `where` of out [2, n, m, d], counted over heads and tokens, in place."""
    d = out.shape[3]
    numbers = _dequantize(_unpack(values), scales, out.dtype)
    if channels is None:
        out.view(2, -1, d).index_add_(1, where, numbers)
    else:
        places = (where * d).unsqueeze(1) + channels
        out.view(2, -1).scatter_add_(1, places.flatten(1), numbers.flatten(1))
