"""Small random checkpoints (official tensor names and config fields), and the plain Transformer they stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench import load_model
from dllm_bench.models.hub import Model

__all__ = ["dream_config", "llada_config", "loaded", "naive_logits", "random_tensors", "write", "write_shards"]


def llada_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 48,
        "mlp_ratio": 4,
        "activation_type": "silu",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "rope": True,
        "rope_theta": 10000.0,
        "rope_full_precision": True,
        "alibi": False,
        "max_sequence_length": 64,
        "vocab_size": 50,
        "embedding_size": 50,
        "weight_tying": False,
        "scale_logits": False,
        "mask_token_id": 49,
        "eos_token_id": 48,
        "pad_token_id": 48,
    }
    return {**config, **changes}


def dream_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "Dream",
        "architectures": ["DreamModel"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 64,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "mask_token_id": 49,
        "eos_token_id": 48,
        "pad_token_id": 48,
        "bos_token_id": 47,
    }
    return {**config, **changes}


# our short name of each tensor of a block -> its official name
_BLOCK = {
    "llada": {
        "norm1": "attn_norm",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "norm2": "ff_norm",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
    },
    "dream": {
        "norm1": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
}
_TOP = {
    "llada": (
        "model.transformer.wte",
        "model.transformer.blocks.{}.",
        "model.transformer.ln_f",
        "model.transformer.ff_out",
    ),
    "dream": ("model.embed_tokens", "model.layers.{}.", "model.norm", "lm_head"),
}


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """The numbers of either family under one name each."""
    if config["model_type"] == "llada":
        keys = ("d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_hidden_size", "embedding_size", "weight_tying")
        bias = config["include_qkv_bias"]
    else:
        keys = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "tie_word_embeddings",
        )
        bias = True
    names = ("width", "layers", "heads", "kv", "ffn", "rows", "tied")
    found = dict(zip(names, (config[k] for k in keys), strict=True))
    return {**found, "bias": bias, "d": found["width"] // found["heads"], "family": config["model_type"].lower()}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    f, g = _facts(config), torch.Generator().manual_seed(seed)

    def made(*shape: int, scale: float = 0.2, shift: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=g) * scale + shift

    embed, block, norm, head = _TOP[f["family"]]
    w, q, kv = f["width"], f["heads"] * f["d"], f["kv"] * f["d"]
    out = {f"{embed}.weight": made(f["rows"], w, scale=1.0), f"{norm}.weight": made(w, shift=1.0)}
    if not f["tied"]:
        out[f"{head}.weight"] = made(f["rows"], w)
    shapes = {"q": (q, w), "k": (kv, w), "v": (kv, w), "o": (w, q), "gate": (f["ffn"], w), "up": (f["ffn"], w)}
    shapes["down"] = (w, f["ffn"])
    for i in range(f["layers"]):
        for short, official in _BLOCK[f["family"]].items():
            name = block.format(i) + official
            out[f"{name}.weight"] = made(*shapes[short]) if short in shapes else made(w, shift=1.0)
            if f["bias"] and short in "qkv":
                out[f"{name}.bias"] = made(shapes[short][0], scale=0.5)
    return out


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors if tensors is not None else random_tensors(config), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    table: dict[str, str] = {}
    for n in range(shards):
        part = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % shards == n}
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def loaded(folder: Path, dtype: str = "float32") -> Model:
    return load_model(str(folder), dtype=dtype, device="cpu")


def naive_logits(config: dict[str, Any], tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [N, rows] of a plain Transformer in float64: one head and one position at a time, no shift."""
    f = _facts(config)
    embed, block, norm, head = _TOP[f["family"]]
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * t[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(()))

    x = t[f"{embed}.weight"][ids]
    for i in range(f["layers"]):
        n = {short: block.format(i) + official for short, official in _BLOCK[f["family"]].items()}
        h = rms(x, n["norm1"])
        x = x + _attention(f, config["rope_theta"], *(linear(h, n[s]) for s in "qkv")) @ t[f"{n['o']}.weight"].T
        h = rms(x, n["norm2"])
        gate = linear(h, n["gate"])
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, n["up"]), n["down"])
    return rms(x, norm) @ t[f"{embed if f['tied'] else head}.weight"].T


def _attention(f: dict[str, Any], theta: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    d, out = f["d"], []
    for h in range(f["heads"]):
        shared = h // (f["heads"] // f["kv"])  # key heads are repeated consecutively
        rq = torch.stack([_turn(row, p, theta) for p, row in enumerate(q[:, h * d : h * d + d])])
        rk = torch.stack([_turn(row, p, theta) for p, row in enumerate(k[:, shared * d : shared * d + d])])
        weights = torch.exp(rq @ rk.T / math.sqrt(d))
        out.append(weights / weights.sum(-1, keepdim=True) @ v[:, shared * d : shared * d + d])
    return torch.cat(out, dim=-1)


def _turn(row: Tensor, position: int, theta: float) -> Tensor:
    half, turned = len(row) // 2, row.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(row))
        c, s = math.cos(angle), math.sin(angle)
        turned[j] = row[j] * c - row[j + half] * s
        turned[j + half] = row[j + half] * c + row[j] * s
    return turned
