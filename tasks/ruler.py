"""RULER's needle-in-a-haystack tasks (niah), with samples that fill their context length to the token.

Wording, needles and depths are those of NVIDIA/RULER and lm-eval 0.4.13. Sizes and random draws are not: there, one
global random stream and steps of 25 lines or 500 words decide a sample; here a sample depends on its own numbers only,
and template, answer prefix and generation budget are counted, so that 98 % of the context are used and never more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, ClassVar, Literal

from dllm_bench.errors import UserError, choice
from dllm_bench.options import Options, option
from dllm_bench.running.task import Codec, Sample
from dllm_bench.tasks.draft import Draft, Frame, Prompt, locate
from dllm_bench.tasks.draws import private_random
from dllm_bench.tasks.filling import Filler
from dllm_bench.tasks.fitting import FILL, Asked
from dllm_bench.tasks.pieces import Pieces, UnitStream, common_prefix
from dllm_bench.tasks.ruler_compat import LmEvalRun, LmEvalSample, LmEvalSource, sample_stream
from dllm_bench.tasks.ruler_prompt import (
    NOISE,
    SETTINGS,
    Needles,
    Setting,
    draw_decoys,
    draw_needles,
    draw_questions,
)
from dllm_bench.tasks.ruler_task import PROBES, REDRAWS, RulerTask
from dllm_bench.tasks.ruler_text import HUB, Corpus, check_haystack, load_corpus, sentence_splitter

__all__ = ["FILL", "RulerNiah", "RulerOptions"]

_CHECKED_SHARE = 1 / 128
_SKIPS = 100


@dataclass(frozen=True)
class RulerOptions(Options):
    """Options of ruler_niah."""

    haystack: str | None = option(
        None,
        "text of the essay subsets: a UTF-8 file, a folder of text files, or 'hub' (lm-eval's essays, downloaded); "
        "the built-in text if not given",
    )
    compat: Literal["none", "lm_eval"] = option(
        "none", "'lm_eval' gives the samples that lm-eval 0.4.13 makes for the global seed, badly filled as they are"
    )

    questions: int = option(
        1,
        "samples in a row that share one haystack, each asked for another key: what a method makes of it once serves "
        "all of them (subsets with enough keys: multikey_1 up to 4, multikey_2 and multikey_3)",
        low=1,
    )

    def check(self) -> None:
        check_haystack(self.haystack)
        if self.compat != "none" and self.questions > 1:
            raise UserError(
                f"ruler_niah option compat={self.compat} asks one question per haystack: nearest valid is questions=1"
            )


@dataclass(frozen=True)
class _Asked(Asked):
    """All that decides a sample besides other options and codec."""

    setting: Setting
    questions: int = 1

    @property
    def haystack(self) -> int:
        """Number of the haystack."""
        return self.index // self.questions

    @property
    def facts(self) -> tuple[object, ...]:
        """All that the samples of one haystack have in common."""
        return self.subset, self.ctx, self.haystack, self.seed, self.gen_length, self.questions


@dataclass(frozen=True)
class _Haystack:
    """One haystack and its questions: for each the needles that it asks for and the prompt."""

    needles: list[Needles]
    prompts: list[Prompt]
    size: tuple[int, str]

    @property
    def affix(self) -> int:
        """Ids that all prompts begin with, up to the first question at most."""
        first, *others = self.prompts
        return min([first.context[1], *(common_prefix(first.ids, p.ids) for p in others)])


class RulerNiah(RulerTask):
    """The eight niah subsets of RULER.

    Spans: "needle" (one per reference, in their order), "question" (the question and all behind it) and "affix" (all
    before the question: the same ids in all samples of one haystack).
    Meta: needle_depths (percent of the haystack's tokens before each asked needle), haystack, splitter, fill,
    haystack_units (sentences or lines), cut_unit (whether a part of one more was needed), compat; and with several
    questions to a haystack: questions, question (its number). The longest of these questions decides the haystack's
    size, so the others may fill a few tokens less.
    """

    name: ClassVar[str] = "ruler_niah"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "find values hidden in a long text; eight RULER subsets, any context length"
    subsets: ClassVar[tuple[str, ...]] = tuple(SETTINGS)
    default_subset: ClassVar[str] = "single_1"
    tokens: ClassVar[int] = 128
    options_class: ClassVar[type[Options]] = RulerOptions

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, RulerOptions):
            raise TypeError("ruler_niah takes RulerOptions")
        self._haystack, self._compat = self.options.haystack, self.options.compat
        self._questions = self.options.questions
        self._pieces = Pieces(codec)
        self._streams: dict[str, UnitStream] = {}
        self._minima: dict[tuple[str, int], int] = {}
        self._filler = Filler()
        self._last: tuple[tuple[object, ...], _Haystack] | None = None
        self._lm_eval: dict[tuple[str, int, int, int], tuple[Iterator[LmEvalSample | None], list[LmEvalSample]]] = {}

    def budget(self, subset: str) -> int:
        """128 tokens for every niah subset."""
        self._setting(subset)
        return self.tokens

    def minimum(self, subset: str, gen_length: int) -> int:
        """Smallest context length in tokens: needles, wording, template and budget, with an empty haystack."""
        key = (subset, gen_length)
        if key not in self._minima:
            setting = self._setting(subset)
            rngs = [private_random(self.name, subset, "probe", i) for i in range(PROBES)]
            drawn = [draw_questions(setting, rng, self._questions) for rng in rngs]
            drafts = [draft for needles in drawn for draft in self._drafts(setting, needles, Random())]
            self._minima[key] = max(len(draft.encode(0)) for draft in drafts) + gen_length
        return self._minima[key]

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Sample `index` for `ctx` tokens. Raises UserError below `minimum(subset, gen_length)`."""
        setting = self._setting(subset)
        asked = _Asked(subset, index, self._length(ctx), gen_length, seed, setting, self._questions)
        if self._compat == "lm_eval":
            return self._lm_eval_sample(asked)
        least = self.minimum(subset, gen_length)
        if asked.ctx < least:
            raise self._too_small(asked, least)
        made = self._shared(asked)
        number = index % self._questions
        needles, prompt, (units, rest) = made.needles[number], made.prompts[number], made.size
        spans = tuple(prompt.needles[i] for i in needles.asked)
        meta = {"haystack_units": units, "cut_unit": bool(rest), "compat": "none", **self._source(setting)}
        if self._questions > 1:
            meta |= {"questions": self._questions, "question": number}
        return self._finished(asked, prompt, spans, needles.references, meta, made.affix)

    def fetch(self, subset: str) -> list[str]:
        """The text of essay haystacks that is not built in: read, or fetched from the hub, and split."""
        if self._haystack is None or self._setting(subset).haystack != "essay":
            return []
        name, text, sentences = self._corpus.name, self._corpus.text, self._corpus.sentences
        where = f"{len(text.encode()):,} bytes in {len(sentences):,} sentences ({self._corpus.splitter})"
        return [f"{name.rpartition(':')[0]}: {where}, SHA-256 {name.rpartition(':')[2]}…"]

    def data(self, subset: str) -> str | None:
        """A haystack that is not built in: its name, the hash of its text, and how its sentences are found."""
        if self._haystack is None or (self._haystack == HUB and self._setting(subset).haystack != "essay"):
            return None
        return f"{self._corpus.name}:{self._corpus.splitter}"

    def _setting(self, subset: str) -> Setting:
        if subset not in SETTINGS:
            raise choice("subset of ruler_niah", subset, SETTINGS)
        setting = SETTINGS[subset]
        most = setting.questions
        if most is None:
            # a haystack of needles: those that are not asked for now are decoys like the others
            return replace(setting, keys=max(setting.keys, self._questions))
        if self._questions > most:
            raise UserError(
                f"ruler_niah {subset} has keys for {most} question{'s' if most > 1 else ''} to a haystack, not for "
                f"{self._questions}: nearest valid is questions={most}; {_allowing(self._questions)}"
            )
        return setting

    @cached_property
    def _corpus(self) -> Corpus:
        return load_corpus(self._haystack)

    def _source(self, setting: Setting) -> dict[str, Any]:
        if setting.haystack != "essay":
            return {"haystack": setting.haystack, "splitter": None}
        return {"haystack": self._corpus.name, "splitter": self._corpus.splitter}

    def _shared(self, asked: _Asked) -> _Haystack:
        """The haystack with all its questions: kept until another one is asked for."""
        if self._questions == 1:
            return self._drawn(asked)
        if self._last is None or self._last[0] != asked.facts:
            self._last = asked.facts, self._drawn(asked)
        return self._last[1]

    def _drawn(self, asked: _Asked) -> _Haystack:
        """Needles are drawn again where their keys are so long that not even an empty haystack fits."""
        for attempt in range(REDRAWS):
            facts = (self.name, self.version, asked.subset, asked.ctx, asked.haystack, asked.seed, attempt)
            needles = draw_questions(asked.setting, private_random(*facts), self._questions)
            drafts = self._drafts(asked.setting, needles, private_random(*facts, "decoys"))
            checked = asked.haystack == 0 or private_random(*facts, "check").random() < _CHECKED_SHARE
            filled = self._filled(drafts, asked, checked)
            if filled and all(len(prompt.ids) <= asked.ctx - asked.gen_length for prompt in filled[0]):
                return _Haystack(needles, *filled)
        raise UserError(
            f"no needles of ruler_niah {asked.subset} fit into {asked.ctx} tokens: give at least {asked.ctx + 64}"
        )

    def _drafts(self, setting: Setting, asked: Sequence[Needles], rng: Random) -> list[Draft]:
        """One per question, over one haystack."""
        stream = self._stream(setting, asked[0], rng)
        # a needle must be whole, so what is left beside needles is filled with noise
        spare = (lambda tokens: " ".join([NOISE] * (1 + tokens // 8))) if setting.haystack == "needles" else None
        drafts = []
        for needles in asked:
            query = needles.query
            frame = Frame(
                f"{setting.head()}\n",
                setting.question(query),
                self._joint + setting.answer_prefix(query),
                setting.separator,
            )
            drafts.append(Draft(self.codec, self._pieces, frame, stream, needles.sentences, needles.places, spare))
        return drafts

    def _stream(self, setting: Setting, needles: Needles, rng: Random) -> UnitStream:
        """The haystack's units: decoys are the sample's own, noise and essay are shared by all samples."""
        if setting.haystack == "needles":
            decoy = draw_decoys(setting, needles, rng)
            return UnitStream(self._pieces, lambda k: decoy(k) + "\n", checked=False)
        if setting.haystack not in self._streams:
            if setting.haystack == "noise":
                stream = UnitStream(self._pieces, lambda k: NOISE + "\n", checked=True)
            else:
                # a corpus that is too short begins again, as in NVIDIA/RULER
                sentences = self._corpus.sentences
                stream = UnitStream(self._pieces, lambda k: " " + sentences[k % len(sentences)], checked=True)
            self._streams[setting.haystack] = stream
        return self._streams[setting.haystack]

    def _filled(
        self, drafts: Sequence[Draft], asked: _Asked, checked: bool
    ) -> tuple[list[Prompt], tuple[int, str]] | None:
        def probe() -> Draft:
            key = asked.subset, asked.ctx, asked.gen_length
            needles = draw_needles(asked.setting, private_random(self.name, *key, "sound"))
            return self._drafts(asked.setting, [needles], Random())[0]

        # decoys are new text in each sample, so each is compared with an encoding of the whole
        own = asked.setting.haystack == "needles"
        return self._filler.fill(drafts, asked, probe=None if own else probe, checked=checked)

    def _lm_eval_sample(self, asked: _Asked) -> Sample:
        """lm-eval's sample: the index-th that it keeps when it makes this subset and length first after seeding.

        Counts are of the bare text: neither LLaDA's nor Dream's tokenizer adds special tokens by itself.
        """
        key = asked.subset, asked.ctx, asked.gen_length, asked.seed
        if key not in self._lm_eval:
            words = self._corpus.text.split(" ") if asked.setting.haystack == "essay" else []
            source = LmEvalSource(lambda text: len(self.codec.encode(text)), words, sentence_splitter()[1])
            run = LmEvalRun(asked.subset, asked.ctx, gen_length=asked.gen_length)
            self._lm_eval[key] = (sample_stream(run, source, Random(asked.seed)), [])
        stream, made = self._lm_eval[key]
        skipped = 0
        while len(made) <= asked.index:
            one = next(stream)
            skipped = 0 if one else skipped + 1
            if one:
                made.append(one)
            elif skipped == _SKIPS:
                raise UserError(
                    f"lm-eval makes no sample of {asked.subset} for a context of {asked.ctx} tokens: "
                    f"the minimum is about {self.minimum(asked.subset, asked.gen_length)}"
                )
        return self._from_lm_eval(made[asked.index], asked)

    def _from_lm_eval(self, made: LmEvalSample, asked: _Asked) -> Sample:
        setting = asked.setting
        text, prefix = made.input, self._joint + made.gen_prefix
        ids = self.codec.wrap(text, prefix)
        starts = [text.index(needle) for needle in made.needles]
        ranges = [(start, start + len(needle)) for start, needle in zip(starts, made.needles, strict=True)]
        context = (text.index("\n") + 1, text.rindex("\n") + 1)
        *needles, span = locate(self.codec, text, prefix, ids, [*ranges, context])
        meta = {"compat": "lm_eval", **self._source(setting)}
        if setting.haystack == "essay":
            meta["splitter"] = sentence_splitter()[0]
        prompt = Prompt(ids, tuple(needles), span)
        return self._finished(asked, prompt, tuple(needles), made.outputs, meta)


def _allowing(questions: int) -> str:
    """The subsets that allow so many questions to a haystack, in words."""
    names = [name for name, setting in SETTINGS.items() if setting.questions is None or setting.questions >= questions]
    return f"{', '.join(names[:-1])} and {names[-1]} allow {questions}"
