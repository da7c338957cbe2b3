"""LLaDA (GSAI-ML): config fields and tensor names of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm_bench.errors import UserError
from dllm_bench.models.architecture import Architecture, LayerNames, Names, end_ids, require
from dllm_bench.models.config import NetworkConfig

__all__ = ["Llada"]

# Variants of the OLMo-derived config that no released LLaDA uses; the network does not compute them.
_FIXED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu", "swiglu"),
    "rope": (True,),
    "alibi": (False, None),
    "attention_layer_norm": (False, None),
    "include_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "scale_logits": (False, None),
    "input_emb_norm": (False, None),
    "block_group_size": (1, None),
}


class Llada(Architecture):
    """LLaDA-8B, LLaDA-1.5 and everything trained in their architecture (arXiv 2502.09992)."""

    model_types = ("llada",)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> NetworkConfig:
        for field, allowed in _FIXED.items():
            if field in config and config[field] not in allowed:
                raise UserError(f"config.json: {field} {config[field]!r} is not supported (only {allowed[0]!r})")
        heads, width = require(config, "n_heads"), require(config, "d_model")
        if width % heads:
            raise UserError(f"config.json: d_model {width} is not a multiple of n_heads {heads}")
        kv_heads = config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads)
        vocab = require(config, "vocab_size")
        return NetworkConfig(
            family="llada",
            hidden_size=width,
            num_layers=require(config, "n_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width // heads,
            ffn_size=config.get("mlp_hidden_size") or int(config.get("mlp_ratio", 4) * width),
            vocab_size=vocab,
            embedding_size=config.get("embedding_size") or vocab,
            norm_eps=float(require(config, "rms_norm_eps")),
            rope_theta=float(require(config, "rope_theta")),
            max_positions=require(config, "max_sequence_length"),
            qkv_bias=bool(config.get("include_qkv_bias")),
            tied=bool(require(config, "weight_tying")),
            shift=False,
            rope_cast=not config.get("rope_full_precision", True),
            mask_id=require(config, "mask_token_id"),
            eos_ids=end_ids(config),
            pad_id=config.get("pad_token_id"),
            bos_id=config.get("bos_token_id"),
        )

    @classmethod
    def names(cls, config: NetworkConfig) -> Names:
        root = "model.transformer."
        return Names(f"{root}wte.weight", f"{root}ln_f.weight", f"{root}ff_out.weight", _layers(root, config))


def _layers(root: str, config: NetworkConfig) -> tuple[LayerNames, ...]:
    made = []
    for i in range(config.num_layers):
        b = f"{root}blocks.{i}."
        bias = {f"{n}_bias": f"{b}{n}_proj.bias" for n in "qkv"} if config.qkv_bias else {}
        made.append(
            LayerNames(
                attn_norm=f"{b}attn_norm.weight",
                q=f"{b}q_proj.weight",
                k=f"{b}k_proj.weight",
                v=f"{b}v_proj.weight",
                attn_out=f"{b}attn_out.weight",
                ffn_norm=f"{b}ff_norm.weight",
                gate=f"{b}ff_proj.weight",
                up=f"{b}up_proj.weight",
                down=f"{b}ff_out.weight",
                **bias,
            )
        )
    return tuple(made)
