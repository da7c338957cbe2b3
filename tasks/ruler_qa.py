"""RULER's question answering (qa): a question about documents among many others.

Wording and the choice of documents are NVIDIA/RULER's (`scripts/data/synthetic/qa.py`): the question's own documents,
then others of the same article, then any; all shuffled, and repeated where the data are too short. Here a part of one
more document fills the length to the token, and random draws are private; see `ruler.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from dllm_bench.errors import UserError
from dllm_bench.options import Options, option
from dllm_bench.running.task import Answer, Codec, Sample
from dllm_bench.tasks.draft import Frame, Whole
from dllm_bench.tasks.draws import permuted, private_random, shuffled
from dllm_bench.tasks.fitting import Asked, fit_part
from dllm_bench.tasks.qa_data import QaData, Question, check_data, data_identity, load_qa
from dllm_bench.tasks.ruler_scoring import string_match_part
from dllm_bench.tasks.ruler_task import RulerTask

__all__ = ["QaOptions", "RulerQa"]

_CANDIDATES = 8
_ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class QaOptions(Options):
    """Options of ruler_qa."""

    data: str | None = option(
        None,
        "the official file (dev-v2.0.json of SQuAD, hotpot_dev_distractor_v1.json of HotpotQA) or a folder that holds "
        "it; from the hub if not given",
    )

    def check(self) -> None:
        check_data(self.data)


class _Documents(Whole):
    """The question's documents and n more, in random order; `rest` is the beginning of one more."""

    trial = 8

    def __init__(self, codec: Codec, frame: Frame, data: QaData, question: Question, *facts: object) -> None:
        super().__init__(codec, frame)
        self._data, self._question = data, question
        self._numbers: list[int] = list(question.needed)
        self._more = self._others(private_random(*facts, "documents"))
        self._keys: list[float] = []
        self._order = private_random(*facts, "order")

    def text(self, n: int, rest: str = "") -> tuple[str, list[tuple[int, int]]]:
        count = len(self._question.needed) + n
        texts = [self._document(k) for k in range(count)] + ([rest] if rest else [])
        while len(self._keys) < len(texts):
            self._keys.append(self._order.random())
        parts: list[str] = []
        starts: dict[int, int] = {}
        at = len(self._frame.head)
        for place, k in enumerate(sorted(range(len(texts)), key=self._keys.__getitem__), 1):
            title = f"Document {place}:\n"
            starts[k] = at + len(title)
            parts.append(title + texts[k])
            at += len(parts[-1]) + len(self._frame.separator)
        own = [self._question.needed.index(number) for number in self._question.support]
        ranges = [(starts[k], starts[k] + len(texts[k])) for k in own]
        return f"{self._frame.head}{self._frame.separator.join(parts)}\n\n{self._frame.question}", ranges

    def facts(self, n: int, rest: str) -> dict[str, Any]:
        return {"documents": len(self._question.needed) + n + bool(rest), "cut_unit": bool(rest)}

    def fitted(self, asked: Asked) -> tuple[int, str] | None:
        """As many documents as fit, and a part of one more where these fill too little.

        Where not even a heading fits behind n documents, one of these gives way to a part of a longer one.
        """
        n = self.whole_units(asked)
        if n is None:
            return None
        if len(self.encode(n)) >= asked.least:
            return n, ""
        for whole in (n, n - 1)[: n + 1]:
            for k in range(n, n + _CANDIDATES):
                rest = self._part(whole, k, asked)
                if rest and len(self.encode(whole, rest)) >= asked.least:
                    return whole, rest
        return n, ""

    def needs(self, asked: Asked) -> int:
        """Ids of a prompt with the question's own documents, and anything behind them where they fill too little."""
        own = len(self.encode(0))
        return own if own >= asked.least else len(self.encode(0, "x"))

    def _part(self, whole: int, k: int, asked: Asked) -> str:
        text = self._document(len(self._question.needed) + k)
        return fit_part(lambda rest: len(self.encode(whole, rest)), text, asked.limit, asked.least)

    def _document(self, k: int) -> str:
        while len(self._numbers) <= k:
            self._numbers.append(next(self._more))
        return self._data.documents[self._numbers[k]]

    def _others(self, rng: Random) -> Iterator[int]:
        """Numbers of documents without end: of the same article, then of all others, then all again and again."""
        near = shuffled([k for k in self._question.near if k not in self._question.needed], rng)
        yield from near
        known = {*near, *self._question.needed}
        yield from (k for k in permuted(len(self._data.documents), rng) if k not in known)
        while True:
            yield from permuted(len(self._data.documents), rng)


