"""RULER's needle-in-a-haystack tasks (niah), with samples that fill their context length to the token.

Wording, needles and depths are those of NVIDIA/RULER and lm-eval 0.4.13. Sizes and random draws are not: there, one
global random stream and steps of 25 lines or 500 words decide a sample; here a sample depends on its own numbers only,
and template, answer prefix and generation budget are counted, so that 98 % of the context are used and never more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from random import Random
from typing import Any, ClassVar, Literal

from dllm_bench.errors import UserError, choice
from dllm_bench.options import Options, option
from dllm_bench.running.task import Codec, Sample, Task
from dllm_bench.tasks.draft import Draft, Frame, Inseparable, Prompt, locate
from dllm_bench.tasks.fitting import fit
from dllm_bench.tasks.pieces import Pieces, UnitStream, answer_joint
from dllm_bench.tasks.ruler_compat import LmEvalRun, LmEvalSample, LmEvalSource, sample_stream
from dllm_bench.tasks.ruler_prompt import (
    NOISE,
    SETTINGS,
    Needles,
    Setting,
    draw_decoys,
    draw_needles,
    private_random,
)
from dllm_bench.tasks.ruler_scoring import string_match_all
from dllm_bench.tasks.ruler_text import HUB, Corpus, check_haystack, load_corpus, sentence_splitter

__all__ = ["FILL", "RulerNiah", "RulerOptions"]

FILL = 0.98
"""Share of the context length that a sample has to fill: prompt ids and generation budget."""

_PROBES = 32
_REDRAWS = 1000
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

    def check(self) -> None:
        check_haystack(self.haystack)


@dataclass(frozen=True)
class _Asked:
    """What a sample is asked for; all that decides it besides options and codec."""

    subset: str
    index: int
    ctx: int
    gen_length: int
    seed: int

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.subset]

    @property
    def size(self) -> tuple[str, int, int]:
        return self.subset, self.ctx, self.gen_length


class RulerNiah(Task):
    """The eight niah subsets of RULER.

    Spans: "needle" (one per reference, in their order) and "question" (the question and all behind it).
    Meta: needle_depths (percent of the haystack's tokens before each asked needle), haystack, splitter, fill,
    haystack_units (sentences or lines), cut_unit (whether a part of one more was needed), compat.
    """

    name: ClassVar[str] = "ruler_niah"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "find values hidden in a long text; eight RULER subsets, any context length"
    source: ClassVar[str] = "https://arxiv.org/abs/2404.06654"
    subsets: ClassVar[tuple[str, ...]] = tuple(SETTINGS)
    default_subset: ClassVar[str] = "single_1"
    options_class: ClassVar[type[Options]] = RulerOptions

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, RulerOptions):
            raise TypeError("ruler_niah takes RulerOptions")
        self._haystack, self._compat = self.options.haystack, self.options.compat
        self._pieces = Pieces(codec)
        self._joint = answer_joint(codec)
        self._streams: dict[str, UnitStream] = {}
        self._minima: dict[tuple[str, int], int] = {}
        self._sound: dict[tuple[str, int, int], bool] = {}
        self._lm_eval: dict[tuple[str, int, int, int], tuple[Iterator[LmEvalSample | None], list[LmEvalSample]]] = {}

    def budget(self, subset: str) -> int:
        """128 tokens for every niah subset."""
        self._setting(subset)
        return 128

    def minimum(self, subset: str, gen_length: int) -> int:
        """Smallest context length in tokens: needles, wording, template and budget, with an empty haystack."""
        key = (subset, gen_length)
        if key not in self._minima:
            setting = self._setting(subset)
            drawn = [draw_needles(setting, private_random(self.name, subset, "probe", i)) for i in range(_PROBES)]
            sizes = [len(self._draft(setting, needles, Random()).encode(0)) for needles in drawn]
            self._minima[key] = max(sizes) + gen_length
        return self._minima[key]

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Sample `index` for `ctx` tokens. Raises UserError below `minimum(subset, gen_length)`."""
        setting = self._setting(subset)
        if ctx is None:
            raise UserError("ruler_niah needs a context length in tokens (nearest valid: 4096)")
        if self._compat == "lm_eval":
            return self._lm_eval_sample(_Asked(subset, index, ctx, gen_length, seed))
        least = self.minimum(subset, gen_length)
        if ctx < least:
            raise UserError(
                f"a context of {ctx} tokens is too small for ruler_niah {subset} with a generation budget of "
                f"{gen_length}: the minimum is {least}"
            )
        asked = _Asked(subset, index, ctx, gen_length, seed)
        needles, prompt, (units, rest) = self._drawn(asked)
        spans = tuple(prompt.needles[i] for i in needles.asked)
        meta = {"haystack_units": units, "cut_unit": bool(rest), "compat": "none", **self._source(setting)}
        return self._finished(asked, prompt, spans, needles.references, meta)

    def score(self, sample: Sample, text: str) -> float:
        """Share of the hidden values that the answer names (NVIDIA's string_match_all, as a share)."""
        return string_match_all(text, sample.references)

    def data(self) -> str | None:
        """The user's own haystack: its name, the hash of its text, and how its sentences are found."""
        if self._haystack in (None, HUB):
            return None
        return f"{self._corpus.name}:{self._corpus.splitter}"

    def _setting(self, subset: str) -> Setting:
        if subset not in SETTINGS:
            raise choice("subset of ruler_niah", subset, SETTINGS)
        return SETTINGS[subset]

    @cached_property
    def _corpus(self) -> Corpus:
        return load_corpus(self._haystack)

    def _source(self, setting: Setting) -> dict[str, Any]:
        if setting.haystack != "essay":
            return {"haystack": setting.haystack, "splitter": None}
        return {"haystack": self._corpus.name, "splitter": self._corpus.splitter}

    def _finished(
        self,
        asked: _Asked,
        prompt: Prompt,
        needles: tuple[tuple[int, int], ...],
        references: tuple[str, ...],
        meta: dict[str, Any],
    ) -> Sample:
        first, last = prompt.context
        depths = [round(100 * (start - first) / (last - first), 2) for start, _ in needles]
        return Sample(
            task=self.name,
            subset=asked.subset,
            index=asked.index,
            seed=asked.seed,
            prompt_ids=tuple(prompt.ids),
            references=references,
            gen_length=asked.gen_length,
            nominal_ctx=asked.ctx,
            spans={"needle": needles, "question": ((last, len(prompt.ids)),)},
            meta={"needle_depths": depths, "fill": (len(prompt.ids) + asked.gen_length) / asked.ctx, **meta},
        )

    def _drawn(self, asked: _Asked) -> tuple[Needles, Prompt, tuple[int, str]]:
        """Needles are drawn again where their keys are so long that not even an empty haystack fits."""
        for attempt in range(_REDRAWS):
            facts = (self.name, self.version, asked.subset, asked.ctx, asked.index, asked.seed, attempt)
            needles = draw_needles(asked.setting, private_random(*facts))
            draft = self._draft(asked.setting, needles, private_random(*facts, "decoys"))
            checked = asked.index == 0 or private_random(*facts, "check").random() < _CHECKED_SHARE
            filled = self._filled(draft, asked, checked)
            if filled:
                return needles, *filled
        raise UserError(
            f"no needles of ruler_niah {asked.subset} fit into {asked.ctx} tokens: give at least {asked.ctx + 64}"
        )

    def _draft(self, setting: Setting, needles: Needles, rng: Random) -> Draft:
        query = needles.query
        frame = Frame(
            f"{setting.head()}\n",
            setting.question(query),
            self._joint + setting.answer_prefix(query),
            setting.separator,
        )
        stream = self._stream(setting, needles, rng)
        return Draft(self.codec, self._pieces, frame, stream, needles.sentences, needles.places)

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

    def _filled(self, draft: Draft, asked: _Asked, checked: bool) -> tuple[Prompt, tuple[int, str]] | None:
        """The prompt, put together from pieces where that is right, else by encoding the whole text for each try."""
        decoys = asked.setting.haystack == "needles"
        if decoys or self._is_sound(asked):
            try:
                size = self._fit(draft, asked, pieces=True)
                if size is None:
                    return None
                prompt = draft.assemble(*size)
                if not (decoys or checked) or list(prompt.ids) == draft.encode(*size):
                    return prompt, size
            except Inseparable:
                pass
        size = self._fit(draft, asked, pieces=False)
        return (draft.prompt(*size), size) if size else None

    def _fit(self, draft: Draft, asked: _Asked, *, pieces: bool) -> tuple[int, str] | None:
        def size(n: int, rest: str) -> int:
            return len(draft.assemble(n, rest).ids if pieces else draft.encode(n, rest))

        def spare(n: int, tokens: int) -> str:
            # a needle must be whole, so what is left beside needles is filled with noise
            return " ".join([NOISE] * (1 + tokens // 8)) if asked.setting.haystack == "needles" else draft.unit(n)

        limit = asked.ctx - asked.gen_length
        least = ceil(FILL * asked.ctx) - asked.gen_length
        return fit(size, spare, guess=draft.guess(limit), limit=limit, least=least)

    def _is_sound(self, asked: _Asked) -> bool:
        """Whether a prompt of this size has the ids of its pieces: tried once, on a sample of its own."""
        key = asked.size
        if key not in self._sound:
            needles = draw_needles(asked.setting, private_random(self.name, *key, "sound"))
            draft = self._draft(asked.setting, needles, Random())
            try:
                size = self._fit(draft, asked, pieces=True) or (0, "")
                self._sound[key] = list(draft.assemble(*size).ids) == draft.encode(*size)
            except Inseparable:
                self._sound[key] = False
        return self._sound[key]

    def _lm_eval_sample(self, asked: _Asked) -> Sample:
        """lm-eval's sample: the index-th that it keeps when it makes this subset and length first after seeding.

        Counts are of the bare text: neither LLaDA's nor Dream's tokenizer adds special tokens by itself.
        """
        key = (*asked.size, asked.seed)
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
