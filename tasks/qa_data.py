"""SQuAD and HotpotQA as questions over one pool of documents, from the official files or from the hub.

The pool and what belongs to a question are NVIDIA/RULER's (`scripts/data/synthetic/qa.py`): documents are the distinct
paragraphs in sorted order; SQuAD's unanswerable questions are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench.errors import UserError, nearest
from dllm_bench.hub_access import hub_rows

__all__ = ["QaData", "Question", "check_data", "data_identity", "load_qa"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One question; documents are numbers in the pool.

    Attributes:
        needed: documents that must stand in the context.
        support: those of them that hold the answer.
        near: documents that are taken first to fill the context: the other paragraphs of the article.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    support: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QaData:
    """A data set.

    Attributes:
        name: where it comes from, with the first 8 hex digits of the SHA-256 of what is used of it.
        left_out: questions without an answer.
    """

    name: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    left_out: int


@dataclass(frozen=True)
class _Raw:
    """A question with its documents as texts."""

    id: str
    text: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    support: tuple[str, ...]
    near: tuple[str, ...] = ()


class _Malformed(Exception):
    """Says what is missing where."""


@dataclass(frozen=True)
class _Source:
    """A data set: official file names, hub name, and readers of the file's content and of the hub's rows."""

    title: str
    files: tuple[str, ...]
    hub: tuple[str, ...]
    read_file: Callable[[Any], Iterator[_Raw]]
    read_rows: Callable[[Iterable[Record]], Iterator[_Raw]]


def check_data(path: str | None) -> None:
    """Raises UserError where the file or folder is missing; names the nearest one beside it."""
    if path is None or Path(path).exists():
        return
    siblings = [p.name for p in Path(path).parent.iterdir()] if Path(path).parent.is_dir() else []
    near = nearest(Path(path).name, siblings)
    names = " or ".join(source.files[0] for source in _SOURCES.values())
    hint = f"did you mean '{Path(path).parent / near}'?" if near else f"give {names}, or their folder, or leave it out"
    raise UserError(f"data '{path}' does not exist: {hint}")


def data_identity(path: str) -> str:
    """Names the file, or the official files in the folder, with a hash of their bytes."""
    names = [name for source in _SOURCES.values() for name in source.files]
    files = [Path(path)] if Path(path).is_file() else [p for name in names if (p := Path(path) / name).is_file()]
    return ",".join(f"{file.name}:{hashlib.sha256(_bytes(file)).hexdigest()[:16]}" for file in files)


@cache
def load_qa(subset: str, path: str | None) -> QaData:
    """The data of "squad" or "hotpot": from an official file, a folder that holds it, or with None from the hub.

    Raises UserError where it cannot be had (names both ways) or is not in the official format (names the place).
    """
    source = _SOURCES[subset]
    where = f"file:{_file(subset, path).name}" if path is not None else f"hub:{source.hub[0]}"
    raw = _from_file(subset, path) if path is not None else _from_hub(subset)
    pool = sorted({document for question in raw for document in (*question.needed, *question.near)})
    numbers = {document: k for k, document in enumerate(pool)}

    def numbered(documents: Iterable[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(numbers[document] for document in documents))

    questions = [
        Question(q.id, q.text, q.answers, numbered(q.needed), numbered(q.support), numbered(q.near))
        for q in raw
        if q.answers
    ]
    if not questions:
        raise UserError(f"{source.title} data from {where} hold no question with an answer")
    digest = hashlib.sha256(json.dumps([pool, [(q.text, q.answers) for q in questions]]).encode()).hexdigest()
    return QaData(f"{where}:{digest[:8]}", tuple(pool), tuple(questions), len(raw) - len(questions))


def _from_file(subset: str, path: str) -> list[_Raw]:
    file, source = _file(subset, path), _SOURCES[subset]
    try:
        content = json.loads(_bytes(file).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"data '{file}' is not UTF-8 text: byte {error.start} is invalid") from None
    except json.JSONDecodeError as error:
        raise UserError(f"data '{file}' is not JSON: line {error.lineno}: {error.msg}") from None
    try:
        return list(source.read_file(content))
    except _Malformed as error:
        hint = _other(subset, content) or f"; {_ways(subset)}"
        raise UserError(f"data '{file}' is not in the format of {source.title}: {error}{hint}") from None


def _other(subset: str, content: Any) -> str:
    """A hint where the file is one of the other data set."""
    for name, source in _SOURCES.items():
        if name != subset:
            try:
                next(source.read_file(content), None)
            except _Malformed:
                continue
            return f"; it is {source.title}'s: --subset {name}"
    return ""


def _from_hub(subset: str) -> list[_Raw]:
    source = _SOURCES[subset]
    try:
        return list(source.read_rows(hub_rows(*source.hub, split="validation")))
    except KeyError as error:
        raise UserError(f"the hub's data set {source.hub[0]} has no column {error}; {_ways(subset)}") from None
    except Exception as error:  # the hub's client raises many kinds, all of which mean that the data are not to be had
        raise UserError(
            f"ruler_qa {subset} needs data: {source.hub[0]} could not be loaded ({error}); {_ways(subset)}"
        ) from None


def _ways(subset: str) -> str:
    """The two ways to have the data."""
    source = _SOURCES[subset]
    return (
        f"let the hub's {source.hub[0]} be fetched once with the network on, or give the official {source.files[0]} or "
        "its folder with --task-set data=PATH"
    )


def _file(subset: str, path: str) -> Path:
    if not Path(path).is_dir():
        return Path(path)
    names = _SOURCES[subset].files
    found = [Path(path) / name for name in names if (Path(path) / name).is_file()]
    if not found:
        raise UserError(f"data folder '{path}' has no {' or '.join(names)}; {_ways(subset)}")
    return found[0]


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"data '{file}' cannot be read: {error.strerror}") from None


def _get(record: Any, field: str, kind: type, where: str) -> Any:
    if not isinstance(record, Mapping) or field not in record:
        raise _Malformed(f"{where} has no '{field}'")
    if not isinstance(record[field], kind):
        raise _Malformed(f"'{field}' of {where} is not a {'text' if kind is str else kind.__name__}")
    return record[field]


def _squad_file(content: Any) -> Iterator[_Raw]:
    for a, article in enumerate(_get(content, "data", list, "the file")):
        paragraphs = _get(article, "paragraphs", list, f"data[{a}]")
        texts = [_get(p, "context", str, f"data[{a}].paragraphs[{i}]") for i, p in enumerate(paragraphs)]
        for i, (paragraph, text) in enumerate(zip(paragraphs, texts, strict=True)):
            place = f"data[{a}].paragraphs[{i}]"
            others = tuple(other for other in texts if other != text)
            for k, question in enumerate(_get(paragraph, "qas", list, place)):
                at = f"{place}.qas[{k}]"
                answers = tuple(
                    _get(answer, "text", str, f"{at}.answers[{n}]")
                    for n, answer in enumerate(_get(question, "answers", list, at))
                )
                yield _Raw(
                    id=_get(question, "id", str, at),
                    text=_get(question, "question", str, at),
                    answers=() if question.get("is_impossible") else _spoken(answers),
                    needed=(text,),
                    support=(text,),
                    near=others,
                )


def _squad_rows(rows: Iterable[Record]) -> Iterator[_Raw]:
    rows = list(rows)
    articles: dict[str, dict[str, None]] = {}
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = None
    for row in rows:
        text = row["context"]
        others = tuple(other for other in articles[row["title"]] if other != text)
        yield _Raw(row["id"], row["question"], _spoken(row["answers"]["text"]), (text,), (text,), others)


def _hotpot_file(content: Any) -> Iterator[_Raw]:
    if not isinstance(content, list):
        raise _Malformed("the file is not a list of questions")
    for i, question in enumerate(content):
        at = f"question {i}"
        for n, pair in enumerate(_get(question, "context", list, at)):
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list)):
                raise _Malformed(f"context[{n}] of {at} is not a pair of title and sentences")
        facts = _get(question, "supporting_facts", list, at)
        yield _hotpot(
            _get(question, "_id", str, at),
            _get(question, "question", str, at),
            _get(question, "answer", str, at),
            [(str(title), "".join(map(str, sentences))) for title, sentences in question["context"]],
            {str(fact[0]) for fact in facts if fact},
        )


def _hotpot_rows(rows: Iterable[Record]) -> Iterator[_Raw]:
    for row in rows:
        context = zip(row["context"]["title"], map("".join, row["context"]["sentences"]), strict=True)
        yield _hotpot(row["id"], row["question"], row["answer"], list(context), set(row["supporting_facts"]["title"]))


def _hotpot(key: str, text: str, answer: str, context: list[tuple[str, str]], titles: set[str]) -> _Raw:
    documents = tuple(f"{title}\n{body}" for title, body in context)
    support = tuple(f"{title}\n{body}" for title, body in context if title in titles)
    return _Raw(key, text, _spoken([answer]), documents, support or documents)


def _spoken(answers: Iterable[str]) -> tuple[str, ...]:
    """The answers without empty ones, which any prediction would contain."""
    return tuple(answer for answer in answers if answer.strip())


_SOURCES = {
    "squad": _Source("SQuAD 2.0", ("dev-v2.0.json", "squad.json"), ("rajpurkar/squad_v2",), _squad_file, _squad_rows),
    "hotpot": _Source(
        "HotpotQA",
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        ("hotpotqa/hotpot_qa", "distractor"),
        _hotpot_file,
        _hotpot_rows,
    ),
}