@dataclass
class _Scan:
    """The questions that fit into a length, as far as they were looked for, and the fewest ids that any needs."""

    found: list[int] = field(default_factory=list)
    looked: int = 0
    least: int | None = None


class RulerQa(RulerTask):
    """RULER's qa_1 (squad) and qa_2 (hotpot): any of the reference answers counts.

    Sample k asks the k-th question in the data's order among those whose own documents fit into the context; these
    are never cut. "needle" spans: the documents that hold the answer. Meta besides: question_id, documents, cut_unit
    (whether a part of one more document was needed), data.
    """

    name: ClassVar[str] = "ruler_qa"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "answer a question from documents among many others (RULER qa: SQuAD, HotpotQA)"
    subsets: ClassVar[tuple[str, ...]] = ("squad", "hotpot")
    default_subset: ClassVar[str] = "squad"
    options_class: ClassVar[type[Options]] = QaOptions
    tokens: ClassVar[int] = 32

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, QaOptions):
            raise TypeError("ruler_qa takes QaOptions")
        self._path = self.options.data
        self._scans: dict[tuple[str, int, int, int], _Scan] = {}

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Sample `index` for `ctx` tokens. Raises UserError where no question, or not so many questions, fit."""
        self.check_subset(subset)
        asked = Asked(subset, index, self._length(ctx), gen_length, seed)
        data = self._data(subset)
        number = self._number(asked, data)
        question, draft = data.questions[number], self._draft(asked, data, number)
        size = draft.fitted(asked)
        assert size is not None  # the question was chosen for that
        prompt = draft.prompt(*size)
        meta = {"question_id": question.id, **draft.facts(*size), "data": data.name}
        return self._finished(asked, prompt, prompt.needles, question.answers, meta)

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """1 where the answer names any of the references (NVIDIA's string_match_part; lm-eval takes their mean)."""
        return {"score": string_match_part(answer.prediction, answer.references)}

    def size(self, subset: str) -> int | None:
        """Questions with an answer."""
        self.check_subset(subset)
        return len(self._data(subset).questions)

    def fetch(self, subset: str) -> list[str]:
        """Loads and checks the questions and documents."""
        self.check_subset(subset)
        data = self._data(subset)
        return [f"{subset}: {len(data.questions)} questions, {len(data.documents)} documents from {data.name}"]

    def data(self, subset: str) -> str | None:
        """The user's own files with a hash of their content."""
        return None if self._path is None else data_identity(self._path)

    def _data(self, subset: str) -> QaData:
        return load_qa(subset, self._path)

    def _draft(self, asked: Asked, data: QaData, number: int) -> _Documents:
        question = data.questions[number]
        frame = Frame(
            head=f"{_ORDER}\n\nThe following are given documents.\n\n",
            question=f"{_ORDER}\n\nQuestion: {question.text}",
            answer_prefix=f"{self._joint}Answer:",
            separator="\n\n",
        )
        facts = (self.name, self.version, asked.subset, asked.ctx, number, asked.seed)
        return _Documents(self.codec, frame, data, question, *facts)

    def _number(self, asked: Asked, data: QaData) -> int:
        """Number of the question that is the index-th to fit."""
        scan = self._scans.setdefault((asked.subset, asked.ctx, asked.gen_length, asked.seed), _Scan())
        while len(scan.found) <= asked.index and scan.looked < len(data.questions):
            needed = self._draft(asked, data, scan.looked).needs(asked)
            if needed <= asked.limit:
                scan.found.append(scan.looked)
            scan.least = needed if scan.least is None else min(needed, scan.least)
            scan.looked += 1
        if asked.index < len(scan.found):
            return scan.found[asked.index]
        if not scan.found:
            raise self._too_small(asked, (scan.least or 0) + asked.gen_length)
        raise UserError(
            f"{self.name} {asked.subset} has {len(scan.found)} questions whose documents fit into {asked.ctx} tokens, "
            f"so no sample {asked.index} (nearest valid: {len(scan.found) - 1})"
        )
