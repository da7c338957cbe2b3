"""lm-eval's own RULER samples for a global seed: the same random stream, the same coarse sizing, the same text.

For comparisons with published numbers only. lm-eval 0.4.13 (`lm_eval/tasks/ruler/prepare_niah.py`) draws from Python's
global generator, sizes with random draws too, and counts neither chat template nor answer prefix: its samples depend
on which lengths and tasks came before, fill the context badly, and may exceed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dllm_bench.errors import UserError
from dllm_bench.tasks.ruler_prompt import DEPTHS, NOISE, SETTINGS, Setting, draw_standard

__all__ = ["LmEvalRun", "LmEvalSample", "LmEvalSource", "lm_eval_samples"]

_NEEDLE_ORDER_SEED = 42


@dataclass(frozen=True)
class LmEvalRun:
    """One length of one subset, as lm-eval generates them in a row."""

    subset: str
    max_length: int
    samples: int = 500
    gen_length: int = 128


@dataclass(frozen=True)
class LmEvalSample:
    """One document of lm-eval: its text fields, and the asked needles' sentences in the order of `outputs`."""

    index: int
    input: str
    outputs: tuple[str, ...]
    length: int
    gen_prefix: str
    needles: tuple[str, ...]


@dataclass(frozen=True)
class LmEvalSource:
    """What the samples depend on besides the seed.

    Attributes:
        count: tokens of a text, with the special tokens that the tokenizer adds by itself.
        words: the essay text, split at single spaces.
        split: sentence splitter; lm-eval's is NLTK's punkt.
    """

    count: Callable[[str], int]
    words: Sequence[str]
    split: Callable[[str], list[str]]


def lm_eval_samples(runs: Sequence[LmEvalRun], source: LmEvalSource, *, seed: int) -> list[list[LmEvalSample]]:
    """All samples of the runs, in their order, from one generator seeded once. Samples that never fit are left out."""
    rng = random.Random(seed)
    made = []
    for run in runs:
        stream = sample_stream(run, source, rng)
        made.append([sample for _, sample in zip(range(run.samples), stream, strict=False) if sample])
    return made


def sample_stream(run: LmEvalRun, source: LmEvalSource, rng: random.Random) -> Iterator[LmEvalSample | None]:
    """Samples of one run without end; None for one that lm-eval skips because it does not fit.

    Nothing is drawn before the first sample is asked for. Raises UserError where the tokenizer gives no tokens.
    """
    setting = SETTINGS[run.subset]
    split = lru_cache(1024)(source.split)
    source = LmEvalSource(source.count, source.words, split)
    step = 500 if setting.haystack == "essay" else 25 if run.max_length >= 4096 else 5
    units = _sized(setting, run, source, rng, step)
    index = 0
    while True:
        yield _fitting(setting, run, source, rng, index, range(units, 0, -step))
        index += 1


def _sized(setting: Setting, run: LmEvalRun, source: LmEvalSource, rng: random.Random, step: int) -> int:
    """Haystack units (words or lines): grown step by step until a drawn sample is too long, then one step back."""
    needles = setting.keys * setting.values
    units = max(step, needles)
    used = 0
    while used + run.gen_length < run.max_length:
        drawn = _draw(setting, source, rng, units)
        used = source.count(drawn.input + " ".join(drawn.outputs))
        if used + run.gen_length > run.max_length:
            units -= step
            break
        if setting.haystack == "essay" and units > len(source.words):
            units = len(source.words)
            break
        if units > run.max_length:
            raise UserError(f"the tokenizer counts {used} tokens in {units} haystack units: RULER cannot be sized")
        units += step
    return max(units, needles)


def _fitting(
    setting: Setting, run: LmEvalRun, source: LmEvalSource, rng: random.Random, index: int, sizes: range
) -> LmEvalSample | None:
    for units in sizes:
        try:
            drawn = _draw(setting, source, rng, units)
        except ValueError:  # fewer lines than needles: noticed only after keys and values were drawn
            continue
        length = source.count(drawn.input) + run.gen_length
        if length <= run.max_length:
            prefix = setting.answer_prefix(drawn.query)
            return LmEvalSample(index, drawn.input, drawn.outputs, length, prefix, drawn.needles)
    return None


@dataclass(frozen=True)
class _Drawn:
    input: str
    outputs: tuple[str, ...]
    query: str
    needles: tuple[str, ...]


def _draw(setting: Setting, source: LmEvalSource, rng: random.Random, units: int) -> _Drawn:
    """One sample, by draws in lm-eval's order: keys and values, haystack, queries."""
    # lm-eval raises the number of keys to that of queries; SETTINGS has it raised already
    facts: list[tuple[str, list[str]]] = []
    for _ in range(setting.keys):
        key = draw_standard(setting.key, rng)
        facts.append((key, [draw_standard(setting.value, rng) for _ in range(setting.values)]))
    needles = [setting.needle(key, value) for key, values in facts for value in values]
    random.Random(_NEEDLE_ORDER_SEED).shuffle(needles)
    context = (_essay if setting.haystack == "essay" else _lines)(setting, source, rng, units, needles)
    asked = [facts[i] for i in rng.sample(range(setting.keys), setting.queries)]
    keys = [key for key, _ in asked]
    query = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    return _Drawn(
        input=f"{setting.head()}\n{context}\n{setting.question(query)}",
        outputs=tuple(value for _, values in asked for value in values),
        query=query,
        needles=tuple(setting.needle(key, value) for key, values in asked for value in values),
    )


def _essay(setting: Setting, source: LmEvalSource, rng: random.Random, units: int, needles: list[str]) -> str:
    """The first words as sentences, a needle after each cut; empty parts leave lm-eval's doubled and edge spaces."""
    sentences = source.split(" ".join(source.words[:units]).strip())
    cuts = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    at = 0
    for cut, needle in zip(cuts, needles, strict=True):
        parts += [" ".join(sentences[at:cut]), needle]
        at = cut
    return " ".join([*parts, " ".join(sentences[at:])])


def _lines(setting: Setting, source: LmEvalSource, rng: random.Random, units: int, needles: list[str]) -> str:
    if setting.haystack == "noise":
        lines = [NOISE] * units
    else:
        lines = [
            setting.needle(draw_standard(setting.key, rng), draw_standard(setting.value, rng)) for _ in range(units)
        ]
    places = sorted(rng.sample(range(units), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)
