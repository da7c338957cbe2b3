"""Random fixture models: small, deterministic, and with every variant of attention that the network knows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule
from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import LayerWeights, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["CONFIGS", "fixture_weights", "make_prompt"]

_PLAIN = NetworkConfig(
    family="llada",
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=48,
    vocab_size=64,
    embedding_size=64,
    norm_eps=1e-5,
    rope_theta=10000.0,
    max_positions=128,
    qkv_bias=False,
    tied=False,
    shift=False,
    rope_cast=False,
    mask_id=63,
    eos_ids=(62,),
)

CONFIGS = {
    "plain": _PLAIN,
    "gqa": replace(_PLAIN, num_kv_heads=2),
    "bias": replace(_PLAIN, qkv_bias=True),
    "shifted": replace(_PLAIN, family="dream", num_kv_heads=2, qkv_bias=True, shift=True, rope_cast=True),
}
"""Fixture models by name: LLaDA's form, grouped queries, biases of q, k and v, and all of it with Dream's shift."""


def fixture_weights(config: NetworkConfig, dtype: torch.dtype) -> Weights:
    """Seeded Gaussian weights; attention is peaked enough that a wrong row, position or key shows in the logits."""
    c, generator = config, torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (mean + scale * drawn).to(dtype)

    width, joint = c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    inner = c.num_heads * c.head_dim
    layers = [
        LayerWeights(
            attn_norm=normal(width, scale=0.1, mean=1.0),
            qkv=normal(joint, width, scale=1.5 * width**-0.5),
            qkv_bias=normal(joint, scale=0.3) if c.qkv_bias else None,
            attn_out=normal(width, inner, scale=inner**-0.5),
            ffn_norm=normal(width, scale=0.1, mean=1.0),
            gate_up=normal(2 * c.ffn_size, width, scale=width**-0.5),
            down=normal(width, c.ffn_size, scale=c.ffn_size**-0.5),
        )
        for _ in range(c.num_layers)
    ]
    return Weights(
        embed=normal(c.embedding_size, width, scale=1.0),
        layers=layers,
        final_norm=normal(width, scale=0.1, mean=1.0),
        head=normal(c.embedding_size, width, scale=2 * width**-0.5),
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids below the special ones."""
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(_PLAIN.vocab_size - 2) for _ in range(length)]
