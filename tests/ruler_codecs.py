"""Codecs for the RULER tests: two made of regular expressions and a small byte-level BPE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from dllm_bench.tasks.draws import private_random
from dllm_bench.tasks.prose import built_in_sentences
from dllm_bench.tasks.ruler_prompt import NOISE, SETTINGS, draw_needles

TEMPLATE = ("<user>\n", "</user>\n<assistant>\n")


class RegexCodec:
    """One id per match; the matches cover the whole text, so decoding is exact."""

    def __init__(self, pattern: str, template: tuple[str, str] = ("", "")) -> None:
        self._find = re.compile(pattern).findall
        self._template = template
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []
        self.encoded_characters = 0

    def encode(self, text: str) -> list[int]:
        self.encoded_characters += len(text)
        ids = []
        for one in self._find(text):
            if one not in self._ids:
                self._ids[one] = len(self._texts)
                self._texts.append(one)
            ids.append(self._ids[one])
        assert sum(len(self._texts[i]) for i in ids) == len(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        head, tail = self._template if template else ("", "")
        return self.encode(head + user + tail + answer_prefix)

    def identity(self) -> str:
        return "regex"


def leading_space_codec(template: tuple[str, str] = ("", "")) -> RegexCodec:
    """The golden samples' counts, with white space kept before each match, newlines too: pieces do not add up here."""
    return RegexCodec(r"\s*(?:[A-Za-z]+|[0-9]|[^\sA-Za-z0-9])|\s+", template)


def word_codec(template: tuple[str, str] = ("", "")) -> RegexCodec:
    """Like GPT's pre-tokenizer: a space goes with the word behind it, a newline with what stands before it."""
    return RegexCodec(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s", template)


class BpeCodec:
    """A byte-level BPE of 2,000 tokens."""

    def __init__(self, template: tuple[str, str] = ("", "")) -> None:
        self._tokenizer = _bpe()
        self._template = template

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        head, tail = self._template if template else ("", "")
        return self.encode(head + user + tail + answer_prefix)

    def identity(self) -> str:
        return "bpe"


@cache
def _bpe():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    needles = draw_needles(SETTINGS["multikey_1"], private_random("training")).sentences
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*built_in_sentences()[:3000], NOISE, *needles], trainer)
    return tokenizer
