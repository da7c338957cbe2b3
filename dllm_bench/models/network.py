"""The one Transformer: pure primitives per layer, for LLaDA and Dream alike.

Tensors carry a batch dimension first. Shapes: B rows of a batch, M rows (positions) of a pass, D hidden size, H query
heads, Hkv key/value heads, d head size. Nothing of size M x M or prompt x vocabulary is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule
from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.counters import Counters

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")

__all__ = ["LayerWeights", "Network", "Weights", "rotate"]


@dataclass
class LayerWeights:
    """One block. `qkv` stacks the rows of q, k and v; `gate_up` those of gate and up: one product each."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attn_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Weights:
    """All tensors of a network; `head` is `embed` itself where the two are tied."""

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Tensor


@dataclass
class Network:
    """The primitives that methods are made of.

    `counters` belongs to the request that runs now; the loop sets a fresh one.
    """

    config: NetworkConfig
    weights: Weights
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        c = self.config
        self._q = c.num_heads * c.head_dim
        self._kv = c.num_kv_heads * c.head_dim
        self._table: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    # -- primitives -------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [B, M] to the input of layer 0 [B, M, D]."""
        return F.embedding(ids, self.weights.embed)

    def project(self, layer: int, x: Tensor, want: str = "qkv") -> tuple[Tensor, ...]:
        """Layer input [B, M, D] to those of q [B, H, M, d], k and v [B, Hkv, M, d] that `want` names, before RoPE.

        `want` is a contiguous part of "qkv": computing "v" alone costs a third.
        """
        w, c = self.weights.layers[layer], self.config
        sizes = {"q": self._q, "k": self._kv, "v": self._kv}
        start = sum(sizes[n] for n in "qkv"[: "qkv".index(want)])
        stop = start + sum(sizes[n] for n in want)
        bias = None if w.qkv_bias is None else w.qkv_bias[start:stop]
        joint = F.linear(self._norm(x, w.attn_norm), w.qkv[start:stop], bias)
        self.counters.projected_rows += x.shape[0] * x.shape[1]
        parts = torch.split(joint, [sizes[n] for n in want], dim=-1)
        return tuple(p.view(*p.shape[:2], -1, c.head_dim).transpose(1, 2) for p in parts)

    def rope(self, t: Tensor, positions: Tensor | slice) -> Tensor:
        """Rotates t [B, heads, M, d] to absolute positions; half-split pairs.

        `positions` is slice(start, stop), or a tensor [M] whose largest value `grow_rope` has provided for.
        """
        if self._table is None or isinstance(positions, slice):
            self.grow_rope(positions.stop if isinstance(positions, slice) else int(positions.max()) + 1)
        assert self._table is not None
        cos, sin = self._table[0][positions], self._table[1][positions]
        if self.config.rope_cast:
            cos, sin = cos.to(t.dtype), sin.to(t.dtype)
        return rotate(t, cos, sin)

    def rope_at(self, t: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        """Rotates t [..., M, d] to any real positions [..., M], outside the table; `back` undoes it."""
        angles = positions.float().unsqueeze(-1) * self._frequencies()
        return rotate(t, angles.cos(), -angles.sin() if back else angles.sin())

    def attend(self, q: Tensor, parts: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Full attention of q [B, H, M, d] over pieces of keys and values [B, Hkv, T, d]: [B, H, M, d].

        Query heads that share a key head are folded into the rows, so keys are never repeated. A piece may carry a
        third tensor [B, Hkv, 1, T] that is added to the scores of all rows: -inf hides a key.
        """
        k, v = parts[0][:2] if len(parts) == 1 else (torch.cat([p[i] for p in parts], dim=2) for i in (0, 1))
        self.counters.attended_rows += q.shape[0] * q.shape[2]
        b, h, m, d = q.shape
        folded = q if h == k.shape[1] else q.reshape(b, k.shape[1], -1, d)
        out: Tensor = F.scaled_dot_product_attention(folded, k, v, attn_mask=_joint_bias(parts))
        return out.view(b, h, m, d) if h != k.shape[1] else out

    def scores(self, q: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Scaled products of a few named queries q [B, H, M, d] and keys [B, Hkv, T, d]: float32 [B, H, M, T]."""
        k = keys[0] if len(keys) == 1 else torch.cat(list(keys), dim=2)
        self.counters.weight_rows += q.shape[0] * q.shape[2]
        b, h, m, d = q.shape
        products = (q.reshape(b, k.shape[1], -1, d) @ k.transpose(-1, -2)).float()
        return products.mul_(d**-0.5).view(b, h, m, -1)

    def attention_rows(self, q: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Softmax rows of a few named queries q [B, H, M, d] over keys [B, Hkv, T, d]: float32 [B, H, M, T]."""
        return torch.softmax(self.scores(q, keys), dim=-1)

    def out(self, layer: int, o: Tensor) -> Tensor:
        """Attention output [B, H, M, d] to the attention branch [B, M, D], to be added to the residual."""
        return F.linear(o.transpose(1, 2).flatten(2), self.weights.layers[layer].attn_out)

    def ffn(self, layer: int, x: Tensor) -> Tensor:
        """Residual [B, M, D] to the FFN branch [B, M, D], to be added to the residual."""
        w = self.weights.layers[layer]
        self.counters.row_layers += x.shape[0] * x.shape[1]
        gate, up = F.linear(self._norm(x, w.ffn_norm), w.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w.down)

    def head(self, x: Tensor) -> Tensor:
        """Last residual of the asked rows [B, R, D] to logits [B, R, embedding_size]."""
        self.counters.head_rows += x.shape[0] * x.shape[1]
        return F.linear(self.final(x), self.weights.head)

    def final(self, x: Tensor) -> Tensor:
        """The last RMSNorm."""
        return self._norm(x, self.weights.final_norm)

    # -- a whole pass without caches --------------------------------------------------------------------------------

    def hidden(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Uncached pass over ids [B, N] at `positions` (default 0 … N - 1): last residual [B, N, D]."""
        where: Tensor | slice = slice(0, ids.shape[1]) if positions is None else positions
        x = self.embed(ids)
        for layer in range(self.config.num_layers):
            q, k, v = self.project(layer, x)
            x = x + self.out(layer, self.attend(self.rope(q, where), [(self.rope(k, where), v)]))
            x = x + self.ffn(layer, x)
        return x

    # -- parts ------------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm in float32, cast back, then scaled (the official order matters in bfloat16)."""
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.config.norm_eps).to(x.dtype) * weight

    def grow_rope(self, length: int) -> None:
        """Makes the RoPE table at least `length` positions long, so that no pass has to."""
        if self._table is not None and self._table[0].shape[0] >= length and self._table[0].device == self.device:
            return
        length = max(length, self.config.max_positions)
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=self.device), self._frequencies())
        self._table = (angles.cos(), angles.sin())

    def _frequencies(self) -> Tensor:
        """Radians per position of each pair of channels."""
        steps = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=self.device)
        return 1.0 / (self.config.rope_theta ** (steps / self.config.head_dim))


def _joint_bias(parts: Sequence[tuple[Tensor, ...]]) -> Tensor | None:
    """The score biases of all pieces side by side; None where no piece has one."""
    if all(len(p) == 2 for p in parts):
        return None
    return torch.cat([p[2] if len(p) > 2 else p[0].new_zeros(*p[0].shape[:2], 1, p[0].shape[2]) for p in parts], dim=3)


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates half-split pairs of t [..., M, d] by cos and sin [M, d/2], in at least the table's precision."""
    a, b = t.chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned.to(t.dtype)
