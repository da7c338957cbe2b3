"""The task contract: what a task gives to the runner, and what it gets back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dllm_bench.options import Options
from dllm_bench.registry import Registry

__all__ = ["TASKS", "Codec", "Sample", "Task"]


class Codec(Protocol):
    """Text to ids and back for one model: its tokenizer and its chat template (see `models/text.py`)."""

    def encode(self, text: str) -> list[int]:
        """Ids of bare text: no BOS, no template."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""

    def wrap(self, user: str, answer_prefix: str = "") -> list[int]:
        """Final prompt ids: chat template around one user turn, then the answer prefix; BOS exactly once."""

    def identity(self) -> str:
        """Hash of tokenizer and template: equal identities give equal ids."""


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

    @property
    def actual_ctx(self) -> int:
        """Tokens of the whole canvas: prompt ids and generation budget."""
        return len(self.prompt_ids) + self.gen_length


class Task(ABC):
    """A source of samples and their scorer. One instance serves one codec and one set of options.

    Every sample is a function of (subset, ctx, index, seed, options, codec) alone: no global random state, no order.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    summary: ClassVar[str]
    source: ClassVar[str]
    subsets: ClassVar[tuple[str, ...]]
    default_subset: ClassVar[str]
    has_ctx: ClassVar[bool] = True
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

    @abstractmethod
    def score(self, sample: Sample, text: str) -> float:
        """Score in 0..1 of an answer text (cut at EOS and at the stop strings already)."""

    def size(self, subset: str) -> int | None:
        """Number of samples; None where the task makes as many as asked for."""
        return None

    def data(self) -> str | None:
        """Names the data that the options point to by a hash of its content; None where package and hub hold it all.

        It belongs to a row's key: an option that is the path of a file does not tell what is in the file.
        """
        return None


TASKS: Registry[Task] = Registry(
    "task",
    "dllm_bench.tasks",
    "dllm_bench.running.task:Task",
    {"ruler_niah": "dllm_bench.tasks.ruler:RulerNiah"},
)
