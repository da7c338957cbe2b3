"""Structured initialisation: the tiny model starts from a copying circuit plus noise.

From plain noise a model of this size does not find the circuit "look at the neighbour, match it, copy what follows"
within hours on two CPU cores; started from it, it copies random sequences after minutes. Everything stays trainable.

The residual stream is split: own token, previous, next, a bag of the tokens before (to know which key a number belongs
to), and four dimensions that are constant (LLaDA has no biases, so heads need a constant to look at a fixed offset).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import LayerWeights, Weights

CONSTANT = 4
SLOW = 0.02  # rotary frequencies that turn little over thousands of tokens: matching must not depend on distance
OFFSETS = (-1, 1, -2, 2, -3)
OWN, SIDE = 64, 30
BROAD = {2: -9, 3: -13}  # heads of layer 1 that gather the tokens around an offset


class _Init:
    def __init__(self, config: NetworkConfig, seed: int) -> None:
        self.c = config
        self.generator = torch.Generator().manual_seed(seed)
        width = config.hidden_size
        self.own = slice(0, OWN)
        self.previous = slice(OWN, OWN + SIDE)
        self.following = slice(OWN + SIDE, OWN + 2 * SIDE)
        self.bag = slice(OWN + 2 * SIDE, width - CONSTANT)
        self.constant = slice(width - CONSTANT, width)
        pairs = config.head_dim // 2
        self.frequencies = config.rope_theta ** (-torch.arange(pairs, dtype=torch.float32) / pairs)
        # all broad heads write the same projection, so that bags gathered by different heads can be compared
        self.into_bag = torch.randn(self.bag.stop - self.bag.start, OWN, generator=self.generator) * OWN**-0.5

    def noise(self, rows: int, columns: int, scale: float = 0.3) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale * columns**-0.5

    def embedding(self) -> Tensor:
        e = torch.randn(self.c.embedding_size, self.c.hidden_size, generator=self.generator)
        e[:, self.own.stop :] *= 0.05
        e[:, self.constant] = 1.0
        return e

    def head(self, embedding: Tensor) -> Tensor:
        h = self.noise(*embedding.shape)
        h[:, self.own] += 2.0 * OWN**-0.5 * embedding[:, self.own]
        return h

    def layer(self, index: int) -> LayerWeights:
        c, d = self.c, self.c.hidden_size
        q, k, v = (self.noise(d, d) for _ in range(3))
        out = self.noise(d, d)
        for head in range(c.num_heads):
            rows = slice(head * c.head_dim, (head + 1) * c.head_dim)
            if index == 0:
                self._look(OFFSETS[head % len(OFFSETS)], q[rows], k[rows], v[rows], out[:, rows])
            elif index == 1 and head in BROAD:
                self._gather(BROAD[head], q[rows], k[rows], v[rows], out[:, rows])
            else:
                bag = index > 1 and head >= 2
                self._match(head, bag, q[rows], k[rows], v[rows], out[:, rows])
        return LayerWeights(
            attn_norm=torch.ones(d),
            qkv=torch.cat([q, k, v]),
            qkv_bias=None,
            attn_out=out,
            ffn_norm=torch.ones(d),
            gate_up=self.noise(2 * c.ffn_size, d),
            down=self.noise(d, c.ffn_size),
        )

    def _look(self, offset: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A head that looks at a fixed offset and writes what it sees to `previous` or `following`."""
        gain, pairs = 2.0, len(self.frequencies)
        q[:pairs, self.constant] += gain / CONSTANT
        angle = -offset * self.frequencies
        turned = torch.cat([angle.cos(), angle.sin()])
        k[:, self.constant] += gain / CONSTANT * turned[:, None]
        # only fast pairs tell neighbours apart; a stronger look at them makes up for the many slow ones
        fast = torch.where(self.frequencies > 0.02, 2.0, 1.0)
        q[:pairs, self.constant] *= fast[:, None]
        k[:, self.constant] *= fast.repeat(2)[:, None]
        v[:, self.own] += torch.randn(v.shape[0], self.own.stop, generator=self.generator) * self.own.stop**-0.5
        target = self.previous if offset < 0 else self.following
        size = min(target.stop - target.start, v.shape[0])
        strength = 1.5 if abs(offset) == 1 else 0.75
        out[target.start : target.start + size, :size] += strength * torch.eye(size)

    def _gather(self, offset: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A head that averages about ten tokens around an offset into the bag."""
        pairs = len(self.frequencies)
        gain = torch.tensor([0.0, 1.5, 2.0, 2.0, 2.0] + [1.0] * (pairs - 5)) * 1.3
        angle = -offset * self.frequencies
        q[:pairs, self.constant] += gain[:, None] / CONSTANT
        k[:, self.constant] += (gain.repeat(2) * torch.cat([angle.cos(), angle.sin()]))[:, None] / CONSTANT
        size = min(self.into_bag.shape[0], v.shape[0])
        v[:size, self.own] += self.into_bag[:size]
        out[self.bag.start : self.bag.start + size, :size] += 3.0 * torch.eye(size)

    def _match(self, head: int, bag: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A head that finds a token with the same neighbour (and bag) at any distance and copies a slice of its own."""
        source = self.previous if head % 2 == 0 else self.following
        slow = torch.nonzero(self.frequencies < SLOW).flatten()
        rows = torch.cat([slow, slow + len(self.frequencies)])
        for part in (source, self.bag) if bag else (source,):
            size = part.stop - part.start
            projection = 2.0 * torch.randn(len(rows), size, generator=self.generator) * size**-0.5
            q[rows, part] += projection
            k[rows, part] += projection
        edges = [round(OWN * i / self.c.num_heads) for i in range(self.c.num_heads + 1)]
        mine = slice(edges[head], edges[head + 1])
        piece = mine.stop - mine.start
        v[:piece, mine] += torch.eye(piece)
        out[mine, :piece] += torch.eye(piece)


def structured_weights(config: NetworkConfig, seed: int) -> Weights:
    init = _Init(config, seed)
    embedding = init.embedding()
    layers = [init.layer(i) for i in range(config.num_layers)]
    return Weights(embedding, layers, torch.ones(config.hidden_size), init.head(embedding))
