"""Solves RULER's vt, cwe and fwe from the prompt alone, and checks what holds for each of their samples."""

from __future__ import annotations

import re
from collections import Counter

from ruler_codecs import BpeCodec, leading_space_codec, word_codec

from dllm_bench.running.task import Task
from dllm_bench.tasks.fitting import FILL

CODECS = {"bpe": BpeCodec, "word": word_codec, "leading_space": leading_space_codec}
BUDGETS = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
HEAD = "Below is a numbered list of words. In these words, some appear more often than others. "


def make(task: Task, index: int, ctx: int, *, gen_length: int | None = None, seed: int = 0):
    gen_length = BUDGETS[task.name] if gen_length is None else gen_length
    return task.sample(task.default_subset, index, ctx=ctx, gen_length=gen_length, seed=seed)


def solve_vt(text: str) -> set[str]:
    """Follows the assignments of the last problem in the text."""
    *_, problem = text.split(INSTRUCTION)
    value = re.search(r"assigned the value (\d+) in the text above", problem)[1]
    known = {value}
    # assignments may be read in any order: once more as long as something is found
    pairs = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", problem, re.MULTILINE)
    while grown := {name for name, source in pairs if source in known} - known:
        known |= grown
    return known - {value}


def listed(problem: str) -> list[str]:
    numbers, words = zip(*re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", problem), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    return list(words)


def solve_cwe(text: str, count: int) -> set[str]:
    """Counts the words of the last list in the text."""
    *_, problem = text.split("Memorize the ones that appear most often.\n")
    counts = Counter(listed(problem.split("\nQuestion:")[0])).most_common()
    assert len(counts) == count or counts[count - 1][1] > counts[count][1]
    return {word for word, _ in counts[:count]}


def solve_fwe(text: str) -> set[str]:
    """Counts the coded words; the third must come more often than the fourth."""
    coded = re.search(r"appeared coded words\. (.*)\nQuestion:", text)[1].split(" ")
    counts = Counter(word for word in coded if set(word) != {"."}).most_common()
    assert len(counts) == 3 or counts[2][1] > counts[3][1]
    return {word for word, _ in counts[:3]}


def check(task: Task, sample, count: int = 10) -> str:
    """Everything that holds for each sample; returns its text."""
    codec, ctx = task.codec, sample.nominal_ctx
    assert FILL * ctx <= sample.actual_ctx <= ctx, sample.meta
    assert sample.meta["fill"] == sample.actual_ctx / ctx
    text = codec.decode(sample.prompt_ids)
    [(question, end)], [affix] = sample.spans["question"], sample.spans["affix"]
    assert end == len(sample.prompt_ids) and affix == (0, question)
    assert codec.decode(sample.prompt_ids[question:end]).strip().startswith("Question: ")
    solved = {
        "ruler_vt": solve_vt,
        "ruler_cwe": lambda text: solve_cwe(text, count),
        "ruler_fwe": solve_fwe,
    }[task.name](text)
    assert set(sample.references) == solved and len(sample.references) == len(solved)
    assert task.score(sample, f"They are {', '.join(solved)}.") == 1.0
    return text
