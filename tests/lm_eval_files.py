"""lm-eval task files with data of their own, and a small model that answers at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_text import LLADA_SPECIALS, byte_level
from tiny_checkpoints import llada_config, write

from dllm_bench.lm_eval_requests import lm_eval_folder

# what GSM8K's rows have: a question, and a solution that ends in #### and the number
GSM_TRAIN = [
    {"question": f"Ann has {n} boxes of {n + 1} pens. How many pens?", "answer": f"{n}*{n + 1}.\n#### {n * (n + 1)}"}
    for n in range(2, 8)
]
GSM_TEST = [
    {"question": "A robe takes 2 bolts of blue and half of white.\r\nHow many bolts?", "answer": "2+1=3.\n#### 3"},
    {"question": "Köln {sells} 1,000 cards “each day”: how many in 2 days? ☃", "answer": "2*1,000.\n#### 2,000"},
    {"question": "A robe takes 2 bolts of blue and half of white.\r\nHow many bolts?", "answer": "2+1=3.\n#### 3"},
]
_NEEDLE = "One of the special magic numbers for {0} is: {1}.\nWhat is the special magic number for {0}?"
# the embedded model finds all of these; the third has another gold answer
NEEDLES = [
    {"key": key, "question": _NEEDLE.format(key, number), "answer": f"#### {gold}"}
    for key, number, gold in [("calm-river", 4718253, 4718253), ("old-tree", 7352946, 7352946), ("red-sky", 1928374, 1)]
]
COLOURS = [
    {"question": "The sky is", "choices": ["blue", "a kind of bread"], "gold": 0},
    {"question": "Grass is", "choices": ["made of iron", "green"], "gold": 1},
]

_TASKS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "gsm_local": (GSM_TEST, "include: {gsm8k}\nnum_fewshot: 2\n"),
    "needles": (
        NEEDLES,
        "include: {gsm8k}\nnum_fewshot: 0\ndoc_to_text: '{{{{question}}}}'\n"
        "gen_prefix: 'The special magic number for {{{{key}}}} mentioned in the provided text is'\n",
    ),
    "colours": (
        COLOURS,
        "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: acc_norm\n    aggregation: mean\n    higher_is_better: true\n",
    ),
    "cloze": (
        COLOURS,
        "output_type: loglikelihood\ndoc_to_text: question\ndoc_to_target: '{{{{choices[gold]}}}}'\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n",
    ),
    "whole": (
        COLOURS,
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: question\n"
        "metric_list:\n  - metric: byte_perplexity\n",
    ),
    "votes": (GSM_TEST, "include: {gsm8k}\nnum_fewshot: 0\nrepeats: 4\n"),
    "code": (GSM_TEST, "include: {gsm8k}\nnum_fewshot: 0\nunsafe_code: true\n"),
    "corpus": (
        GSM_TEST,
        "output_type: generate_until\ndoc_to_text: question\ndoc_to_target: answer\nnum_fewshot: 0\n"
        "metric_list:\n  - metric: chrf\n    aggregation: chrf\n    higher_is_better: true\n",
    ),
}


def write_tasks(folder: Path) -> Path:
    """Writes each task with its data: the real GSM8K definition of lm-eval with other documents, and others."""
    gsm8k = lm_eval_folder() / "tasks" / "gsm8k" / "gsm8k.yaml"
    data = folder / "data"
    data.mkdir(parents=True)
    write_lines(data / "train.jsonl", GSM_TRAIN)
    for name, (docs, text) in _TASKS.items():
        write_lines(data / f"{name}.jsonl", docs)
        files = {"test": str(data / f"{name}.jsonl"), "train": str(data / "train.jsonl")}
        used = files if "gsm8k" in text else {"test": files["test"]}
        settings = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": used}}
        lines = [f"task: {name}", *(f"{key}: {json.dumps(value)}" for key, value in settings.items())]
        lines += [] if "gsm8k" in text else ["test_split: test", "num_fewshot: 0", "metadata: {version: 1}"]
        (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n" + text.format(gsm8k=gsm8k), encoding="utf-8")
    (folder / "family.yaml").write_text("group: family\ntask:\n  - needles\n  - colours\n")
    return folder


def write_lines(path: Path, docs: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")


def write_model(folder: Path) -> Path:
    """Random weights over a token per byte; the last id is the mask."""
    size = 256 + len(LLADA_SPECIALS)
    config = llada_config(
        vocab_size=size, embedding_size=size, mask_token_id=size - 1, eos_token_id=257, pad_token_id=257,
        max_sequence_length=2048,
    )  # fmt: skip
    write(folder, config)
    byte_level(LLADA_SPECIALS).save(str(folder / "tokenizer.json"))
    return folder
