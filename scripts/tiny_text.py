"""Words, sentences and the tokenizer of the tiny model: all text is made here or comes from two MIT word lists."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
BOS, EOS, MASK, HEADER, HEADER_END, EOT = SPECIALS
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORDS_DIR = Path(__file__).resolve().parent.parent / "dllm_bench" / "tasks" / "data"

# verbs, then common words: what essays are made of besides RULER's own word lists
_VERBS, _FUNCTION = (
    part.split() for part in (Path(__file__).with_name("tiny_words.txt")).read_text(encoding="utf-8").split("\n\n")
)
# Frames of an essay; {n} noun, {a} adjective, {v} verb, {f} common word.
_FRAMES = (
    "The {a} {n} is not the same as the {n}.",
    "Every {n} will {v} when the {n} is {a}.",
    "I used to {v} a {n}, but the {n} was too {a}.",
    "If you {v} the {n}, you can {v} the {n} as well.",
    "Most people think that a {n} must be {a}.",
    "What makes a {n} {a}? It is usually the {n}.",
    "There is a {a} way to {v} it: {v} the {n} first.",
    "They had to {v} for years before the {n} became {a}.",
    "It's hard to {v} a {n} without a {n}.",
    "One of the {a} things about the {n} is that you don't have to {v} it.",
    "In {y}, the {n} had {d} {a} members.",
    "A {n} that can {v} is more {a} than a {n} that can't.",
    'He said: "{v} the {n}, and the {a} {n} will follow."',
    "And yet the {n} of the {n} was {a}, or so we thought.",
    "Here the {n} and the {n} go back to the {a} {n}.",
    "You could {v} {d} times and still not {v} the {n} ({a} as it is).",
    "So the question for us is whether to {v} or to {v}.",
    "She wrote about {a} {n}, {a} {n} and the number of ways to {v}.",
)


@dataclass(frozen=True)
class Words:
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]


def load_words(folder: Path = WORDS_DIR) -> Words:
    """The two lists of the wonderwords package that RULER's keys are made of, one word a line."""

    def read(name: str) -> tuple[str, ...]:
        text = (folder / name).read_text(encoding="utf-8")
        return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))

    return Words(read("wonderwords_adjectives.txt"), read("wonderwords_nouns.txt"))


def held_out(key: str) -> bool:
    """A tenth of all keys, chosen by hash, is for measuring only: training never draws one."""
    return zlib.crc32(key.encode()) % 10 == 0


def draw_key(rng: random.Random, words: Words, evaluation: bool) -> str:
    while True:
        key = f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}"
        if held_out(key) == evaluation:
            return key


def draw_number(rng: random.Random, digits: int = 7) -> str:
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def sentence(rng: random.Random, words: Words) -> str:
    """One sentence of a made-up essay; one in four is a loose string of common words."""
    if rng.random() < 0.25:
        count = rng.randint(4, 14)
        drawn = [rng.choice(_FUNCTION) if rng.random() < 0.75 else rng.choice(words.nouns) for _ in range(count)]
        text = " ".join(drawn)
        return text[0].upper() + text[1:] + rng.choice(".....?!")
    out = []
    for piece in rng.choice(_FRAMES).split("{"):
        slot, closed, rest = piece.partition("}")
        out.append(_fill(slot, rng, words) + rest if closed else piece)
    return "".join(out)


def _fill(slot: str, rng: random.Random, words: Words) -> str:
    if slot == "n":
        return rng.choice(words.nouns)
    if slot == "a":
        return rng.choice(words.adjectives)
    if slot == "v":
        return rng.choice(_VERBS)
    return str(rng.randint(1900, 2030) if slot == "y" else rng.randint(2, 500))


def train_tokenizer(words: Words, templates: list[str], vocab: int, seed: int) -> Tokenizer:
    """Byte-level BPE with single digits, trained on keys, templates and made-up sentences."""
    rng = random.Random(f"tokenizer-{seed}")
    texts = [draw_key(rng, words, False) for _ in range(60_000)]
    texts += [f" {draw_key(rng, words, False)}" for _ in range(30_000)]
    texts += [sentence(rng, words) for _ in range(8_000)]
    texts += [f" {w}" for w in _FUNCTION] * 50 + templates * 2_000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
