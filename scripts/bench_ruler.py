"""Measures how fast RULER samples are made, against lm-eval's generator, with one tokenizer, in one run.

    python scripts/bench_ruler.py [--subset single_1] [--ctx 32768] [--samples 500]

Both get the same tokenizer object (a byte-level BPE trained here on the built-in text) and the same word list.
lm-eval's import time is left out, and its download of NLTK data is switched off. Needs lm-eval and nltk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from dllm_bench.tasks.prose import built_in_sentences
from dllm_bench.tasks.ruler import RulerNiah
from dllm_bench.tasks.ruler_prompt import NOISE, SETTINGS
from dllm_bench.tasks.words import word_pairs


def train_tokenizer(vocabulary: int) -> Any:
    """A fast Hugging Face tokenizer: byte-level BPE in GPT-2's style."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*built_in_sentences(), NOISE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class PlainCodec:
    """The tokenizer without a chat template, as lm-eval uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text).input_ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        return self.encode(user + answer_prefix)

    def identity(self) -> str:
        return "bench"


def lm_eval_generator() -> Any:
    """lm-eval's module, imported without its slow parts: no download, and the word list taken from here."""
    import nltk

    nltk.download = lambda *args, **kwargs: False
    words: Any = types.ModuleType("wonderwords")
    words.RandomWord = lambda: types.SimpleNamespace(_categories={"nouns": [], "adjectives": [], "verbs": []})
    sys.modules["wonderwords"] = words
    with contextlib.redirect_stdout(io.StringIO()):  # it says that the download was done
        from lm_eval.tasks.ruler import niah_utils, prepare_niah

    prepare_niah.WORDS = word_pairs()
    prepare_niah.tqdm = lambda items, **kwargs: items
    return types.SimpleNamespace(samples=prepare_niah.generate_samples, template=niah_utils.TEMPLATE)


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def run_lm_eval(lm_eval: Any, tokenizer: Any, subset: str, ctx: int, samples: int) -> Any:
    setting = SETTINGS[subset]
    return lm_eval.samples(
        {"noise": NOISE, "needles": setting.needle("{key}", "{value}")}[setting.haystack],
        tokenizer,
        max_seq_length=ctx,
        type_haystack={"noise": "repeat", "needles": "needle"}[setting.haystack],
        type_needle_k=setting.key,
        type_needle_v=setting.value,
        template=lm_eval.template,
        num_samples=samples,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of RULER samples, here and in lm-eval")
    parser.add_argument("--subset", default="single_1", choices=["single_1", "multikey_2", "multikey_3"])
    parser.add_argument("--ctx", type=int, default=32768)
    parser.add_argument("--samples", type=int, default=500)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    lm_eval = lm_eval_generator()
    tokenizer = train_tokenizer(8000)
    tokenizer("warm")

    def ours() -> list[int]:
        task = RulerNiah(PlainCodec(tokenizer))
        made = (task.sample(asked.subset, i, ctx=asked.ctx, gen_length=128, seed=0) for i in range(asked.samples))
        return [sample.actual_ctx for sample in made]

    wall, cpu, lengths = timed(ours)
    print(f"dllm-bench  {wall:8.2f} s wall  {cpu:8.2f} s CPU  fill {sum(lengths) / len(lengths) / asked.ctx:.4f}")
    theirs_wall, theirs_cpu, made = timed(
        lambda: run_lm_eval(lm_eval, tokenizer, asked.subset, asked.ctx, asked.samples)
    )
    fill = sum(one["length"] for one in made) / len(made) / asked.ctx
    print(f"lm-eval     {theirs_wall:8.2f} s wall  {theirs_cpu:8.2f} s CPU  fill {fill:.4f}")
    print(
        f"{asked.subset}, {asked.samples} samples at {asked.ctx}: {theirs_wall / wall:.1f} times faster by the clock, "
        f"{theirs_cpu / cpu:.1f} times in CPU time"
    )


if __name__ == "__main__":
    main()
