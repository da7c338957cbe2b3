"""Every task keeps its lengths: prompt and budget fit, and no truncation ever reaches the question.

A task that is registered later is covered as it is. Subsets whose data is not here are skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from offline import block_network
from ruler_codecs import TEMPLATE, word_codec

from dllm_bench.errors import UserError
from dllm_bench.models.hub import load_info
from dllm_bench.running.task import TASKS, Answer, Codec, Sample, Task

LARGE = 8192
CODECS: dict[str, Callable[[], Codec]] = {
    "llada": lambda: load_info("tiny").codec,
    "plain": lambda: load_info("tiny", chat_template="plain").codec,
    "words": lambda: word_codec(TEMPLATE),
}
# the package's own tasks and those of installed packages; not what other test files register
NAMES = [name for name in TASKS.names() if not TASKS.get(name).__module__.startswith(("test_", "fakes"))]
SUBSETS = [(name, subset) for name in NAMES for subset in TASKS.get(name).subsets]


@pytest.mark.parametrize(("name", "subset"), SUBSETS)
@pytest.mark.parametrize("codec", CODECS)
def test_lengths(name: str, subset: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_network(monkeypatch)
    task = TASKS.get(name)(CODECS[codec]())
    try:
        task.fetch(subset)
    except UserError as error:
        pytest.skip(str(error))
    check_lengths(task, subset)


def check_lengths(task: Task, subset: str) -> None:
    """Checks samples from the smallest context to a large one, with the official budget and a small one."""
    size = task.size(subset)
    for gen_length in (task.budget(subset), 8):
        for index in (0, 1) if size is None or size > 1 else (0,):
            if task.ctx == "none":
                _check_sample(task.sample(subset, index, ctx=None, gen_length=gen_length, seed=0), None, gen_length)
            else:
                _check_contexts(task, subset, index, gen_length)


def _check_contexts(task: Task, subset: str, index: int, gen_length: int) -> None:
    def made(ctx: int) -> Sample:
        return task.sample(subset, index, ctx=ctx, gen_length=gen_length, seed=0)

    for ctx in (1, gen_length, gen_length + 1):
        with pytest.raises(UserError) as refused:
            made(ctx)
        named = re.search(r"(?:minimum|nearest valid)\D{0,20}(\d+)", str(refused.value))
        assert named and int(named[1]) > ctx, f"names no minimum above {ctx}: {refused.value}"
    least, large = int(named[1]), made(LARGE)
    for ctx in (least, least + 1, least + 37, 2 * least, 2048):
        if ctx >= least:
            sample = made(ctx)
            _check_sample(sample, ctx, gen_length)
            _check_frame(sample, large, task.codec)


def _check_sample(sample: Sample, ctx: int | None, gen_length: int) -> None:
    assert sample.gen_length == gen_length and sample.prompt_ids
    assert ctx is None or sample.actual_ctx <= ctx, f"{sample.actual_ctx} tokens for a context of {ctx}"
    for name, ranges in sample.spans.items():
        for start, stop in ranges:
            assert 0 <= start <= stop <= len(sample.prompt_ids), f"span {name} {start}:{stop} is not in the prompt"
    assert all(start < stop for start, stop in sample.spans.get("question", ())), "the question is empty"


def _check_frame(sample: Sample, large: Sample, codec: Codec) -> None:
    """A short context begins and ends as a large one does, and asks the same."""
    pair = sample.prompt_ids, large.prompt_ids
    assert _common(*pair), "the head is cut off"
    assert _common(*(ids[::-1] for ids in pair)), "the tail is cut off"
    few, many = ([s.prompt_ids[a:b] for a, b in s.spans.get("question", ())] for s in (sample, large))
    assert len(few) == len(many)
    for short, long in zip(few, many, strict=True):
        if sample.references == large.references:
            assert short == long, "the question is not whole"
            continue
        # another question of the same wording
        one, other = (Counter(codec.decode(ids).split()) for ids in (short, long))
        assert 2 * (one & other).total() >= other.total(), f"the question is not whole: {codec.decode(short)!r}"


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the beginning that both have."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class CutTask(Task):
    """Cuts a document so that the prompt fits; `fault` says what it does wrong."""

    name, version, summary, source = "cut_task", 1, "asks about a document", "made up"
    subsets, default_subset, ctx = ("only",), "only", "optional"
    fault = ""

    def budget(self, subset: str) -> int:
        return 16

    def size(self, subset: str) -> int | None:
        return 1

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        return {"score": 1.0}

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        assert ctx is not None
        head, question = self.codec.encode("Read this: "), self.codec.encode(" What does it say at its end? Answer:")
        least = len(head) + len(question) + gen_length
        if ctx < least:
            raise UserError("too small" if self.fault == "minimum" else f"ctx {ctx} is too small: minimum {least}")
        document = self.codec.encode(" ".join(f"line {i}." for i in range(2000)))
        room = ctx - least
        fault = self.fault if ctx < 4096 else ""
        ids = [*head, *document[:room], *question]
        cut = {
            "budget": [*head, *document[: room + gen_length], *question],
            "right": [*head, *document, *question][: ctx - gen_length],
            "left": [*head, *document, *question][gen_length - ctx :],
            "question": [*head, *document[: room + 3], *question[:6], *question[9:]],
        }.get(fault, ids)
        start = len(cut) - len(question)
        spans = {"question": ((max(0, start + 3 if fault == "question" else start), len(cut)),)}
        return Sample("cut_task", subset, index, seed, tuple(cut), ("x",), gen_length, ctx, (), spans)


@pytest.mark.parametrize("codec", CODECS)
def test_a_task_that_cuts_its_document_passes(codec: str) -> None:
    check_lengths(CutTask(CODECS[codec]()), "only")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("minimum", "names no minimum"),
        ("budget", r"\d+ tokens for a context of"),
        ("right", "the question is not whole|the tail is cut off"),
        ("left", "the head is cut off"),
        ("question", "the question is not whole"),
    ],
)
def test_a_task_that_cuts_anything_else_does_not(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutTask, "fault", fault)
    with pytest.raises(AssertionError, match=message):
        check_lengths(CutTask(CODECS["llada"]()), "only")
