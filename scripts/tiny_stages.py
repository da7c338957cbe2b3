"""Shape of the tiny model and the stages of its training."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tiny_data import Part

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
    "d_model": 192,
    "embedding_size": 2048,
    "eos_token_id": 1,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 2,
    "max_sequence_length": 32768,
    "mlp_hidden_size": 640,
    "mlp_ratio": 3,
    "model_type": "llada",
    "n_heads": 6,
    "n_kv_heads": 6,
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
    """`rates`: learning rate at the start and at the end, linear between."""

    steps: int
    rates: tuple[float, float]
    parts: tuple[Part, ...]
    checks: tuple[tuple[str, int], ...]

    def rate(self, through: float) -> float:
        return self.rates[0] + (self.rates[1] - self.rates[0]) * through

    def part(self, seed: int, step: int) -> Part:
        """What a step trains on."""
        rng = random.Random(f"{seed}-{step}-part")
        return rng.choices(self.parts, [p.share for p in self.parts])[0]


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
NOISE = {"single_1": 0.6, "single_2": 0.2, "noisekey": 0.2}
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

SKILLS = (
    ("problem", 0),
    ("room", 512),
    ("paragraph", 512),
    ("single_1", 1024),
    ("multikey_1", 320),
    ("multiquery", 320),
)
LONGER = (("problem", 0), ("room", 1024), ("paragraph", 1024), ("multikey_1", 1024), ("multiquery", 1024))
FAR = (
    ("problem", 0),
    ("room", 2048),
    ("paragraph", 2048),
    ("multikey_1", 1024),
    ("multikey_2", 2048),
    ("multivalue", 2048),
)
DOCUMENTS = {"room": 0.5, "paragraph": 0.5}
# many questions about one long text: many answers per token of training
LISTS = {"longlist": 0.45, "longlist_needle": 0.55}
CATALOGUES = {"rooms": 0.35, "paragraphs": 0.35, "room": 0.15, "paragraph": 0.15}
FULL = {
    "multikey_1": 0.08,
    "multikey_2": 0.16,
    "multivalue": 0.3,
    "multiquery": 0.2,
    "eightvalue": 0.1,
    "eightquery": 0.08,
    "linevalue": 0.04,
    "single_2": 0.04,
}
PARTS = {
    "plus_minus": Part({"plus_minus": 1.0}, length=130, batch=8),
    "sums": Part({"sums": 1.0}, length=130, batch=8),
    "problems": Part({"problem": 1.0}, length=0, batch=16),
    "facts": Part(DOCUMENTS, length=256, batch=6, stretch=0.2, span=4096),
    "needles": Part(ALL, 320, 6, stretch=0.5, span=32768),
}


def _parts(**shares: float) -> tuple[Part, ...]:
    """Parts by name, with these shares."""
    return tuple(replace(PARTS[name], share=share) for name, share in shares.items())


STAGES = [
    Stage(500, (2e-3, 2e-3), (Part(KEYS, 224, 12, stretch=0.2, span=4096),), CHECKS),
    Stage(1500, (2e-3, 1.5e-3), (Part(ALL, 288, 10, stretch=0.4, span=8192),), CHECKS),
    Stage(864, (1.5e-3, 9.24e-04), (Part(ALL, 384, 8, stretch=0.6, span=32768),), CHECKS),
    Stage(2000, (1.5e-3, 1e-3), (Part(SEVERAL, 288, 10, stretch=0.4, span=16384),), CHECKS),
    Stage(1000, (1e-3, 1e-4), (Part(ALL, 512, 6, stretch=0.6, span=32768),), CHECKS),
    Stage(500, (3e-4, 5e-5), (Part(ALL, 1024, 3, stretch=0.5, span=32768),), CHECKS),
    Stage(300, (6e-4, 5e-5), (Part(LONG, 320, 6, stretch=0.8, span=32768, ghosts=2048),), CHECKS),
    # from here on also sums, word problems and documents: each skill first for itself, at short length
    Stage(900, (1.5e-3, 1.5e-3), _parts(plus_minus=0.9, needles=0.1), SKILLS),
    Stage(1053, (1.5e-3, 1.3e-3), _parts(sums=0.85, needles=0.15), SKILLS),
    Stage(3000, (1.2e-3, 7e-4), _parts(problems=0.4, sums=0.15, facts=0.2, needles=0.25), SKILLS),
    Stage(2279, (1e-3, 7e-4), _parts(problems=0.4, sums=0.25, facts=0.15, needles=0.2), SKILLS),
    Stage(
        1500,
        (7e-4, 4e-4),
        (
            *_parts(problems=0.25, sums=0.1),
            Part(DOCUMENTS, 512, 4, share=0.15, stretch=0.5, span=8192),
            Part(SEVERAL, 512, 4, share=0.3, stretch=0.7, span=32768),
            Part(LONG, 1024, 2, share=0.2, stretch=0.5, span=32768),
        ),
        LONGER,
    ),
    Stage(
        1800,
        (4e-4, 3e-5),
        (
            *_parts(problems=0.27, sums=0.05),
            Part(DOCUMENTS, 768, 3, share=0.15, stretch=0.6, span=8192),
            Part(SEVERAL, 1024, 2, share=0.25, stretch=0.7, span=32768),
            Part(LONG, 1536, 1, share=0.13, stretch=0.5, span=32768),
            Part(LONG | DOCUMENTS, 320, 4, share=0.15, stretch=0.9, span=32768, ghosts=2048),
        ),
        LONGER,
    ),
    # from here on texts of the length that is measured, with as many facts as the measured ones have
    Stage(
        1138,
        (1e-3, 9.24e-4),
        (
            *_parts(problems=0.15, sums=0.05, needles=0.05),
            Part(LISTS, 1024, 3, share=0.3),
            Part(CATALOGUES, 1024, 3, share=0.25),
            Part(FULL, 512, 6, share=0.2, stretch=0.3, span=32768),
        ),
        FAR,
    ),
    Stage(
        1162,
        (9e-4, 6e-4),
        (
            *_parts(problems=0.2, sums=0.03),
            Part(LISTS, 2048, 2, share=0.12),
            Part(CATALOGUES, 2048, 2, share=0.12),
            Part(DOCUMENTS, 1536, 3, share=0.13),
            Part(FULL, 2048, 2, share=0.28),
            Part(ALL, 512, 4, share=0.12, stretch=0.4, span=32768),
        ),
        FAR,
    ),
    Stage(
        1000,
        (6e-4, 2e-5),
        (
            *_parts(problems=0.18, sums=0.02),
            Part(LISTS, 4096, 1, share=0.12),
            Part(CATALOGUES, 4096, 1, share=0.1),
            Part(DOCUMENTS, 3072, 2, share=0.12),
            Part(FULL, 4096, 1, share=0.34),
            Part(ALL, 512, 4, share=0.06, stretch=0.4, span=32768),
            Part(LONG | DOCUMENTS, 320, 4, share=0.06, stretch=0.9, span=32768, ghosts=2048),
        ),
        FAR,
    ),
    # what was weakest at 4k, and word problems, once more
    Stage(
        600,
        (4e-4, 1e-5),
        (
            *_parts(problems=0.33, sums=0.03),
            Part(SEVERAL, 4096, 1, share=0.42),
            Part(LISTS | DOCUMENTS, 4096, 1, share=0.1),
            Part(SEVERAL, 512, 4, share=0.08, stretch=0.4, span=32768),
            Part(LONG | DOCUMENTS, 320, 4, share=0.04, stretch=0.9, span=32768, ghosts=2048),
        ),
        FAR,
    ),
    # once more what is far: few needles among as many keys as texts of 16k to 64k tokens have
    Stage(
        700,
        (4e-4, 1e-5),
        (
            *_parts(problems=0.2, sums=0.02),
            Part(SEVERAL, 4096, 1, share=0.2),
            Part(LISTS | DOCUMENTS, 4096, 1, share=0.08),
            Part(LONG, 320, 4, share=0.25, stretch=0.9, span=65536, ghosts=2048),
            Part(NOISE, 512, 2, share=0.25, stretch=1.0, span=65536, ghosts=4096),
        ),
        FAR,
    ),
    # what 32k lacked: at that distance the places of the digits blurred
    Stage(
        900,
        (4e-4, 1e-5),
        (
            *_parts(problems=0.22, sums=0.02),
            Part(SEVERAL, 4096, 1, share=0.17),
            Part(LISTS | DOCUMENTS, 4096, 1, share=0.08),
            Part(LONG, 320, 4, share=0.11, stretch=0.9, span=65536, ghosts=2048),
            Part(NOISE, 384, 4, share=0.4, stretch=1.0, least=12288, span=98304, ghosts=2048, whole=0.8),
        ),
        FAR,
    ),
]
