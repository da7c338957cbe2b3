"""Shape of the tiny model and the stages of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.llada import Llada

GEN, BLOCK = 48, 16  # decoding: four 7-digit values with their separators and the end of turn are 38 tokens

# config.json in the official field names; ids follow tiny_text.SPECIALS
CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "bos_token_id": 0,
    "d_model": 160,
    "embedding_size": 2048,
    "eos_token_id": 1,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 2,
    "max_sequence_length": 32768,
    "mlp_hidden_size": 448,
    "mlp_ratio": 3,
    "model_type": "llada",
    "n_heads": 5,
    "n_kv_heads": 5,
    "n_layers": 5,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 1e9,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "vocab_size": 2048,
    "weight_tying": False,
}


def network_config() -> NetworkConfig:
    return Llada.parse(CONFIG)


@dataclass(frozen=True)
class Stage:
    """`rates`: learning rate at the start and at the end, linear between; the rest as in Batches.make."""

    steps: int
    length: int
    batch: int
    rates: tuple[float, float]
    mix: dict[str, float]
    stretch: float
    span: int
    checks: tuple[tuple[str, int], ...]
    ghosts: int = 0

    def rate(self, through: float) -> float:
        return self.rates[0] + (self.rates[1] - self.rates[0]) * through


KEYS = {
    "single_1": 0.12,
    "single_2": 0.12,
    "twokey": 0.1,
    "multikey_1": 0.12,
    "multikey_2": 0.1,
    "listing": 0.22,
    "listing_needle": 0.22,
}
ALL = {
    "single_1": 0.1,
    "single_2": 0.08,
    "noisekey": 0.05,
    "multikey_1": 0.12,
    "multikey_2": 0.12,
    "listing": 0.05,
    "listing_needle": 0.05,
    "twovalue": 0.1,
    "multivalue": 0.12,
    "twoquery": 0.1,
    "multiquery": 0.11,
}
LONG = {
    "single_1": 0.3,
    "single_2": 0.2,
    "noisekey": 0.1,
    "multikey_1": 0.15,
    "multikey_2": 0.1,
    "multivalue": 0.08,
    "multiquery": 0.07,
}
SEVERAL = {
    "single_1": 0.05,
    "single_2": 0.04,
    "multikey_1": 0.08,
    "multikey_2": 0.1,
    "listing": 0.04,
    "twovalue": 0.06,
    "threevalue": 0.12,
    "multivalue": 0.2,
    "linevalue": 0.07,
    "threequery": 0.08,
    "multiquery": 0.16,
}
CHECKS = (
    ("single_1", 1024),
    ("single_2", 320),
    ("multikey_1", 320),
    ("multikey_2", 320),
    ("multivalue", 320),
    ("multiquery", 320),
)

STAGES = [
    Stage(500, 224, 12, rates=(2e-3, 2e-3), mix=KEYS, stretch=0.2, span=4096, checks=CHECKS),
    Stage(1500, 288, 10, rates=(2e-3, 1.5e-3), mix=ALL, stretch=0.4, span=8192, checks=CHECKS),
    Stage(864, 384, 8, rates=(1.5e-3, 9.24e-04), mix=ALL, stretch=0.6, span=32768, checks=CHECKS),
    Stage(2000, 288, 10, rates=(1.5e-3, 1e-3), mix=SEVERAL, stretch=0.4, span=16384, checks=CHECKS),
    Stage(1000, 512, 6, rates=(1e-3, 1e-4), mix=ALL, stretch=0.6, span=32768, checks=CHECKS),
    Stage(500, 1024, 3, rates=(3e-4, 5e-5), mix=ALL, stretch=0.5, span=32768, checks=CHECKS),
    Stage(300, 320, 6, rates=(6e-4, 5e-5), mix=LONG, stretch=0.8, span=32768, checks=CHECKS, ghosts=2048),
]
