"""Writes the tiny model as a checkpoint folder: official names, bfloat16, tokenizer, how it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_stages import BLOCK, CONFIG, GEN, network_config
from tiny_text import BOS, EOS, MASK, SPECIALS
from tokenizers import Tokenizer
from torch import Tensor

from dllm_bench.models.llada import Llada
from dllm_bench.models.network import Weights

FOLDER = Path(__file__).resolve().parent.parent / "dllm_bench" / "models" / "tiny"


def named_tensors(weights: Weights) -> dict[str, Tensor]:
    """The weights under LLaDA's tensor names, in bfloat16."""
    config = network_config()
    names, width = Llada.names(config), config.hidden_size
    out = {names.embed: weights.embed, names.final_norm: weights.final_norm, names.head: weights.head}
    for name, layer in zip(names.layers, weights.layers, strict=True):
        kv = config.num_kv_heads * config.head_dim
        q, k, v = layer.qkv.split([width, kv, kv])
        gate, up = layer.gate_up.chunk(2)
        out |= {name.attn_norm: layer.attn_norm, name.q: q, name.k: k, name.v: v, name.attn_out: layer.attn_out}
        out |= {name.ffn_norm: layer.ffn_norm, name.gate: gate, name.up: up, name.down: layer.down}
    return {n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in out.items()}


def export(weights: Weights, tokenizer: Tokenizer, training: dict[str, Any], folder: Path = FOLDER) -> None:
    """`training`: facts of the run, for the card."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named_tensors(weights), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", _tokenizer_config()),
        ("training.json", training),
        ("dllm_bench.json", {"chat_template": "llada", "decode": {"gen_length": GEN, "block_length": BLOCK}}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer_config() -> dict[str, Any]:
    added = {
        str(i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, t in enumerate(SPECIALS)
    }
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [t for t in SPECIALS if t not in (BOS, EOS, MASK)],
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "mask_token": MASK,
        "model_max_length": CONFIG["max_sequence_length"],
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
