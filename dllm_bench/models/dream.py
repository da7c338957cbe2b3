"""Dream (HKU NLP): config fields and tensor names of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm_bench.errors import UserError
from dllm_bench.models.architecture import Architecture, LayerNames, Names, end_ids, require
from dllm_bench.models.config import NetworkConfig

__all__ = ["Dream"]


class Dream(Architecture):
    """Dream-7B and its descendants: Qwen2.5's shape, qkv biases, logits shifted by one (arXiv 2508.15487)."""

    model_types = ("dream",)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> NetworkConfig:
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json: hidden_act {config['hidden_act']!r} is not supported (only 'silu')")
        for field in ("rope_scaling", "use_sliding_window"):
            if config.get(field):
                raise UserError(f"config.json: {field} {config[field]!r} is not supported (only null)")
        heads, width = require(config, "num_attention_heads"), require(config, "hidden_size")
        if width % heads:
            raise UserError(f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}")
        vocab = require(config, "vocab_size")
        return NetworkConfig(
            family="dream",
            hidden_size=width,
            num_layers=require(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=width // heads,
            ffn_size=require(config, "intermediate_size"),
            vocab_size=vocab,
            embedding_size=vocab,
            norm_eps=float(require(config, "rms_norm_eps")),
            rope_theta=float(require(config, "rope_theta")),
            max_positions=require(config, "max_position_embeddings"),
            qkv_bias=True,
            tied=bool(config.get("tie_word_embeddings", False)),
            shift=True,
            rope_cast=True,
            mask_id=require(config, "mask_token_id"),
            eos_ids=end_ids(config),
            pad_id=config.get("pad_token_id"),
            bos_id=config.get("bos_token_id"),
        )

    @classmethod
    def names(cls, config: NetworkConfig) -> Names:
        made = []
        for i in range(config.num_layers):
            b = f"model.layers.{i}."
            made.append(
                LayerNames(
                    attn_norm=f"{b}input_layernorm.weight",
                    q=f"{b}self_attn.q_proj.weight",
                    k=f"{b}self_attn.k_proj.weight",
                    v=f"{b}self_attn.v_proj.weight",
                    attn_out=f"{b}self_attn.o_proj.weight",
                    ffn_norm=f"{b}post_attention_layernorm.weight",
                    gate=f"{b}mlp.gate_proj.weight",
                    up=f"{b}mlp.up_proj.weight",
                    down=f"{b}mlp.down_proj.weight",
                    q_bias=f"{b}self_attn.q_proj.bias",
                    k_bias=f"{b}self_attn.k_proj.bias",
                    v_bias=f"{b}self_attn.v_proj.bias",
                )
            )
        return Names("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", tuple(made))
