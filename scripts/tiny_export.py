"""Writes the tiny model as a checkpoint folder: official names, bfloat16, tokenizer, and its card."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_stages import BLOCK, CONFIG, GEN, STAGES, network_config
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


def export(weights: Weights, tokenizer: Tokenizer, folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named_tensors(weights), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", _tokenizer_config()),
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


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, in percent."""
    z, p = 1.96, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return 100 * (middle - half), 100 * (middle + half)


def card(run: dict[str, Any], table: list[dict[str, Any]], parameters: int) -> str:
    """The model card."""
    longest, span = (max(getattr(p, name) for s in STAGES for p in s.parts) for name in ("length", "span"))
    paragraphs = [
        "# dllm-bench tiny",
        f"A masked-diffusion Transformer in LLaDA's architecture with {parameters / 1e6:.2f} M parameters "
        f"({CONFIG['n_layers']} layers, width {CONFIG['d_model']}, {CONFIG['n_heads']} heads, vocabulary "
        f"{CONFIG['vocab_size']}, `rope_theta` {CONFIG['rope_theta']:.0e}). It retrieves numbers that are hidden in a "
        "text, in RULER's wording, so that accuracy differences between cache methods are real on a laptop. It is no "
        "language model: it cannot chat, and knows no other task.",
        "Trained by this repository on text it makes itself; no outside text or weights went into it. The word lists "
        "are those of the wonderwords package (MIT). Weights and tokenizer are under the licence of this repository.",
        "## Training",
        f"```\n{run['command']}\n```",
        f"Seed {run['seed']}, {run['step']} steps, {run['tokens'] / 1e6:.1f} M tokens, {run['seconds'] / 60:.0f} min "
        f"of training with {run['threads']} thread(s) on {run['machine']}. The model starts from a hand-made copying "
        f"circuit plus noise (`scripts/tiny_init.py`). Sequences have up to {longest} tokens; many stand for texts of "
        f"up to {span} tokens, by skipped positions and by haystack tokens that count in attention as many copies of "
        "themselves, or by keys that stand at the positions of such copies. The published weights are a moving average "
        "of the training's, in bfloat16.",
        "How masks and skips are drawn was refined while this run was under way, between its stages: a fresh run of "
        "the script goes the same way but does not give the same weights.",
        "## Measured accuracy",
        "Held-out samples (their keys, a tenth of all chosen by hash, never occur in training); generation of "
        f"{GEN} tokens in blocks of {BLOCK}, no cache, float32 arithmetic. `exact`: the answer is right to the last "
        "character, with the 95 % Wilson interval; `values`: share of the values found; `passes`: until the answer's "
        "end.",
        _table(table),
        "Several values are answered in the order in which they stand in the text. Accuracy falls with context because "
        "attention spreads over more haystack; that is what the harness measures methods against. Essay haystacks are "
        "made-up sentences.",
    ]
    wrapped = [p if p[0] in "`|" else textwrap.fill(p, 120, break_long_words=False) for p in paragraphs]
    return "\n\n".join(wrapped) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | context | decoding | n | exact | 95 % | values | passes |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        low, high = interval(r["right"], r["n"])
        lines.append(
            f"| {r['kind']} | {r['length']} | {r['decoding']} | {r['n']} | {100 * r['right'] / r['n']:.0f} % "
            f"| {low:.0f}–{high:.0f} | {100 * r['values']:.0f} % | {r['passes']:.1f} |"
        )
    return "\n".join(lines)
