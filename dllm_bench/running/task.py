"""The task contract: what a task gives to the runner, and what it gets back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from dllm_bench.errors import choice
from dllm_bench.options import Options
from dllm_bench.registry import Registry

__all__ = ["TASKS", "Answer", "Choices", "Codec", "Sample", "Task"]


class Codec(Protocol):
    """Text to ids and back for one model: its tokenizer and its chat template (see `models/text.py`)."""

    def encode(self, text: str) -> list[int]:
        """Ids of bare text: no BOS, no template."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        """Final prompt ids: chat template around one user turn, then the answer prefix; BOS exactly once.

        Without `template`: the BOS of a bare prompt where the model has one, then both texts as they are.
        """

    def identity(self) -> str:
        """Hash of tokenizer and template: equal identities give equal ids."""


@dataclass(frozen=True)
class Choices:
    """Given answers whose likelihoods are asked for, where no text is.

    Attributes:
        pairs: ids of the context and of the answer behind it, one pair per choice.
        mc_num, batch, seed: of the estimate (see `dllm_bench.loglikelihood`).
        greedy: also ask whether greedy decoding, one token per pass, gives each answer.
    """

    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    mc_num: int = 128
    batch: int = 32
    seed: int = 0
    greedy: bool = False


@dataclass(frozen=True)
class Sample:
    """One question, as final ids.

    Attributes:
        prompt_ids: the whole prompt (template, context, question, answer prefix).
        references: accepted answers or parts of the answer, as the task's scorer wants them.
        gen_length: generation budget in tokens for which the length was fitted.
        nominal_ctx: the context length that was asked for; None where a task has no such axis.
        until: stop strings, applied to the decoded text.
        spans: named half-open ranges of prompt positions: each needle's ("needle"), and what other samples hold too, id
            by id ("affix", one range): methods that share state between requests make it once.
        meta: facts for the row that the task documents (needle depths in percent, haystack, truncated, …).
        lead: characters that an answer may begin with before a stop string counts.
        choices: answers to be judged by their likelihood; the text that is graded is then a JSON list with a pair
            [log-likelihood, greedy] for each.
    """

    task: str
    subset: str
    index: int
    seed: int
    prompt_ids: tuple[int, ...]
    references: tuple[str, ...]
    gen_length: int
    nominal_ctx: int | None = None
    until: tuple[str, ...] = ()
    spans: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    lead: str = ""
    choices: Choices | None = None

    @property
    def actual_ctx(self) -> int:
        """Tokens of the whole canvas: prompt ids and generation budget."""
        return len(self.prompt_ids) + self.gen_length


@dataclass(frozen=True)
class Answer:
    """An answer text with all that its score depends on: nothing else is needed to score it, now or years later.

    Attributes:
        prediction: cut at EOS and at the stop strings already.
        references: accepted answers, or parts of the answer.
        facts: what the task keeps of a sample beside them (`Sample.meta`): all_classes, length, …
    """

    prediction: str
    references: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Task(ABC):
    """A source of samples and their scorer. One instance serves one codec and one set of options.

    Every sample is a function of (subset, ctx, index, seed, options, codec) alone: no global random state, no order.

    Attributes:
        version: of the samples; it belongs to a row's key. scorer_version: of `grade`, which does not.
        metrics: names of what `grade` gives; the first is the score of a row.
        aliases: what stored predictions may call a field beside `prediction` and `references` -> which of these it is:
            the names that the data set's own files use.
        ctx: whether a context length is "needed", "optional" (the model's largest position if not given) or "none".
    """

    name: ClassVar[str]
    version: ClassVar[int]
    summary: ClassVar[str]
    source: ClassVar[str]
    subsets: ClassVar[tuple[str, ...]]
    default_subset: ClassVar[str]
    ctx: ClassVar[Literal["needed", "optional", "none"]] = "needed"
    metrics: ClassVar[tuple[str, ...]] = ("score",)
    scorer_version: ClassVar[int] = 1
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    options_class: ClassVar[type[Options]] = Options

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        self.codec = codec
        self.options = options if options is not None else self.options_class()

    @abstractmethod
    def budget(self, subset: str) -> int:
        """The official generation budget of the subset, in tokens."""

    @abstractmethod
    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Sample `index`. Raises UserError where the length is too small (names the minimum) or the data is missing."""

    @classmethod
    @abstractmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """Each metric of one answer, in 0..1."""

    @classmethod
    def aggregate(cls, subset: str, answers: Sequence[Answer], grades: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Each metric over many answers, in percent with two decimals, as the official scripts print it."""
        return {name: round(100 * sum(g[name] for g in grades) / len(grades), 2) for name in cls.metrics}

    @classmethod
    def check_subset(cls, subset: str) -> None:
        """Raises ChoiceError (names the nearest valid one) for a subset that does not exist."""
        if subset not in cls.subsets:
            raise choice(f"subset of task '{cls.name}'", subset, (*cls.subsets, *cls.groups()))

    @classmethod
    def groups(cls) -> Mapping[str, tuple[str, ...]]:
        """Names that stand for several subsets where a subset is asked for; "all" stands for all of them."""
        return {"all": cls.subsets} if cls.subsets and "all" not in cls.subsets else {}

    @classmethod
    def check_request(cls, subsets: Sequence[str], options: Options) -> None:
        """Raises UserError where subsets and options do not fit together; for subsets that only the options tell of."""

    def grades(self, sample: Sample, text: str) -> dict[str, float]:
        """Each metric of the answer text to a sample, in 0..1."""
        return self.grade(sample.subset, Answer(text, sample.references, sample.meta))

    def score(self, sample: Sample, text: str) -> float:
        """The first metric of an answer text (cut at EOS and at the stop strings already), in 0..1."""
        return self.grades(sample, text)[self.metrics[0]]

    def size(self, subset: str) -> int | None:
        """Number of samples; None where the task makes as many as asked for."""
        return None

    def default_ctx(self, subset: str, longest: int) -> int | None:
        """The context length in tokens where none was asked for; `longest` is the model's largest position."""
        return longest if self.ctx == "optional" else None

    def fetch(self, subset: str) -> list[str]:
        """Fetches and checks the subset's data, so that runs need no network afterwards; says what, a line per source.

        Raises UserError where it cannot be had, naming the ways to give it. Nothing to fetch: an empty list.
        """
        return []

    def data(self, subset: str) -> str | None:
        """Names the data that the options point to by a hash of its content; None where package and hub hold it all.

        It belongs to a row's key: an option that is the path of a file does not tell what is in the file.
        """
        return None


TASKS: Registry[Task] = Registry(
    "task",
    "dllm_bench.tasks",
    "dllm_bench.running.task:Task",
    {
        "ruler_niah": "dllm_bench.tasks.ruler:RulerNiah",
        "ruler_vt": "dllm_bench.tasks.ruler_vt:RulerVt",
        "ruler_cwe": "dllm_bench.tasks.ruler_cwe:RulerCwe",
        "ruler_fwe": "dllm_bench.tasks.ruler_fwe:RulerFwe",
        "ruler_qa": "dllm_bench.tasks.ruler_qa:RulerQa",
        "gsm8k": "dllm_bench.tasks.gsm8k:Gsm8k",
        "gsm8k_cot": "dllm_bench.tasks.gsm8k:Gsm8kCot",
        "longbench": "dllm_bench.tasks.longbench:LongBench",
        "lm_eval": "dllm_bench.tasks.lm_eval_source:LmEval",
    },
)
