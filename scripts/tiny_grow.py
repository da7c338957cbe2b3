"""Widens a trained tiny model by one head, its part of the residual stream, and FFN units.

What is there goes on as before: new residual dimensions start empty, old norms are scaled for the larger width, and new
FFN units write nothing yet. The new head starts from a circuit, as in tiny_init.py: in the first two layers it looks
four tokens back and keeps what it sees there and eight back (in equations of three-digit columns these are the digits
to add), in the others it finds a token with the same neighbour and copies it, whatever token it is.
"""

from __future__ import annotations

import torch
from tiny_init import CONSTANT, OWN, SIDE, SLOW
from torch import Tensor

from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import LayerWeights, Weights

__all__ = ["grown"]

BACK = 4


class _Grow:
    def __init__(self, old: NetworkConfig, new: NetworkConfig, seed: int) -> None:
        if new.num_heads != old.num_heads + 1 or new.head_dim != old.head_dim:
            raise ValueError("a model grows by one head of the size of the others")
        self.old, self.new = old, new
        self.generator = torch.Generator().manual_seed(seed)
        self.width = old.hidden_size
        self.constant = slice(self.width - CONSTANT, self.width)
        pairs = new.head_dim // 2
        self.frequencies = new.rope_theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)

    def noise(self, rows: int, columns: int, scale: float = 0.3) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale * columns**-0.5

    def widened(self, t: Tensor, rows: int, columns: int) -> Tensor:
        """`t` in the corner of a matrix of zeros."""
        out = torch.zeros(rows, columns)
        out[: t.shape[0], : t.shape[1]] = t
        return out

    def norm(self, t: Tensor) -> Tensor:
        """New dimensions are near zero, so the root mean square falls as if by the growth of the width."""
        out = torch.ones(self.new.hidden_size)
        out[: self.width] = t * (self.width / self.new.hidden_size) ** 0.5
        return out

    def layer(self, index: int, old: LayerWeights) -> LayerWeights:
        d, size = self.new.hidden_size, self.new.head_dim
        q, k, v = (self.widened(t, d, d) for t in old.qkv.chunk(3))
        out = self.widened(old.attn_out, d, d)
        mine = slice(d - size, d)
        for t in (q, k, v):
            t[mine] = self.noise(size, d)
        if index < 2:
            self._look_back(index, q[mine], k[mine], v[mine], out[:, mine])
        else:
            self._copy(index, q[mine], k[mine], v[mine], out[:, mine])
        gate, up = (torch.cat([self.widened(t, len(t), d), self.noise(self.new.ffn_size - len(t), d, 1.0)])
                    for t in old.gate_up.chunk(2))  # fmt: skip
        return LayerWeights(
            attn_norm=self.norm(old.attn_norm),
            qkv=torch.cat([q, k, v]),
            qkv_bias=None,
            attn_out=out,
            ffn_norm=self.norm(old.ffn_norm),
            gate_up=torch.cat([gate, up]),
            down=self.widened(old.down, d, self.new.ffn_size),
        )

    def _look_back(self, index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Layer 0 sees the token, layer 1 what layer 0 saw there; each keeps it in half of the new dimensions."""
        pairs, half = len(self.frequencies), v.shape[0] // 2
        gain = torch.where(self.frequencies > SLOW, 4.0, 2.0) * (1.0 if index == 0 else 1.5)
        turned = torch.cat([(BACK * self.frequencies).cos(), (BACK * self.frequencies).sin()])
        q[:pairs, self.constant] += gain[:, None] / CONSTANT
        k[:, self.constant] += (gain.repeat(2) * turned)[:, None] / CONSTANT
        if index == 0:
            v[:half, :OWN] += torch.randn(half, OWN, generator=self.generator) * OWN**-0.5
        else:
            v[:half, self.width : self.width + half] += torch.eye(half)
        start = self.width + index * half
        out[start : start + half, :half] += 1.5 * torch.eye(half)

    def _copy(self, index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Matches the token before (in odd layers the one behind), at any distance."""
        source = slice(OWN, OWN + SIDE) if index % 2 == 0 else slice(OWN + SIDE, OWN + 2 * SIDE)
        slow = torch.nonzero(self.frequencies < SLOW).flatten()
        rows = torch.cat([slow, slow + len(self.frequencies)])
        projection = 2.0 * torch.randn(len(rows), SIDE, generator=self.generator) * SIDE**-0.5
        q[rows, source] += projection
        k[rows, source] += projection
        copied = torch.linalg.qr(torch.randn(OWN, v.shape[0], generator=self.generator))[0]
        v[:, :OWN] += copied.T
        out[:OWN] += copied


def grown(old: Weights, old_config: NetworkConfig, config: NetworkConfig, seed: int) -> Weights:
    """`old` as the weights of a model of `config`, which has one head more and perhaps more FFN units."""
    grow = _Grow(old_config, config, seed)
    vocabulary, d = old.embed.shape[0], config.hidden_size
    embed = grow.widened(old.embed, vocabulary, d)
    embed[:, grow.width :] = 0.05 * torch.randn(vocabulary, d - grow.width, generator=grow.generator)
    layers = [grow.layer(i, layer) for i, layer in enumerate(old.layers)]
    return Weights(embed, layers, grow.norm(old.final_norm), grow.widened(old.head, vocabulary, d))
